"""Apache Iggy's 33 scenarios on a real gateway: no partition has two owners at any time, and no record is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.conftest import gateways
from tests.frames.readers import SETTINGS, WireReaders
from tests.gateway_process import GatewayProcess
from tests.iggy import SCENARIOS, Scenario
from tests.postgres import Databases


@pytest.fixture(scope="module")
def gateway(postgres: Databases) -> Iterator[GatewayProcess]:
    with gateways(postgres) as factory:
        yield factory(SETTINGS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_iggys_scenario(gateway: GatewayProcess, scenario: Scenario) -> None:
    with ExitStack() as stack:

        def stage(partitions: int, **given: Any) -> WireReaders:
            readers = WireReaders(gateway, partitions, **given)
            stack.callback(readers.close)
            return readers

        scenario(stage)
