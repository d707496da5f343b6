"""A short run of each target: valid messages are read, and mutated ones cause no undocumented error."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS

RUNS = 4_000
SECONDS = 20


@pytest.fixture(scope="module")
def runs() -> Mapping[str, tuple[int, int]]:
    """Number of inputs and exit code, by target."""
    return {target: (executions, ended) for target, executions, ended in fuzz(sorted(TARGETS), SECONDS, RUNS)}


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_reader_raises_documented_errors_only(runs: Mapping[str, tuple[int, int]], target: str) -> None:
    executions, ended = runs[target]
    assert ended == 0
    assert executions > 1_000


def test_a_compressed_batch_is_among_the_seeds() -> None:
    assert len(list(seeds("batches"))) == 6
