"""Load the coordinator with one bug: a fresh copy of its module in which one piece of one function is replaced. A
simulation without findings proves something only if it also finds such bugs. The piece is compared as code, not as
text, so formatting and comments may change. It must occur exactly once in its function. Otherwise a mutant could
silently equal the original.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import gateway.coordinator as package

PACKAGE = package.__name__
CLASSIC = f"{PACKAGE}.classic"
SHARED = frozenset(
    f"{PACKAGE}.{name}"
    for name in (
        *("cluster", "document", "facts", "handoff", "machine", "model"),
        *("consumer.model", "share.model", "streams.model"),
    )
)
"""Modules that a mutant shares with the tests, because both must use the same classes of events and replies."""


@dataclass(frozen=True)
class Mutant:
    bug: str
    where: str
    """`module:function`, or `module:Class.method`, of the classic machine."""
    original: str
    """One expression, or consecutive statements."""
    mutated: str
    """The replacement, of the same kind; empty for no statement at all."""
    seeds: int = 400
    """The number of runs that must suffice to find the bug. Some bugs need rare events."""
    found_by: tuple[int, ...] = ()
    """Seeds that have found the bug."""

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    @property
    def function(self) -> str:
        return self.where.partition(":")[2]


def load(mutant: Mutant) -> ModuleType:
    """Return `gateway.coordinator.classic.machine` with the mutant's bug."""
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
        coordinator = importlib.import_module(f"{CLASSIC}.machine")
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
    return name.startswith(f"{PACKAGE}.") and name not in SHARED


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.mutated = False
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != f"{CLASSIC}.{self._mutant.module}":
            return None
        assert path is not None
        return importlib.util.spec_from_loader(fullname, _Loader(self, Path(path[0]), self._mutant))


class _Loader(importlib.abc.Loader):
    def __init__(self, finder: _Finder, folder: Path, mutant: Mutant) -> None:
        self._finder = finder
        self._file = folder / f"{mutant.module}.py"
        self._mutant = mutant

    def exec_module(self, module: ModuleType) -> None:
        tree = mutated(self._file.read_text(), self._mutant)
        exec(compile(tree, str(self._file), "exec"), module.__dict__)
        self._finder.mutated = True


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """Return the module with the mutant's bug."""
    tree = ast.parse(source)
    function = _function(tree, mutant.function)
    original, replacement = _parsed(mutant.original), _parsed(mutant.mutated)
    count = 0
    match original, replacement:
        case [ast.Expr() as one], [ast.Expr() as other]:
            count = _replace_expression(function, one.value, other.value)
    if not count:
        count = _replace_statements(function, original, replacement or [ast.Pass()])
    assert count == 1, f"{mutant.original!r} is {count} times in {mutant.where}"
    return ast.fix_missing_locations(tree)


def _function(tree: ast.Module, name: str) -> ast.AST:
    found: ast.AST = tree
    for part in name.split("."):
        named = [node for node in ast.iter_child_nodes(found) if getattr(node, "name", None) == part]
        assert len(named) == 1, f"{name} is there {len(named)} times"
        found = named[0]
    return found


def _parsed(text: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(text).strip()).body


def _replace_expression(within: ast.AST, original: ast.expr, new: ast.expr) -> int:
    """Replace every occurrence of the expression inside a larger expression. A call that stands alone is a statement
    instead.
    """
    wanted, count = ast.dump(original), 0

    class Replacer(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.AST:
            return node if ast.dump(node.value) == wanted else self.generic_visit(node)

        def generic_visit(self, node: ast.AST) -> ast.AST:
            nonlocal count
            if isinstance(node, ast.expr) and ast.dump(node) == wanted:
                count += 1
                return new
            return super().generic_visit(node)

    Replacer().visit(within)
    return count


def _replace_statements(within: ast.AST, original: list[ast.stmt], replacement: list[ast.stmt]) -> int:
    wanted, count = [ast.dump(each) for each in original], 0
    for node in list(ast.walk(within)):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if not isinstance(body, list):
                continue
            for start in range(len(body) - len(wanted) + 1):
                if [ast.dump(each) for each in body[start : start + len(wanted)]] == wanted:
                    count += 1
                    body[start : start + len(wanted)] = replacement
                    break
    return count
