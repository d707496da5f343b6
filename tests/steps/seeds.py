"""How much of a simulation runs each time, and how much in the long tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import pytest


def first_always(values: Sequence[Any], count: int) -> list[Any]:
    """Parameters of a test: the first `count` run each time, all others only where long tests do."""
    return [value if at < count else pytest.param(value, marks=pytest.mark.long) for at, value in enumerate(values)]


def finds(seeds: Iterable[int], goes_wrong: Callable[[int], bool], *, found_before: Iterable[int] = ()) -> bool:
    """Whether any seed goes wrong. `found_before`, which once did, are asked first: mostly no other has to be."""
    return any(goes_wrong(seed) for seed in chain(found_before, seeds))
