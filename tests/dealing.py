"""Deal the tests to parallel workers, so that all workers end at about the same time.

Each worker begins with as many successive tests as any other, and takes over half of another worker's last tests
when it has run its own (pytest-xdist, worksteal). In the order of their names, one worker would begin with nearly all
tests that wait for clients and nodes, and they would still wait when all others have ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

COMPUTING = {"coordinator", "protocol"}
"""Folders whose tests start neither threads nor processes."""

WAITING = {"chaos", "clients", "cluster", "compat", "console", "frames", "mirror", "sql", "testing", "trust"}
"""Folders whose tests wait for clients and nodes for most of their time."""


def dealt(
    tests: Sequence[T], workers: int, *, folder_of: Callable[[T], str], module_of: Callable[[T], object]
) -> list[T]:
    """Return the tests in the order for this number of workers. A module that waits stays in one piece.

    Each worker's share begins with tests that only compute. Some of them measure memory, and threads that other tests
    leave behind would disturb them. Modules that wait follow, before all others.
    """
    modules = [(folder_of(run[0]), run) for _, found in itertools.groupby(tests, module_of) if (run := list(found))]
    computing = [test for folder, module in modules if folder in COMPUTING for test in module]
    waiting = [module for folder, module in modules if folder in WAITING]
    others = [module for folder, module in modules if folder not in COMPUTING | WAITING]
    order: list[T] = []
    for worker in range(workers):
        share = [test for module in (*waiting[worker::workers], *others[worker::workers]) for test in module]
        length = (len(tests) - len(order)) // (workers - worker)
        filling = max(length - len(share), 0)
        order += [*computing[:filling], *share]
        del computing[:filling]
    return order
