"""Modules under the names that they had in an earlier release: the very same modules."""

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from snapkv.errors import missing_package


class _Moved(MetaPathFinder, Loader):
    """Imports `old.part` as `new.part`, which `package` brings."""

    def __init__(self, old: str, new: str, package: str) -> None:
        self._old, self._new, self._package = old, new, package

    def module(self, name: str) -> ModuleType:
        """Of the new name, after a warning at the place that asks for the old one."""
        new = self._new + name.removeprefix(self._old)
        warnings.warn(
            f"{name} is {new} since 0.2.0; the old name goes in 0.4.0",
            DeprecationWarning,
            stacklevel=3,
        )
        try:
            return importlib.import_module(new)
        except ModuleNotFoundError as error:
            if error.name != self._new:
                raise
            raise missing_package(f"{name}: {new}", self._package) from None

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        below = f"{fullname}.".startswith(f"{self._old}.")
        return ModuleSpec(fullname, self) if below else None

    def exec_module(self, module: ModuleType) -> None:
        """The module of the new name takes the place of the one that the import has made."""
        sys.modules[module.__name__] = self.module(module.__name__)


def moved(old: str, new: str, package: str) -> _Moved:
    """Let `old` and what is below it be imported from `new`."""
    finder = _Moved(old, new, package)
    sys.meta_path.insert(0, finder)
    return finder
