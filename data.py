"""`data` is `torchtitan.data`: what imports `data.digits` in the checkout gets the same modules, not copies of them."""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_NAME, _PACKAGE = f"{__name__}.", "torchtitan.data"


class _SameModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `data.x` as `torchtitan.data.x`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name.startswith(_NAME) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return importlib.import_module(f"{_PACKAGE}.{spec.name.removeprefix(_NAME)}")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the module has run as one of `torchtitan.data`."""


sys.meta_path.insert(0, _SameModules())
sys.modules[__name__] = importlib.import_module(_PACKAGE)
