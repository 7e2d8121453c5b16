"""Which model runs, on which device, in which number type; loading it."""

import contextlib
import io
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import accelerate
import huggingface_hub
import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from sdbench import hub
from sdbench.architectures import find_architecture
from sdbench.checkpoint_files import PROVENANCE_FILE, CheckpointFiles
from sdbench.devices import map_devices, unhook_linears
from sdbench.engine.greedy import greedy_eos_ids
from sdbench.errors import SdbenchError, UsageError
from sdbench.memory import InUse, in_use
from sdbench.streaming import RandomWeights, StoredWeights, Stream, unique_state
from sdbench.words import counted

DEFAULT_HUB_ID = "Qwen/Qwen3-4B-Instruct-2507"
DEFAULT_REVISION = "cdbee75f17c01a7cc42f958dc650907174af0554"
RANDOM = "random:"
RANDOM_SEED = 0
RANDOM_STD = 0.02

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True)
class ModelSpec:
    """Which model was asked for.

    Args:
        kind: ``demo`` (bundled), ``hub``, ``folder``, ``gguf`` (a file, dequantised) or ``random`` (architecture only).
        source: Hub id, path, or for ``random`` the known architecture, hub id or folder; ``demo`` for the bundled model.
        revision: Revision of a hub id; the commit once it is loaded. None when the hub is not involved.
        reason: Why this model, for the first line of the output.
    """

    kind: Literal["demo", "hub", "folder", "gguf", "random"]
    source: str
    revision: str | None
    reason: str

    @property
    def name(self) -> str:
        """What results call the model; holds no path."""
        name = Path(self.source).resolve().name if _is_path(self) else self.source
        return f"{RANDOM}{name}" if self.kind == "random" else name


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Args:
        model: The transformers causal language model, in eval mode.
        tokenizer: Its tokenizer; None for a random model without one.
        spec: Where it came from, with the revision's commit.
        eos_ids: Every id that ends a reply.
        name: What results call it; holds no path.
        before: GPU memory in use before it was loaded; of a streamed one, no account.
        stream: What brings the weights of a model that is not in memory as a whole; None for one that is.
    """

    model: Any
    tokenizer: Any
    spec: ModelSpec
    eos_ids: frozenset[int]
    name: str
    before: InUse = field(default_factory=InUse)
    stream: Stream | None = None


def resolve_model(text: str | None, revision: str | None, device: torch.device) -> ModelSpec:
    """Reads ``--model`` and ``--revision``; looks at the disk but not at the hub.

    Args:
        text: ``demo``, a hub id, a folder, a ``.gguf`` file, ``random:<architecture, hub id or folder>``; None for the default.
        revision: Branch, tag or commit of a hub id.
        device: Decides the default: the hub's Qwen3-4B with CUDA, the bundled demo model without.

    Raises:
        UsageError: A revision for something that has none; a name that is neither a hub id nor a folder with ``config.json`` nor a
            ``.gguf`` file.
    """
    if text is None:
        if device.type == "cuda":
            return ModelSpec("hub", DEFAULT_HUB_ID, revision or DEFAULT_REVISION, "the default with a CUDA device")
        return _without_revision(ModelSpec("demo", "demo", revision, "the default without a CUDA device: the bundled demo model"))
    reason = f"--model {text}"
    if text == "demo":
        return _without_revision(ModelSpec("demo", "demo", revision, reason))
    is_random = text.startswith(RANDOM)
    source = text.removeprefix(RANDOM)
    if not source:
        raise UsageError(f"model {text!r}: name an architecture, a hub id or a folder")
    if is_random and find_architecture(source):
        return _without_revision(ModelSpec("random", source, revision, reason))
    path = Path(source).expanduser()
    if source.endswith(".gguf") and not is_random:
        if not path.is_file():
            raise UsageError(f"model {text!r}: no such file")
        return _without_revision(ModelSpec("gguf", str(path), revision, reason))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"model {text!r}: the folder has no config.json, so it is not a transformers checkpoint")
        return _without_revision(ModelSpec("random" if is_random else "folder", str(path), revision, reason))
    if path.exists():
        raise UsageError(f"model {text!r}: a file, but not a .gguf one; name the checkpoint's folder")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", source) is None:
        raise UsageError(f"model {text!r}: no such folder or file, and not a hub id (owner/name)")
    return ModelSpec("random" if is_random else "hub", source, revision, reason)


def load_model(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[str], None] | None = None,
    device_map: str | Mapping[str, torch.device] | None = None,
) -> LoadedModel:
    """Loads a model, ready to run; downloads it first when it is a hub id that the cache lacks.

    The weights take ``dtype`` while they are read or made, never by a later cast of the whole model: the rotary frequencies stay fp32.
    A random model has normal(0, 0.02) weights from a fixed seed and each module's name, made on the device: the same ones every time on a
    kind of device, in the whole model and in a streamed one.

    Args:
        spec: From :func:`resolve_model`.
        device: Where the model goes.
        dtype: Number type of the weights.
        progress: Told in one line what takes time.
        device_map: Spreads the model over several GPUs: by accelerate as one of `sdbench.devices.DEVICE_MAPS` says, or a device a part.

    Raises:
        UsageError: The hub knows no such model or revision, or its weights are quantised.
        SdbenchError: Not reachable, damaged or incomplete files, a kind of model that transformers doesn't know, no EOS id, or not
            enough memory.
    """
    _silence()
    tell = progress or (lambda line: None)
    folder, spec = locate_model(spec, tell)
    if device.type == "cuda":
        # What the libraries take with their first product is no part of a model.
        torch.ones(16, 16, dtype=dtype, device=device) @ torch.ones(16, 16, dtype=dtype, device=device)
    before = in_use(device)
    with _one_line(spec):
        if spec.kind == "random":
            tell(f"making random weights for {spec.source}")
            model, tokenizer = _random_on_meta(spec.source, folder, dtype)
            places = map_devices(model, device_map) if isinstance(device_map, str) else device_map
            Stream(model, RandomWeights(model, RANDOM_SEED), device, places).keep_all()
            if places:
                accelerate.dispatch_model(model, _by_number(places), skip_keys=model._skip_keys_device_placement)
        elif spec.kind == "gguf":
            if device_map:
                raise UsageError(f"--device-map: {folder.name} is converted as a whole; give a folder with safetensors")
            tell(f"reading {folder.name}")
            model, tokenizer = _read_gguf(spec.source, folder, device, dtype)
        else:
            tell(f"loading {spec.source}")
            config, tokenizer = _read_config(spec.source, folder)
            places = map_devices(_on_meta(config, None, dtype), device_map) if isinstance(device_map, str) else device_map
            model = _pretrained(spec.source, folder, _by_number(places) if places else device, dtype, config=config)
        if spec.kind != "gguf" and places:
            unhook_linears(model, places)
    return LoadedModel(model, tokenizer, spec, greedy_eos_ids(model, tokenizer), spec.name, before)


def open_model(spec: ModelSpec, device: torch.device, dtype: torch.dtype, progress: Callable[[str], None] | None = None) -> LoadedModel:
    """The same model with no weight in memory yet: its ``stream`` brings them part by part.

    Args:
        spec: From :func:`resolve_model`; a demo, hub or random model, or a folder.
        device: Where the weights go.
        dtype: Number type of the weights.
        progress: Told in one line what takes time.

    Raises:
        UsageError: As for `load_model`, or a ``.gguf`` file, which cannot be read a part at a time.
        SdbenchError: As for `load_model`, or the checkpoint names its weights otherwise than the model does.
    """
    _silence()
    tell = progress or (lambda line: None)
    if spec.kind == "gguf":
        raise UsageError(f"--stream: {Path(spec.source).name} is converted as a whole; give a folder with safetensors")
    folder, spec = locate_model(spec, tell)
    tell(f"opening {spec.source}, one block at a time")
    with _one_line(spec):
        if spec.kind == "random":
            model, tokenizer = _random_on_meta(spec.source, folder, dtype)
            stream = Stream(model, RandomWeights(model, RANDOM_SEED), device)
        else:
            config, tokenizer = _read_config(spec.source, folder)
            model = _on_meta(config, folder, dtype)
            stream = Stream(model, StoredWeights(model, spec.source, CheckpointFiles.open(folder)), device)
    return LoadedModel(model, tokenizer, spec, greedy_eos_ids(model, tokenizer), spec.name, stream=stream)


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, progress: Callable[[str], None] | None = None) -> int:
    """What the weights of a model would take, each tied one once, by its config alone: whatever the checkpoint calls them.

    Args:
        spec: From :func:`resolve_model`; a demo, hub or random model, or a folder.
        dtype: Number type of the weights.
        progress: Told in one line what takes time.

    Raises:
        UsageError: As for `load_model`.
        SdbenchError: As for `load_model`.
    """
    _silence()
    folder, spec = locate_model(spec, progress or (lambda line: None))
    with _one_line(spec):
        if spec.kind == "random":
            model, _ = _random_on_meta(spec.source, folder, dtype)
        else:
            model = _on_meta(_read_config(spec.source, folder)[0], None, dtype)
    return sum(tensor.nbytes for tensor in unique_state(model).values())


def _without_revision(spec: ModelSpec) -> ModelSpec:
    if spec.revision is not None:
        raise UsageError(f"--revision {spec.revision}: only a hub id has revisions, and {spec.source!r} ({spec.kind}) is not one")
    return spec


def _is_path(spec: ModelSpec) -> bool:
    return spec.kind in ("folder", "gguf") or (spec.kind == "random" and not find_architecture(spec.source) and Path(spec.source).is_dir())


def _is_of_hub(spec: ModelSpec) -> bool:
    return spec.kind != "demo" and not _is_path(spec) and not (spec.kind == "random" and find_architecture(spec.source))


def locate_model(spec: ModelSpec, tell: Callable[[str], None]) -> tuple[Path, ModelSpec]:
    """The folder or file that holds the model (unused for a known random architecture), and the spec with the hub's commit.

    Args:
        spec: From :func:`resolve_model`.
        tell: Told in one line what takes time.

    Raises:
        UsageError: The hub does not have it.
        SdbenchError: The hub cannot be reached.
    """
    if spec.kind == "demo":
        from sdbench.demo import MODEL_DIR  # the demo's data sits above this module

        return MODEL_DIR, spec
    if not _is_of_hub(spec):
        return Path(spec.source), spec
    tell(f"looking for {spec.source} on the hub, downloading what the cache lacks")
    folder = hub.download(spec.source, spec.revision, weights=spec.kind != "random")
    return folder, replace(spec, revision=folder.name)


def require_model(spec: ModelSpec) -> None:
    """Refuses a model that loading would not find, as loading would; opens no checkpoint and downloads nothing.

    Args:
        spec: From :func:`resolve_model`.

    Raises:
        UsageError: The hub does not have it.
        SdbenchError: The hub cache does not have it, and the hub cannot be reached.
    """
    if _is_of_hub(spec) and (error := hub.missing(spec.source, spec.revision)):
        raise error


def _read_config(name: str, folder: Path) -> tuple[Any, Any]:
    """Config and tokenizer of a folder whose weights are there and can be pruned."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"model {name!r} has no config.json, so it is not a transformers checkpoint")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if (entry := getattr(config, "quantization_config", None)) is not None:
        if entry.get("quant_method") == "sdbench":
            raise UsageError(f"model {name!r} is pruned and packed already; give the dense checkpoint that it was made from")
        raise UsageError(f"model {name!r} is quantised; pruning needs the unquantised checkpoint (or a .gguf file)")
    if (folder / PROVENANCE_FILE).exists():
        # A dense export loads as any model does, and would stand for the dense one in every comparison.
        raise UsageError(f"model {name!r} holds weights that 'sdbench prune' pruned ({PROVENANCE_FILE} says so); give the dense checkpoint")
    _check_weight_files(name, folder)
    tokenizer = _read_tokenizer(folder)
    if tokenizer is None:
        raise SdbenchError(f"model {name!r} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})")
    return config, tokenizer


def _read_gguf(name: str, file: Path, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise SdbenchError(f"model {name!r} is not a GGUF file (it does not start with 'GGUF')")
    # The conversion draws its own progress bar, which has no switch.
    with contextlib.redirect_stderr(io.StringIO()):
        model = _pretrained(name, file.parent, device, dtype, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True))
        return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def _pretrained(name: str, folder: Path, device: torch.device | dict[str, int | str], dtype: torch.dtype, **options: Any) -> Any:
    # Left to itself, transformers fills missing weights with random numbers and says no more than "see the report" about wrong sizes.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "trust_remote_code": False}
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device, **options)
    model, info = loaded
    if wrong := sorted(info["mismatched_keys"]):
        weight, found, wanted = wrong[0]
        raise SdbenchError(f"model {name!r}: {weight} is {tuple(found)}, but the config asks for {tuple(wanted)}")
    if missing := sorted(info["missing_keys"]):
        raise SdbenchError(f"model {name!r} lacks {counted(len(missing), 'weight')}, {missing[0]} the first: the checkpoint is incomplete")
    return model.eval()


def _by_number(places: Mapping[str, torch.device]) -> dict[str, int | str]:
    """A device map as accelerate writes it."""
    return {name: place.index if place.type == "cuda" else str(place) for name, place in places.items()}


def _random_on_meta(source: str, folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    known = find_architecture(source)
    config = AutoConfig.for_model(**known.config) if known else AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.initializer_range = RANDOM_STD
    return _on_meta(config, None if known else folder, dtype), None if known else _read_tokenizer(folder)


def _on_meta(config: Any, folder: Path | None, dtype: torch.dtype) -> Any:
    """The model without weights."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    if folder and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _read_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer; None when it has none, for which transformers would make up an empty one."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _check_weight_files(name: str, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / shard for shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise SdbenchError(f"model {name!r}: the weight file {file.name} is missing")
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise SdbenchError(f"model {name!r}: {file.name} is damaged or cut short ({_first_line(error)})") from error


@contextlib.contextmanager
def _one_line(spec: ModelSpec) -> Iterator[None]:
    try:
        yield
    except SdbenchError:
        raise
    except torch.OutOfMemoryError as error:
        raise SdbenchError(f"model {spec.source!r}: out of GPU memory while loading; use a smaller model or --device cpu") from error
    except Exception as error:
        # Loaders of other packages raise whatever they like: SafetensorError, KeyError, struct.error, ...
        hint = "damaged, cut short, or of a kind that transformers cannot convert: " if spec.kind == "gguf" else ""
        raise SdbenchError(f"model {spec.source!r} cannot be loaded: {hint}{type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def _silence() -> None:
    """Keeps the libraries' warnings and bars off stdout and stderr, which belong to the command line."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.logging.set_verbosity_error()
    huggingface_hub.utils.disable_progress_bars()
    warnings.filterwarnings("ignore", module=r"transformers|huggingface_hub|gguf")
