"""Cost curves: each runs in its smallest form on real nodes, and the report says from which point a curve bends."""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ElementTree

import pytest

from bench import paced_requests
from bench.curves import CURVES, Step, bend, graph, measure, table
from bench.paced_requests import Load, Paced
from bench.usage import Machine, Spent, Usage
from tests.gateway_process import GatewayProcess

AT_REST = Machine(0, 0, 0, 0, 0, 0, 0, 0, 0)


def step(count: int, *, p99_ms: float, backends_s: float = 0.1, answered_per_s: float = 1000.0) -> Step:
    groups = {"gateway: event loop": Usage(user_s=2.0), "Postgres: backends": Usage(user_s=backends_s)}
    return Step(count, Paced(1000.0, answered_per_s, 1.0, p99_ms), Spent(10.0, AT_REST, groups))


@pytest.mark.long
@pytest.mark.parametrize("name", CURVES)
def test_curve_measures_two_steps_of_real_nodes(name: str) -> None:
    warm_up_s, seconds = 0.5, 2.0
    steps = measure(name, (1, 2), warm_up_s, seconds)
    assert [each.count for each in steps] == [1, 2]
    for each in steps:
        # On a busy machine, requests of the warm-up may be answered in the measured time.
        assert 0 < each.paced.answered_per_s * seconds <= each.paced.offered_per_s * (warm_up_s + seconds)
        assert 0 < each.paced.p50_ms <= each.paced.p99_ms
        assert each.gateway_cores > 0
        assert each.postgres_cores > 0
    if name == "nodes":
        assert steps[1].paced.offered_per_s == 2 * steps[0].paced.offered_per_s
        assert {f"gateway {number}: event loop" for number in (1, 2)} <= set(steps[1].spent.groups)
    assert len(list(ElementTree.fromstring(graph(name, steps)).iter("{http://www.w3.org/2000/svg}path"))) == 4


def test_refused_record_ends_the_load_with_its_error(gateway: GatewayProcess) -> None:
    load = Load([gateway.bootstrap], ["absent"], 1, 1, 1, 100.0, 0.1, 0.5)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(paced_requests.run(load))
    assert "Produce answered {3}" in str(raised.value.exceptions[0])


def test_curve_bends_at_the_first_step_of_twice_the_latency() -> None:
    said = bend(
        [step(1, p99_ms=2.0), step(10, p99_ms=3.9), step(100, p99_ms=4.1, backends_s=5.1), step(1000, p99_ms=9)]
    )
    assert said.startswith("It bends at 100: p99 is 2.0 times that of 1, Postgres' CPU is 51.0 times that of 1.")
    assert said.endswith("From 10 to 100, Postgres: backends grew most, by 0.50 cores.")


def test_curve_bends_where_requests_stay_unanswered() -> None:
    said = bend([step(1, p99_ms=2.0), step(10, p99_ms=2.0, answered_per_s=940)])
    assert said.startswith("It bends at 10: only 940 of 1,000 requests/s were answered.")
    assert said.endswith("From 1 to 10, no process used more CPU.")


def test_flat_curve_does_not_bend() -> None:
    assert bend([step(1, p99_ms=2.0), step(10, p99_ms=3.0)]).startswith("It does not bend up to 10:")


def test_table_shows_cores_by_server() -> None:
    assert table("groups", [step(1000, p99_ms=2.0)]).splitlines()[2] == (
        "| 1,000 | 0.20 | 0.01 | 1.00 ms | 2.00 ms | 1,000 of 1,000/s |"
    )
