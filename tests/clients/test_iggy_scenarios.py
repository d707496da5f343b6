"""Apache Iggy's scenarios of cooperative reassignment, with stock consumers on a real gateway, as far as they can act
them: none dies, stops in the middle of a batch, or takes over the id of another. (`test_handoff_scenarios.py` has those
that need a clock, with all kinds of consumers.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.clients.readers import StockReaders
from tests.conftest import gateways
from tests.frames.readers import SETTINGS
from tests.gateway_process import GatewayProcess
from tests.iggy import SCENARIOS, Scenario
from tests.postgres import Databases

ACTED = [each for each in SCENARIOS if each.id[:2] not in {"01", "05", "15", "16", "17", "22"} and each.id[-2:] != "-b"]


@pytest.fixture(scope="module")
def gateway(postgres: Databases) -> Iterator[GatewayProcess]:
    with gateways(postgres) as factory:
        yield factory({**SETTINGS, "group.consumer.heartbeat.interval.ms": "50"})


@pytest.mark.parametrize("scenario", ACTED)
def test_iggys_scenario(gateway: GatewayProcess, scenario: Scenario) -> None:
    with ExitStack() as stack:

        def stage(partitions: int, **given: Any) -> StockReaders:
            readers = StockReaders(gateway, partitions, **given)
            stack.callback(readers.close)
            return readers

        scenario(stage)
