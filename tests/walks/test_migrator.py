"""The migrator's walk: Kafka with data is mirrored, consumers resume at their offsets, and a return to Kafka stays
possible.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.clients.topics import create_topic
from tests.gateway_process import GatewayFactory
from tests.mirror.conftest import kafka
from tests.mirror.mirrors import consume, fill, needs_kafka, read_partition
from tests.steps.pages import Shell, blocks, replaced

__all__ = ["kafka"]

LIMIT_S = 290
STEP_S = 120
READ, LATER = 60, 40
"""Number of records that the group reads in Kafka before the move, and of records that producers
add until they stop.
"""


@pytest.mark.long
@needs_kafka
@pytest.mark.timeout(LIMIT_S)
def test_consumers_resume_where_they_stopped_after_the_move_and_after_the_way_back(
    kafka: str, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    node = gateway_factory()
    assert node.database_url is not None
    orders, payments = create_topic(kafka, 1, "orders-eu"), create_topic(kafka, 1, "payments-eu")
    fill(kafka, orders, 0, 100)
    fill(kafka, payments, 0, 10)
    first = consume(kafka, orders, "billing", READ)

    (copy,) = blocks("docs/move-from-kafka.md", "sh", "Copy")
    (back,) = blocks("docs/move-from-kafka.md", "sh", "Roll back")
    addresses = {"kafka:9092": kafka, "localhost:9092": node.bootstrap, " payments ": f" {payments} "}
    copy = replaced(copy, {**addresses, "postgresql://…": shlex.quote(node.database_url)}).strip()
    back = replaced(back, addresses).strip()
    shell = _shell(tmp_path)

    # The first copy runs while producers and consumers continue.
    shell.run(f"{copy} --once", seconds=STEP_S)
    fill(kafka, orders, 0, LATER)
    first += consume(kafka, orders, "billing", 10)
    # The switch: by now producers and consumers have stopped.
    said = shell.run(f"{copy} --once", seconds=STEP_S)
    assert "billing" in said
    shell.run(f"{copy} --verify", seconds=STEP_S)
    lag = shell.run(f"sluice groups lag billing --bootstrap {node.bootstrap} --json", seconds=STEP_S)
    assert f'"lag": {100 + LATER - READ - 10}' in lag, lag
    rest = consume(node.bootstrap, orders, "billing", 30)
    assert [*first, *rest] == list(range(100)), "no record was skipped and none was read twice"

    # Producers use the new cluster. Then the team moves back to Kafka.
    fill(node.bootstrap, orders, 0, 5)
    shell.run(back, seconds=STEP_S)
    assert consume(kafka, orders, "billing", LATER + 5) == list(range(100, 100 + LATER + 5))
    kept, original = read_partition(kafka, orders), read_partition(node.bootstrap, orders)
    assert [record[1:] for record in kept] == [record[1:] for record in original]


def _shell(directory: Path) -> Shell:
    """Return a shell in which `sluice` is the program under test."""
    program = directory / "bin" / "sluice"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gateway.cli "$@"\n')
    program.chmod(0o755)
    return Shell(directory, path=str(program.parent), PYTHONPATH=str(Path(__file__).parents[2]))
