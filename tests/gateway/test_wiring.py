"""How the parts of a node are connected: each part receives what it needs when it is made."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gateway

ROOT = Path(gateway.__file__).parent
WIRING = [ROOT / "app.py", *sorted((ROOT / "building").glob("*.py"))]


def assignments_to_others(source: str) -> list[int]:
    """Lines that assign to an attribute of an object other than `self`."""
    return [
        target.lineno
        for node in ast.walk(ast.parse(source))
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and not (isinstance(target.value, ast.Name) and target.value.id == "self")
    ]


@pytest.mark.parametrize("path", WIRING, ids=lambda path: path.name)
def test_wiring_assigns_to_no_attribute_of_a_part(path: Path) -> None:
    assert assignments_to_others(path.read_text()) == []


def test_an_assignment_to_an_attribute_of_a_part_is_found() -> None:
    assert assignments_to_others("leases.acquired, leases.lost = heard, lost") != []
