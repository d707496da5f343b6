"""Apache Iggy's 33 scenarios, on the coordinator alone."""

from __future__ import annotations

import pytest

from tests.iggy import SCENARIOS, Scenario

from .readers import PlayedReaders


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_iggys_scenario(scenario: Scenario) -> None:
    scenario(PlayedReaders)
