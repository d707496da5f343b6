"""Import contracts: which modules a room (a top-level package) may import, and that no module imports itself through
others.

The one idea: a list of forbidden imports would miss later modules, while a list of allowed imports demands a decision
for each. The contract also reports what is allowed and not imported (any more), so the list stays true.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import grimp
from importlinter import Contract, ContractCheck, fields, output


class Knows(Contract):
    """An import contract: `room` may import itself, the modules in `knows` and the modules below these. From the
    standard library it may import the modules in `standard_library`, or any module if that is not given.
    """

    room = fields.StringField()
    knows = fields.SetField(subfield=fields.StringField())
    standard_library = fields.SetField(subfield=fields.StringField(), required=False)

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        room: str = self.room  # pyright: ignore[reportAssignmentType]
        allowed: set[str] = self.knows  # pyright: ignore[reportAssignmentType]
        standard: set[str] | None = self.standard_library  # pyright: ignore[reportAssignmentType]
        used: set[str] = set()
        forbidden: list[str] = []
        for importer in sorted({room, *graph.find_descendants(room)}):
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                top = imported.partition(".")[0]
                entry = _entry(imported, allowed)
                if entry is not None:
                    used.add(entry)
                elif _is_in(imported, room):
                    continue
                elif top not in sys.stdlib_module_names or (standard is not None and top not in standard):
                    forbidden.append(_told(graph, importer, imported))
                else:
                    used.add(top)
        unused = sorted((allowed | (standard or set())) - used)
        return ContractCheck(kept=not forbidden and not unused, metadata={"forbidden": forbidden, "unused": unused})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["forbidden"]:
            output.print_error(f"{line}, which {self.room} may not know", bold=False)
        for name in check.metadata["unused"]:
            output.print_error(f"{self.room} may know {name}, and does not", bold=False)


class NoCircles(Contract):
    """No module imports itself through others, counting imports for types alone.

    An import under TYPE_CHECKING does no harm when modules load, but neither module can be understood without the
    other.
    """

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        found = circles(graph)
        return ContractCheck(kept=not found, metadata={"circles": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for circle in check.metadata["circles"]:
            output.print_error(f"these modules import each other in a circle: {', '.join(circle)}", bold=False)


def circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Return each largest set of modules that all import each other, directly or through others, sorted."""
    ahead = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    behind: dict[str, set[str]] = {module: set() for module in ahead}
    for module, imported in ahead.items():
        for each in imported:
            behind[each].add(module)
    found: list[list[str]] = []
    left = set(ahead)
    while left:
        module = left.pop()
        circle = _reached(module, ahead) & _reached(module, behind)
        left -= circle
        if len(circle) > 1:
            found.append(sorted(circle))
    return sorted(found)


def _reached(module: str, edges: Mapping[str, Iterable[str]]) -> set[str]:
    reached, due = {module}, [module]
    while due:
        due += (fresh := set(edges[due.pop()]) - reached)
        reached |= fresh
    return reached


def _entry(module: str, allowed: Iterable[str]) -> str | None:
    return next((entry for entry in allowed if _is_in(module, entry)), None)


def _is_in(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def _told(graph: grimp.ImportGraph, importer: str, imported: str) -> str:
    (line, *_) = sorted(each["line_number"] for each in graph.get_import_details(importer=importer, imported=imported))
    return f"{importer} (line {line}) imports {imported}"
