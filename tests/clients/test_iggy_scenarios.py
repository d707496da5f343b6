"""Apache Iggy's 33 scenarios with a stock client: no partition ever has two owners, and no record is lost.

Some parts cannot be played by a stock client. `tests/frames/test_iggy_scenarios.py` plays them with frames:

| scenario | part | why |
|---|---|---|
| 01, 05, 16 | members that never send a heartbeat | a client's own thread sends them; here the proxy mutes the client |
| 16 | the last to join sends the first heartbeat | the client chooses the moment of a heartbeat |
| 17 | a member that lost everything returns by its old id | a new client has a new id: the old member expires first |
| 22 | two partitions are served, one is received | librdkafka may hold only one: else it is waited for |

Eager and cooperative members also act ten of the scenarios (`test_handoff_scenarios.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast

import pytest

from gateway.groups.marks import RECENT_S
from tests.clients.line import Line
from tests.clients.readers import StockReaders
from tests.conftest import gateways
from tests.frames.readers import SETTINGS
from tests.gateway_process import GatewayProcess, free_ports
from tests.iggy import SCENARIOS, Scenario, Stage
from tests.postgres import Databases, LoopThread

AT_ONCE = 6
"""Scenarios that can run concurrently, because they mostly wait for heartbeats, sessions and deadlines."""
LONGEST_S = 150
HOLDS_BACK = ("22",)
"""Scenarios in which the gateway serves a reader no more records than its application receives, although the log has
more.
"""
NEVER_READ = ("01", "16", "28", "29", "30", "31", "32")
"""Scenarios in which a reader releases records that it never asked for.

A gateway that has tracked fetches for less than `RECENT_S` assumes that another node served them, and waits. So these
scenarios run after that time.
"""


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, postgres: Databases) -> Iterator[Mapping[str, Future[None]]]:
    """The scenarios of this run: those whose tests pytest selected by name."""
    wanted = [each for each in request.session.items if isinstance(each, pytest.Function) and each.path == request.path]
    early = sorted(wanted, key=lambda each: each.callspec.id[:2] in NEVER_READ)
    ports = free_ports(2)
    loop = LoopThread()
    line = Line(loop, ports[1])
    inside = f"127.0.0.1:{ports[0]}"
    listeners = {
        "listeners": f"INSIDE://{inside},LINE://127.0.0.1:{ports[1]}",
        "advertised.listeners": f"INSIDE://{inside},LINE://{line.address}",
        "listener.security.protocol.map": "INSIDE:PLAINTEXT,LINE:PLAINTEXT",
    }
    try:
        with gateways(postgres) as factory:
            gateway = factory({**SETTINGS, **listeners})
            play(one_reads, "", gateway, line)
            knows = threading.Event()
            clock = threading.Timer(RECENT_S + 1, knows.set)
            clock.daemon = True
            clock.start()
            with ThreadPoolExecutor(AT_ONCE) as pool:
                played: dict[str, Future[None]] = {}
                for each in early:
                    scenario = cast("Scenario", each.callspec.params["scenario"])
                    played[each.name] = pool.submit(play, scenario, each.callspec.id[:2], gateway, line, knows)
                yield played
                pool.shutdown(cancel_futures=True)
    finally:
        line.close()
        loop.close()


def one_reads(stage: Stage) -> None:
    """Let one reader read. From now on the gateway tracks which records it serves."""
    scene = stage(1)
    scene.come("a")
    scene.produce()
    assert scene.poll("a")


def play(
    scenario: Scenario, number: str, gateway: GatewayProcess, line: Line, knows: threading.Event | None = None
) -> None:
    if number in NEVER_READ and knows is not None:
        knows.wait()
    with ExitStack() as stack:
        staged: list[StockReaders] = []

        def stage(partitions: int, **given: Any) -> StockReaders:
            readers = StockReaders(gateway, line, partitions, one_at_a_time=number in HOLDS_BACK, **given)
            stack.callback(readers.close)
            staged.append(readers)
            return readers

        try:
            scenario(stage)
        except BaseException as failure:
            for readers in staged:
                failure.add_note(readers.history())
            raise


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_iggys_scenario_with_a_stock_client(
    played: Mapping[str, Future[None]], scenario: Scenario, request: pytest.FixtureRequest
) -> None:
    played[request.node.name].result(LONGEST_S)
