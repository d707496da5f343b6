"""Every room (top-level package) has an import contract, and a violation of a contract names its place."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import grimp
import pytest

from tests.import_contract import Knows, circles

ROOT = Path(__file__).parent.parent


def test_every_room_has_a_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rooms = {f"gateway.{each.parent.name}" for each in (ROOT / "gateway").glob("*/__init__.py")}
    assert {each["room"] for each in contracts if each["type"] == "knows"} == {
        *rooms,
        "pipeline",
        "protocol",
        "sluice",
        "sluice.testing",
        "storage",
    }


def test_no_module_imports_a_module_of_tests() -> None:
    """Helpers that several test modules share are in a module beside them or in tests/steps. So no test module imports
    another one, and each can change together with the code that it tests.
    """
    modules = [path for room in ("bench", "tests") for path in (ROOT / room).rglob("*.py")]
    broken = {
        f"{path.relative_to(ROOT)}: {name}" for path in modules for name in imported_modules_of_tests(path.read_text())
    }
    assert not broken


def test_import_of_a_module_of_tests_is_found() -> None:
    source = "from tests import test_a\nfrom tests.b.test_c import d\nimport tests.e.test_f, tests.steps.a\n"
    assert imported_modules_of_tests(source) == {"test_a", "test_c", "test_f"}


def imported_modules_of_tests(source: str) -> set[str]:
    """Return the test modules that a module imports."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tests":
            imported |= {*(node.module or "").split("."), *(name.name for name in node.names)}
        elif isinstance(node, ast.Import):
            imported |= {part for name in node.names if name.name.startswith("tests.") for part in name.name.split(".")}
    return {name for name in imported if name.startswith("test_")}


@pytest.mark.parametrize(
    ("imported", "told"),
    [
        ("house.other", None),
        ("house.other.deep", None),
        ("house.room.inner", None),
        ("asyncio", None),
        ("house.others", "house.room.inner (line 3) imports house.others"),
        ("house", "house.room.inner (line 3) imports house"),
        ("asyncpg", "house.room.inner (line 3) imports asyncpg"),
    ],
)
def test_an_import_that_is_not_allowed_is_forbidden(imported: str, told: str | None) -> None:
    check = contract().check(imports(imported, "house.other"), verbose=False)
    assert (check.kept, check.metadata["forbidden"]) == (told is None, [] if told is None else [told])


def test_a_pure_room_lists_its_imports_from_the_standard_library() -> None:
    pure = contract(standard_library=["re"])
    assert pure.check(imports("house.other", "re"), verbose=False).kept
    broken = pure.check(imports("house.other", "re", "asyncio"), verbose=False)
    assert broken.metadata["forbidden"] == ["house.room.inner (line 3) imports asyncio"]


def test_an_allowed_import_that_does_not_occur_is_reported() -> None:
    check = contract().check(imports("asyncio"), verbose=False)
    assert (check.kept, check.metadata["unused"]) == (False, ["house.other"])


def test_modules_that_import_each_other_through_others_are_a_circle() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "a"), ("x", "y"), ("y", "x")):
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == [["a", "b", "c"], ["x", "y"]]


def contract(**options: object) -> Knows:
    return Knows("a room", {}, {"room": "house.room", "knows": ["house.other"], **options})


def imports(*imported: str) -> grimp.ImportGraph:
    graph = grimp.ImportGraph()
    for module in ("house", "house.room", "house.room.inner"):
        graph.add_module(module)
    for module in imported:
        graph.add_import(importer="house.room.inner", imported=module, line_number=3, line_contents=f"import {module}")
    return graph
