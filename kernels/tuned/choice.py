"""What a search found for one kernel variant and problem, under a key that holds all that the choice hangs on; readable JSON on disk."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import triton
from pydantic import BaseModel, ConfigDict, Field, StrictInt

from sdbench import packing
from sdbench.devices import DTYPES
from sdbench.kernels import finish, launching
from sdbench.kernels.registry import Problem, Variant
from sdbench.results import strict_json

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

CHOICE_SCHEMA: Literal["sdbench.tuned/1"] = "sdbench.tuned/1"
SET_SCHEMA: Literal["sdbench.tuned-set/1"] = "sdbench.tuned-set/1"

KERNELS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Key:
    """What a tuned config is valid for: another value anywhere is another key.

    Attributes:
        gpu: The device's name.
        capability: Its compute capability, 90 for 9.0.
        kernel: Kernel of the variant.
        variant: Name within the kernel.
        shape: (out_features, in_features).
        pattern: N:M, or None for a weight without.
        dtype: "bf16", "fp16" or "fp32".
        source: Hash of the kernel's source.
        triton: Triton's version.
        tokens: Rows of x.
    """

    gpu: str
    capability: int
    kernel: str
    variant: str
    shape: tuple[int, int]
    pattern: str | None
    dtype: str
    source: str
    triton: str
    tokens: int = 1

    @property
    def task(self) -> tuple[str, str, tuple[int, int], str | None, str, int]:
        """What is multiplied and by what, wherever: the key of the configs that ship with the package."""
        return self.kernel, self.variant, self.shape, self.pattern, self.dtype, self.tokens

    @property
    def digest(self) -> str:
        """Twelve hex digits of the whole key."""
        return hashlib.sha256(strict_json(asdict(self)).encode()).hexdigest()[:12]

    @property
    def file(self) -> Path:
        """A path below the cache's folder that says what it is for and is safe on every file system."""
        device = f"{re.sub('[^a-z0-9]+', '-', self.gpu.lower()).strip('-')}-sm{self.capability}"
        kind = self.pattern.replace(":", "of") if self.pattern else "dense"
        shape = "x".join(map(str, self.shape))
        rows = f"-{self.tokens}tokens" if self.tokens > 1 else ""
        return Path(device) / f"{self.kernel}-{self.variant}-{shape}-{kind}-{self.dtype}{rows}-{self.digest}.json"


class Choice(BaseModel):
    """The config that won a search: the contents of one file of the cache, and one line of the configs that ship."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_: Literal["sdbench.tuned/1"] = Field(alias="schema")
    key: Key
    config: dict[str, StrictInt]
    us: dict[str, float]
    effort: Literal["quick", "full"]
    outcomes: dict[str, int]
    created: str


class Shipped(BaseModel):
    """The contents of ``sm_<capability>.json``: choices of one compute capability, at most one a task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_: Literal["sdbench.tuned-set/1"] = Field(alias="schema")
    capability: int
    choices: tuple[Choice, ...]

    def dump(self) -> str:
        """JSON with a choice a line, in the order of their tasks, so that a change of one is a change of one line."""
        lines = ",\n".join(strict_json(choice) for choice in sorted(self.choices, key=lambda choice: _order(choice.key)))
        return f'{{"schema": "{self.schema_}", "capability": {self.capability}, "choices": [\n{lines}\n]}}\n'

    def merged(self, choices: Iterable[Choice]) -> "Shipped":
        """With new choices in place of the old ones of the same task."""
        merged = {choice.key.task: choice for choice in (*self.choices, *choices)}
        return Shipped(schema=SET_SCHEMA, capability=self.capability, choices=tuple(merged.values()))


def key_of(variant: Variant, problem: Problem, device: torch.device) -> Key:
    """The key of a variant's config for a problem on a device."""
    return Key(
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        capability=problem.capability,
        kernel=variant.kernel,
        variant=variant.name,
        shape=(problem.out_features, problem.in_features),
        pattern=str(problem.pattern) if problem.pattern else None,
        dtype=DTYPE_NAMES[problem.dtype],
        source=source_hash(variant.kernel),
        triton=triton.__version__,
        tokens=problem.tokens,
    )


@cache
def source_hash(kernel: str, kernels: Path = KERNELS) -> str:
    """Hash of all that a kernel's variants are made of: its folder's files, those of folders that they import, and what all of them share.

    Args:
        kernel: The kernel's name, as a rule its folder's; where there is no such folder, all kernels' files count.
        kernels: The folder of all kernels.
    """
    digest = hashlib.sha256()
    ours = _sources(kernel, kernels) or sorted(kernels.rglob("*.py"))
    for path in [*ours, *(Path(str(shared.__file__)) for shared in (finish, launching, packing))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _sources(kernel: str, kernels: Path) -> list[Path]:
    folders = [kernel]
    for folder in folders:
        for path in (kernels / folder).glob("*.py"):
            found = dict.fromkeys(re.findall(r"^(?:from|import) sdbench\.kernels\.(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
            folders += [name for name in found if name not in folders]
    return sorted(path for folder in folders for path in (kernels / folder).glob("*.py"))


def _order(key: Key) -> tuple[str, str, tuple[int, int], str, str, int]:
    return key.kernel, key.variant, key.shape, key.pattern or "", key.dtype, key.tokens
