"""The coordinator with one bug in it: loaded afresh from its source with one piece of text replaced.

The one idea: a simulation that finds nothing proves nothing until it has been seen to find something. The text to
replace must stand exactly once in the module, so that a mutant cannot quietly become the original.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import gateway.coordinator as package

PACKAGE = package.__name__
SHARED = frozenset({"cluster", "document", "facts", "handoff", "machine", "model"})
"""Modules that mutants share with the tests: events and replies must be of the same classes."""


@dataclass(frozen=True)
class Mutant:
    bug: str
    module: str
    original: str
    mutated: str


def load(mutant: Mutant) -> ModuleType:
    """`gateway.coordinator.classic`, as it is with the mutant's bug."""
    kept = {name: module for name, module in sys.modules.items() if _is_reloaded(name)}
    children = ((name.removeprefix(f"{PACKAGE}."), module) for name, module in kept.items())
    attributes = {child: module for child, module in children if "." not in child}
    finder = _Finder(mutant)
    for name in kept:
        del sys.modules[name]
    for attribute in attributes:
        delattr(package, attribute)
    sys.meta_path.insert(0, finder)
    try:
        coordinator = importlib.import_module(f"{PACKAGE}.classic")
        assert finder.mutated, f"{mutant.module} was never loaded"
        return coordinator
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _is_reloaded(name)]:
            del sys.modules[name]
        sys.modules.update(kept)
        for attribute, module in attributes.items():
            setattr(package, attribute, module)


def _is_reloaded(name: str) -> bool:
    return name.startswith(f"{PACKAGE}.") and name.rpartition(".")[2] not in SHARED


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.mutated = False
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != f"{PACKAGE}.{self._mutant.module}":
            return None
        assert path is not None
        return importlib.util.spec_from_loader(fullname, _Loader(self, Path(path[0]), self._mutant))


class _Loader(importlib.abc.Loader):
    def __init__(self, finder: _Finder, folder: Path, mutant: Mutant) -> None:
        self._finder = finder
        self._file = folder / f"{mutant.module}.py"
        self._mutant = mutant

    def exec_module(self, module: ModuleType) -> None:
        source = self._file.read_text()
        count = source.count(self._mutant.original)
        assert count == 1, f"{self._mutant.original!r} stands {count} times in {self._file.name}"
        mutated = source.replace(self._mutant.original, self._mutant.mutated)
        exec(compile(mutated, str(self._file), "exec"), module.__dict__)
        self._finder.mutated = True
