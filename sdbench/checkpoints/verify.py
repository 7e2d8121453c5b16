"""``sdbench verify``: whether a pruned checkpoint is what it claims to be, layer by layer and tensor by tensor.

Packed checkpoints, ours and the old bitmask ones, are judged by their masks; dense ones by their zeros. A dense checkpoint can't tell a
kept weight of 0 from a pruned one, and ``sparse-bitmask`` masks were made from one, so that their groups may hold fewer than N, never more.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from sdbench.checkpoint_files import PROVENANCE_FILE, CheckpointFiles
from sdbench.checkpoints import bitmask
from sdbench.checkpoints.layout import GUARD, PARTS, QUANT_METHOD, read_quantization_config, stored_shapes
from sdbench.checkpoints.provenance import Provenance, file_sha256, read_provenance, tensor_sha256
from sdbench.errors import CheckFailed, UsageError
from sdbench.pattern import Pattern
from sdbench.progress import Progress
from sdbench.words import counted

CHECKS = ("shape", "axis", "exact", "values", "hash")
"""Sizes; along which axis the groups run; N in each of them; values against mask; SHA-256."""
OK, FAILED = "ok", "FAILED"
PACKED, DENSE = "packed", "dense"
PRUNED_SHARE = 0.5
"""A matrix with more than this share of the zeros that the pattern asks for was meant to hold it."""


@dataclass(frozen=True)
class Failure:
    """One thing that is wrong: which tensor, layer or file, which check, what, and the first index where that has one."""

    tensor: str
    check: str
    message: str
    index: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.tensor}{list(self.index) if self.index else ''}: {self.message}"


@dataclass
class LayerFinding:
    """What was found of one linear.

    Attributes:
        name: Its dotted name.
        shape: Dense shape [out, in].
        pruned: False for a linear that holds no pattern and is not said to.
        checks: ``ok`` or ``FAILED`` by check; one that does not apply is left out.
    """

    name: str
    shape: tuple[int, ...]
    pruned: bool
    checks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """What was found of a checkpoint.

    Attributes:
        kind: ``packed``, ``dense``, or the name of an old format.
        pattern: N:M that was looked for.
        provenance: Contents of ``sdbench.json``; None without one.
        layers: One finding a linear, embeddings left out.
        failures: What is wrong; empty for a checkpoint that is what it claims to be.
    """

    kind: str
    pattern: Pattern
    provenance: Provenance | None
    layers: list[LayerFinding]
    failures: list[Failure]


def verify(files: CheckpointFiles, pattern: Pattern | None, progress: Progress) -> Findings:
    """Checks a checkpoint.

    Args:
        files: The opened folder.
        pattern: What it is expected to hold; None takes what its config or ``sdbench.json`` names.
        progress: Where to report.

    Raises:
        UsageError: No pattern is given and none is named, or a format that can't be checked.
        CheckFailed: ``sdbench.json`` is damaged.
    """
    entry = files.config.get("quantization_config") or {}
    provenance = read_provenance(files.folder)
    layers: list[str] | None = None
    if entry.get("quant_method") == QUANT_METHOD:
        kind = PACKED
        named, layers = read_quantization_config(entry)
    elif old := bitmask.format_of(files.config):
        kind, named = old, bitmask.pattern_of(files.config)
    elif entry:
        raise UsageError(f"{files.folder} is quantised by {entry.get('quant_method')}: no format whose masks sdbench can check")
    elif provenance:
        kind, named, layers = DENSE, Pattern.parse(provenance.pattern), list(provenance.layers)
    elif pattern:
        kind, named = DENSE, pattern
    else:
        raise UsageError(f"{files.folder} is dense and has no {PROVENANCE_FILE}: say which pattern it should hold, such as --pattern 2:4")
    checker = _Checker(files, kind, pattern or named, layers, provenance)
    checker.check_names(named)
    with progress.task("layers", len(checker.linears)) as task:
        for name, linear in checker.linears.items():
            checker.check_layer(name, tuple(linear.weight.shape))
            task.advance()
    checker.check_embeddings()
    checker.check_provenance()
    return Findings(kind, checker.pattern, provenance, checker.findings, checker.failures)


class _Checker:
    def __init__(self, files: CheckpointFiles, kind: str, pattern: Pattern, layers: list[str] | None, provenance: Provenance | None):
        self.files, self.kind, self.pattern, self.provenance = files, kind, pattern, provenance
        self.model = _empty_model(files)
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        modules = dict(self.model.named_modules())
        self.embeddings = [name for name, module in modules.items() if any(module is end for end in ends)]
        self.linears = {n: module for n, module in modules.items() if isinstance(module, nn.Linear) and n not in self.embeddings}
        self.promised = None if layers is None else set(layers)
        self.exact = kind in (PACKED, bitmask.SPARSE_24)
        self.findings: list[LayerFinding] = []
        self.failures: list[Failure] = []

    def check_names(self, named: Pattern) -> None:
        """Patterns and layers as config, provenance and caller name them."""
        if named != self.pattern:
            self._fail("config.json", "exact", f"names the pattern {named}, not {self.pattern}")
        for name in sorted((self.promised or set()) - set(self.linears)):
            what = "an embedding, which always stays dense" if name in self.embeddings else "no linear of this model"
            self._fail(name, "shape", f"is listed as pruned, but it is {what}")
        if self.provenance:
            if self.provenance.pattern != str(named):
                self._fail(PROVENANCE_FILE, "exact", f"names the pattern {self.provenance.pattern}, the config {named}")
            for name in sorted((self.promised or set()) ^ set(self.provenance.layers)):
                self._fail(name, "hash", f"is listed as pruned by one of config.json and {PROVENANCE_FILE} and not by the other")

    def check_layer(self, name: str, shape: tuple[int, ...]) -> None:
        """Every check of one linear of a dense shape [out, in]."""
        before = len(self.failures)
        stem = next((stem for stem in (name, f"{name}.weight") if f"{stem}.compressed" in self.files.tensors), None)
        promised = self.kind == PACKED and self.promised is not None and name in self.promised
        finding = LayerFinding(name, shape, pruned=stem is not None or promised)
        self.findings.append(finding)
        if stem or promised:
            names = [f"{stem or name}.{part}" for part in PARTS] + [f"{name}.{GUARD}"] * (self.kind == PACKED)
            mask = self._stored_mask(stem or name, names, shape)
            values = names[0]
        else:
            names, values = [f"{name}.weight"], f"{name}.weight"
            mask = self.files.tensor(values) != 0 if self._has_shape(values, shape) else None
        if mask is not None and not (stem and self.exact):
            finding.pruned = self._is_pruned(name, mask)
        if mask is not None and finding.pruned:
            self._check_groups(names[1] if stem else values, mask)
        if mask is not None:
            self._check_values(values, mask if stem else None)
        for tensor in names:
            self._check_hash(tensor)
        failed = {failure.check for failure in self.failures[before:]}
        apply = set(CHECKS) if mask is not None and finding.pruned else {"shape", "hash"}
        # What one failure leaves open is not ok.
        apply -= ({"exact"} if "axis" in failed else set()) | ({"hash"} if self.provenance is None else set())
        finding.checks = {check: FAILED if check in failed else OK for check in CHECKS if check in apply | failed}

    def _stored_mask(self, stem: str, names: list[str], shape: tuple[int, ...]) -> Tensor | None:
        """The mask [out, in] of a stored layer; None where sizes don't fit."""
        if self.kind == PACKED:
            wanted = stored_shapes(shape[0], shape[1], self.pattern)
            fitting = [self._has_shape(name, wanted[name.rpartition(".")[2]]) for name in names]
            if not all(fitting):
                return None
        try:
            mask = bitmask.read_mask(self.files, stem)
        except CheckFailed as error:
            self._fail(f"{stem}.bitmask", "shape", str(error))
            return None
        if mask.shape != shape:
            self._fail(f"{stem}.shape", "shape", f"says {list(mask.shape)}, the config asks for {list(shape)}")
            return None
        past = shape[1] % 8
        if past:
            rows = (self.files.tensor(f"{stem}.bitmask")[:, -1] >> past).nonzero()
            if len(rows):
                # A reader that looks at whole bytes would take them for weights.
                index = (int(rows[0]), shape[1] // 8)
                self._fail(f"{stem}.bitmask", "values", f"has bits past column {shape[1] - 1} ({counted(len(rows), 'such row')})", index)
        return mask

    def _is_pruned(self, name: str, mask: Tensor) -> bool:
        """Whether a matrix was meant to hold the pattern: it is listed, or most of the zeros are there."""
        if self.promised is not None:
            return name in self.promised
        return float((~mask).float().mean()) > PRUNED_SHARE * (1 - self.pattern.density)

    def _check_groups(self, tensor: str, mask: Tensor) -> None:
        wrong = self._wrong_group(mask)
        if wrong is None:
            return
        if self._wrong_group(mask.T) is None:
            self._fail(tensor, "axis", f"is transposed: its {self.pattern} groups run along out_features instead of in_features")
            return
        row, column, count, groups = wrong
        allowed = f"{'exactly' if self.exact else 'at most'} {self.pattern.keep}"
        last = column + self.pattern.group - 1
        self._fail(
            tensor, "exact", f"columns {column} to {last} hold {count}, not {allowed} ({counted(groups, 'such group')})", (row, column)
        )

    def _wrong_group(self, mask: Tensor) -> tuple[int, int, int, int] | None:
        """Of a mask [rows, columns]: row, first column and count of the first wrong group, and the number of wrong ones; None without."""
        whole = mask.shape[1] - mask.shape[1] % self.pattern.group
        counts = mask[:, :whole].reshape(len(mask), -1, self.pattern.group).sum(-1)
        wrong = counts != self.pattern.keep if self.exact else counts > self.pattern.keep
        if whole < mask.shape[1]:
            return 0, whole, int(mask[0, whole:].sum()), len(mask)
        if not wrong.any():
            return None
        row, group = (int(n) for n in wrong.nonzero()[0])
        return row, group * self.pattern.group, int(counts[row, group]), int(wrong.sum())

    def _check_values(self, tensor: str, mask: Tensor | None) -> None:
        values = self.files.tensor(tensor)
        if mask is not None and int(mask.sum()) != values.numel():
            self._fail(tensor, "values", f"has {counted(values.numel(), 'value')}, but the mask marks {int(mask.sum())}")
        bad = (~values.isfinite()).nonzero()
        if len(bad):
            index = tuple(int(n) for n in bad[0])
            self._fail(tensor, "values", f"is {values[index].item()} ({counted(len(bad), 'such value')})", index)

    def check_embeddings(self) -> None:
        """Embeddings, tied or not, must be as large as the config says, unpruned, and one where the config ties them."""
        stored = [name for name in self.embeddings if f"{name}.weight" in self.files.tensors]
        tables = [f"{name}.weight" for name in stored]
        for tensor, name in zip(tables, stored, strict=True):
            if not self._has_shape(tensor, tuple(self.model.get_submodule(name).weight.shape)):
                continue
            table = self.files.tensor(tensor)
            if table.shape[1] % self.pattern.group == 0 and bitmask.fits(table != 0, self.pattern):
                self._fail(tensor, "values", f"is an embedding, which stays dense, but each of its groups holds {self.pattern}")
            if tensor != tables[0] and self.model.config.tie_word_embeddings and not torch.equal(table, self.files.tensor(tables[0])):
                self._fail(tensor, "values", f"differs from {tables[0]}, and the config ties them")

    def check_provenance(self) -> None:
        """Tensors and files against what the provenance lists; and that something is pruned at all."""
        if not any(finding.pruned for finding in self.findings):
            self._fail("config.json", "exact", f"no layer holds the pattern {self.pattern}")
        if self.provenance is None:
            return
        listed, there = set(self.provenance.tensors), set(self.files.tensors)
        for tensor in sorted(listed - there):
            self._fail(tensor, "hash", f"is missing, and {PROVENANCE_FILE} lists it")
        for tensor in sorted(there - listed):
            self._fail(tensor, "hash", f"is not among the tensors that {PROVENANCE_FILE} lists")
        of_layers = {f"{name}.{part}" for name in self.linears for part in (*PARTS, GUARD)}
        for tensor in sorted((listed & there) - of_layers):
            self._check_hash(tensor)
        for name, expected in self.provenance.files.items():
            path = self.files.folder / name
            if not path.is_file():
                self._fail(name, "hash", f"the file is missing, and {PROVENANCE_FILE} lists it")
            elif file_sha256(path) != expected:
                self._fail(name, "hash", "the file was changed after it was written: another SHA-256")

    def _check_hash(self, tensor: str) -> None:
        expected = self.provenance.tensors.get(tensor) if self.provenance else None
        if expected and tensor in self.files.tensors and tensor_sha256(self.files.tensor(tensor)) != expected:
            self._fail(tensor, "hash", f"is not what {PROVENANCE_FILE} lists: another SHA-256")

    def _has_shape(self, tensor: str, shape: tuple[int, ...]) -> bool:
        found = self.files.shapes.get(tensor)
        if found is None:
            self._fail(tensor, "shape", "is missing")
        elif found != shape:
            self._fail(tensor, "shape", f"is {list(found)}, config and pattern ask for {list(shape)}")
        return found == shape

    def _fail(self, tensor: str, check: str, message: str, index: tuple[int, ...] | None = None) -> None:
        self.failures.append(Failure(tensor, check, message, index))


def _empty_model(files: CheckpointFiles) -> Any:
    """The model that the config describes, without memory for its weights."""
    config = AutoConfig.from_pretrained(files.folder, trust_remote_code=False)
    for name in ("quantization_config", "compression_config"):
        if hasattr(config, name):
            delattr(config, name)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
