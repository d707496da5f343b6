"""The 33 scenarios that Apache Iggy publishes for consumer groups, on the coordinator alone."""

from __future__ import annotations

import pytest

from tests.iggy import SCENARIOS, Scenario

from .readers import PlayedReaders


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_iggys_scenario(scenario: Scenario) -> None:
    scenario(PlayedReaders)
