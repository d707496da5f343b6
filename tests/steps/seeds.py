"""Choose the seeds of a simulation: those that run each time, and those that run only in the long tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import pytest


def first_always(values: Sequence[Any], count: int) -> list[Any]:
    """Return parameters of a test: the first `count` run each time, all others only in the long tests."""
    return [value if at < count else pytest.param(value, marks=pytest.mark.long) for at, value in enumerate(values)]


def finds(seeds: Iterable[int], goes_wrong: Callable[[int], bool], *, found_before: Iterable[int] = ()) -> bool:
    """Return whether any seed fails. `found_before` lists seeds that failed earlier. They run first, so that usually no
    other seed has to run.
    """
    return any(goes_wrong(seed) for seed in chain(found_before, seeds))
