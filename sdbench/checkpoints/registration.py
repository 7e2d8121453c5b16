"""Tells transformers about packed checkpoints when, and only when, transformers is there."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

REGISTRY = "transformers.quantizers.auto"
QUANTIZER = "sdbench.checkpoints.quantizer"


def register() -> None:
    """Registers the format with transformers: now if its registry is imported already, else right after it will be.

    ``import sdbench`` does this, and it may neither import transformers (``sdbench --help`` has to answer at once) nor come too late.
    """
    if REGISTRY in sys.modules:
        importlib.import_module(QUANTIZER)
    elif not any(isinstance(finder, _AfterRegistry) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterRegistry())


class _AfterRegistry(MetaPathFinder, Loader):
    """Leaves the import of the registry to whoever does it otherwise, and registers when it is done."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        importlib.import_module(QUANTIZER)
