"""Count the constants of product modules that tests replace. The number may only fall.

If a test must lower a limit, the limit should be an argument of a constructor, with the usual value as its default. A
replaced constant applies to the whole process. If another module copies the constant, the test silently loses its
effect.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
TOOLS = ("bench", "compat")
"""Tests of programs that measure the product. The constants of these programs do not count."""
MOST = 63
"""Largest allowed number. Lower it when a constant becomes an argument."""


def replaced_constants(source: str) -> Iterator[str]:
    """Return the name in each call of `setattr` that replaces an upper-case name."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "setattr":
            continue
        names = [each.value for each in node.args[:2] if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if names and names[0].rpartition(".")[2].isupper():
            yield names[0]


def test_no_further_constant_is_replaced_by_a_test() -> None:
    found = [
        f"{path.relative_to(TESTS)}: {name}"
        for path in sorted(TESTS.rglob("*.py"))
        if path.relative_to(TESTS).parts[0] not in TOOLS
        for name in replaced_constants(path.read_text())
    ]
    assert len(found) <= MOST, "make the bound an argument of a constructor:\n" + "\n".join(found)


def test_replaced_constant_is_recognised_by_module_and_by_path() -> None:
    source = """
def test(monkeypatch):
    monkeypatch.setattr(module, "MAX_KEYS", 1)
    monkeypatch.setattr("storage.log.MAX_BATCHES", 1)
    monkeypatch.setattr(node.store, "save", lost)
    monkeypatch.setenv("SLUICE_LISTEN", "127.0.0.1:1")
"""
    assert list(replaced_constants(source)) == ["MAX_KEYS", "storage.log.MAX_BATCHES"]
