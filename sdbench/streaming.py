"""Models larger than the device: built on the meta device, with the weights of one part at a time brought where they are computed with.

Whoever runs or prunes a part holds it by `resident`, which does nothing for a model that was loaded whole: the same code serves both.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sdbench.checkpoint_files import CheckpointFiles
from sdbench.errors import SdbenchError
from sdbench.words import counted

_PART = "_sdbench_part"


class Fill(Protocol):
    """Gives a module's own tensors their values."""

    def __call__(self, name: str, module: nn.Module, device: torch.device) -> None:
        """Fills the tensors that lie in the module itself, which hold nothing yet.

        Args:
            name: The module's dotted name.
            module: The module.
            device: Where its tensors are.
        """


class Stream:
    """A model's weights, of which only those that are held are in memory.

    Args:
        model: A transformers model on the meta device.
        fill: Where the values come from.
        device: Where the weights go.
        device_map: Devices of parts of the model by dotted name, the longest that fits counts; others go to ``device``.

    Attributes:
        blocks: The model's blocks by dotted name, once `keep_outside` knows them.
        bytes: Bytes of weights that are in memory now.
        peak_bytes: The most that were at once.

    Raises:
        SdbenchError: Blocks share weights; by `keep_outside`.
    """

    def __init__(self, model: Any, fill: Fill, device: torch.device, device_map: Mapping[str, torch.device] | None = None):
        self.model, self.fill = model, fill
        places = device_map or {}
        self.blocks: Mapping[str, nn.Module] = {}
        self.bytes = self.peak_bytes = 0
        self.instead_of: dict[str, Callable[[str], Tensor]] = {}
        self.owned = set(unique_state(model))
        for name, module in model.named_modules():
            inside = [prefix for prefix in places if not prefix or f"{name}.".startswith(f"{prefix}.")]
            setattr(module, _PART, _Part(self, name, module, places[max(inside, key=len)] if inside else device))

    def keep_all(self) -> None:
        """Brings the whole model, for good."""
        self._keep(self.model.modules())
        for module in self.model.modules():
            delattr(module, _PART)

    def keep_outside(self, blocks: Mapping[str, nn.Module]) -> None:
        """Brings everything that lies outside of the blocks, for good.

        Args:
            blocks: By dotted name.
        """
        self.blocks = blocks
        inside = {module for block in blocks.values() for module in block.modules()}
        for prefix, block in blocks.items():
            for name, _ in block.named_parameters(prefix=prefix, remove_duplicate=False):
                if name not in self.owned:
                    raise SdbenchError(f"{name} is the weight of another layer too, so that the blocks cannot be streamed one by one")
        self._keep(module for module in self.model.modules() if module not in inside)

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """Tensors of the state dict by name, each once: those outside of the blocks, then one block's after the other, held meanwhile."""
        inside = tuple(f"{prefix}." for prefix in self.blocks)
        yield {name: tensor for name, tensor in unique_state(self.model).items() if not name.startswith(inside)}
        for prefix, block in self.blocks.items():
            with resident([block]):
                yield {f"{prefix}.{name}": tensor for name, tensor in unique_state(block).items()}

    @contextmanager
    def instead(self, names: Collection[str], load: Callable[[str], Tensor]) -> Iterator[None]:
        """Inside, some linears come with other weights of the same shape.

        Args:
            names: Dotted names of linears that nobody holds.
            load: Gives such a weight by the linear's name.
        """
        self.instead_of = dict.fromkeys(names, load)
        try:
            yield
        finally:
            self.instead_of = {}

    def _keep(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            getattr(module, _PART).__enter__()
        # The second name of a tied weight.
        self.model.tie_weights()


class _Part:
    """A module's own tensors, in memory as long as somebody holds them."""

    def __init__(self, stream: Stream, name: str, module: nn.Module, device: torch.device):
        self._stream, self._name, self._module, self._device = stream, name, module, device
        self._holders = 0
        self._away: list[tuple[dict[str, Any], str, Tensor]] = []

    def __enter__(self) -> None:
        self._holders += 1
        if self._holders > 1:
            return
        try:
            self._bring()
        except BaseException:
            # Tensors that were not filled must not be found by whoever asks next.
            self.__exit__(None, None, None)
            raise

    def _bring(self) -> None:
        stream, module = self._stream, self._module
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for place in places:
            for name, tensor in place.items():
                tied = place is module._parameters and f"{self._name}.{name}".lstrip(".") not in stream.owned
                if tensor is None or not tensor.is_meta or tied:
                    continue
                # A value that is never given must not go unseen.
                here = torch.empty_like(tensor, device=self._device)
                here = here.fill_(float("nan")) if here.is_floating_point() else here.zero_()
                place[name] = nn.Parameter(here, requires_grad=False) if isinstance(tensor, nn.Parameter) else here
                self._away.append((place, name, tensor))
                stream.bytes += tensor.nbytes
        if not self._away:
            return
        stream.peak_bytes = max(stream.peak_bytes, stream.bytes)
        with torch.no_grad():
            stream.fill(self._name, module, self._device)
            if self._name in stream.instead_of:
                # Mypy takes a module's attribute for a tensor.
                module.weight.copy_(stream.instead_of[self._name](self._name))  # type: ignore[operator]

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self._holders -= 1
        if not self._holders:
            for place, name, tensor in self._away:
                place[name] = tensor
                self._stream.bytes -= tensor.nbytes
            self._away = []


@contextmanager
def resident(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the modules' weights are in memory, which they are anyway unless their model is streamed; may be nested."""
    with ExitStack() as held:
        for module in modules:
            for child in module.modules():
                if part := vars(child).get(_PART):
                    held.enter_context(part)
        yield


class RandomWeights:
    """A model's own initialisation with a seed a module, so that any part can be drawn alone and comes out as in the whole model.

    Args:
        model: A transformers model.
        seed: Seed of the draw, together with each module's name. They are drawn where they go: a kind of device has its own numbers.
            What is computed (rotary frequencies) comes from the CPU, as transformers has it when it loads a model.
    """

    def __init__(self, model: Any, seed: int):
        self._seed, self._owners = seed, _owners(model)

    def __call__(self, name: str, module: nn.Module, device: torch.device) -> None:
        """See `Fill`."""
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(digest[:8]) >> 1)
            self._owners[name]._init_weights(module)


class StoredWeights:
    """The weights of a checkpoint in safetensors, each read when it is wanted, in the model's number type.

    Args:
        model: A transformers model on the meta device.
        name: What messages call it.
        files: The checkpoint.

    Raises:
        SdbenchError: The checkpoint lacks a weight, or has it in another shape.
    """

    def __init__(self, model: Any, name: str, files: CheckpointFiles):
        self._files, self._owners = files, _owners(model)
        wanted = unique_state(model)
        if missing := sorted(set(wanted) - set(files.tensors)):
            raise SdbenchError(
                f"model {name!r} lacks {counted(len(missing), 'weight')}, {missing[0]} the first: the checkpoint is incomplete, or has old "
                "names for them, which cannot be streamed"
            )
        for key, tensor in wanted.items():
            if files.shapes[key] != tuple(tensor.shape):
                raise SdbenchError(f"model {name!r}: {key} is {files.shapes[key]}, but the config asks for {tuple(tensor.shape)}")

    def __call__(self, name: str, module: nn.Module, device: torch.device) -> None:
        """See `Fill`."""
        if module._non_persistent_buffers_set:
            # What no checkpoint holds, rotary frequencies for one, the model computes itself: on the CPU, whose powers are not a GPU's to
            # the last bit, since transformers does so when it loads a model.
            self._owners[name]._init_weights(module)
        for child, tensor in (*module._parameters.items(), *module._buffers.items()):
            key = f"{name}.{child}".lstrip(".")
            if tensor is not None and not tensor.is_meta and child not in module._non_persistent_buffers_set:
                tensor.copy_(self._files.tensor(key))


def unique_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and persistent buffers by name; of tied ones only the first name."""
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    # keep_vars gives the parameters themselves, and tied ones are one and the same object.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach()
    return state


def _owners(model: Any) -> dict[str, Any]:
    """Of each module by name the transformers model, itself or the nearest around it, that knows how to initialise it."""
    # Takes a second and more to import, which a command that only checks its options can do without.
    from transformers import PreTrainedModel

    owners: dict[str, Any] = {}
    for name, module in model.named_modules():
        owners[name] = module if isinstance(module, PreTrainedModel) else owners[name.rpartition(".")[0]]
    return owners
