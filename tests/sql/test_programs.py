"""The complete programs of docs/sql.md, run as they stand there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from confluent_kafka import Consumer

from storage.postgres_programs import find_programs
from tests.gateway_process import ROOT, GatewayFactory, GatewayProcess
from tests.pooler import admit_pooler, pooler
from tests.sql.conftest import create_topic
from tests.sql.reading import read

PAGE = ROOT / "docs" / "sql.md"
POM = Path(__file__).parent / "pom.xml"
JARS = ROOT / ".compat" / "sql"
RUN_S = 90
DEADLINE_S = 120
POLL_S = 0.05
ORDERS = 200
CUSTOMERS = 7

Connection = asyncpg.Connection
Start = Callable[[], contextlib.AbstractContextManager[subprocess.Popen[bytes]]]


def program(heading: str) -> str:
    """Return the code block below the given heading of the page."""
    found = re.search(rf"^### {re.escape(heading)}\n.*?^```\w+\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None, f"{PAGE} has no program below {heading}"
    return found[1]


@pytest.fixture
def node(gateway_factory: GatewayFactory) -> GatewayProcess:
    """A node that has the topics of the programs. It soon removes a killed member."""
    made = gateway_factory({"group.connection.grace.ms": "500"})
    for topic in ("orders", "totals"):
        create_topic(made, topic, 3)
    return made


@pytest.fixture
async def sql(node: GatewayProcess) -> AsyncIterator[Connection]:
    """A connection to the database of the node."""
    assert node.database_url is not None
    connection = await asyncpg.connect(node.database_url)
    yield connection
    await connection.close()


def run(command: list[str], node: GatewayProcess, url: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DATABASE_URL": url, "BOOTSTRAP": node.bootstrap}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)


def messages(node: GatewayProcess, topic: str, count: int) -> list[Any]:
    """Return the values of exactly `count` messages. Each value is JSON."""
    consumer = Consumer({"bootstrap.servers": node.bootstrap, "group.id": "reader"})
    try:
        return [json.loads(message.value()) for message in read(consumer, topic, count, none_more_s=0.5)]
    finally:
        consumer.close()


async def rows_and_events_are_equal(sql: Connection, node: GatewayProcess) -> int:
    """Assert that the table of orders equals its topic, and return the number of orders."""
    rows = {(row["id"], row["customer"], row["total"]) for row in await sql.fetch("select * from orders")}
    events = messages(node, "orders", len(rows))
    assert {(event["id"], event["customer"], Decimal(str(event["total"]))) for event in events} == rows
    return len(rows)


async def test_psql_produces_in_its_transaction(sql: Connection, node: GatewayProcess, tmp_path: Path) -> None:
    assert node.database_url is not None
    script = tmp_path / "order.sql"
    script.write_text(program("psql"))
    command = [_psql(), "--no-psqlrc", "--quiet", "--dbname", node.database_url, "--file", str(script)]
    done = run(command, node, node.database_url)
    assert done.returncode == 0, done.stderr
    assert "orders" in done.stdout
    assert await rows_and_events_are_equal(sql, node) == 1
    repeated = run(command, node, node.database_url)
    assert "duplicate key" in repeated.stderr
    assert await rows_and_events_are_equal(sql, node) == 1


@pytest.mark.parametrize(("heading", "scheme", "orders"), [("asyncpg", "", 100), ("SQLAlchemy", "+psycopg", 20)])
async def test_a_driver_produces_in_its_transaction(
    sql: Connection, node: GatewayProcess, heading: str, scheme: str, orders: int
) -> None:
    assert node.database_url is not None
    url = node.database_url.replace("postgresql:", f"postgresql{scheme}:", 1)
    command = [sys.executable, "-c", program(heading)]
    done = run(command, node, url)
    assert done.returncode == 0, done.stderr
    assert await rows_and_events_are_equal(sql, node) == orders
    repeated = run(command, node, url)
    assert "duplicate key" in repeated.stderr
    assert await rows_and_events_are_equal(sql, node) == orders


# --- consumers ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["psycopg 3, with a stock consumer", "JDBC, with Java's consumer"])
async def start(
    request: pytest.FixtureRequest, sql: Connection, node: GatewayProcess, tmp_path: Path
) -> AsyncIterator[Start]:
    """Start a consuming program, which is killed at the end of the context if it still runs."""
    assert node.database_url is not None
    code = program(request.param)
    with contextlib.ExitStack() as stack:
        if request.param.startswith("JDBC"):
            source = tmp_path / "Billing.java"
            source.write_text(code)
            command = ["java", "-Xmx128m", "-cp", f"{_jars()}/*", str(source)]
            # The tests' Postgres has a Unix socket only, and pgjdbc speaks only TCP.
            await admit_pooler(sql)
            pooled = stack.enter_context(
                pooler(node.database_url, tmp_path, mode="session", ignored="extra_float_digits")
            )
            user, _, place = pooled.removeprefix("postgresql://").partition("@")
            url = f"jdbc:postgresql://{place}?user={user}"
        else:
            command, url = [sys.executable, "-c", code], node.database_url

        @contextlib.contextmanager
        def started() -> Iterator[subprocess.Popen[bytes]]:
            environment = {**os.environ, "DATABASE_URL": url, "BOOTSTRAP": node.bootstrap}
            with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
                try:
                    yield process
                finally:
                    process.kill()

        yield started


async def test_a_killed_consumer_counts_each_order_once(start: Start, sql: Connection, node: GatewayProcess) -> None:
    expected: dict[str, Decimal] = {}
    await sql.execute("create table totals (customer text primary key, total numeric not null)")
    with start() as first:
        for number in range(ORDERS):
            customer = f"customer-{number % CUSTOMERS}"
            expected[customer] = expected.get(customer, Decimal(0)) + number
            event = json.dumps({"id": number, "customer": customer, "total": number})
            await sql.execute("select kafka.produce('orders', $1::text, $2::text)", event, customer)
            if number == ORDERS // 2:
                await _wait_for(sql, "select count(*) > 3 from totals", first)
    with start() as second:
        done = f"select sum(\"offset\") = {ORDERS} from kafka.committed('billing')"
        await _wait_for(sql, done, second)
        second.send_signal(signal.SIGINT)
        _, errors = second.communicate(timeout=RUN_S)
        assert second.returncode in {0, 128 + signal.SIGINT}, errors.decode()
    assert {row["customer"]: row["total"] for row in await sql.fetch("select * from totals")} == expected
    announced = messages(node, "totals", ORDERS)
    assert {
        customer: max(Decimal(each["total"]) for each in announced if each["customer"] == customer)
        for customer in expected
    } == expected


async def _wait_for(sql: Connection, condition: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not await sql.fetchval(condition):
        if process.poll() is not None:
            pytest.fail(f"the program ended: {process.communicate()[1].decode()}")
        assert time.monotonic() < deadline_s, condition
        time.sleep(POLL_S)


def _psql() -> str:
    programs = find_programs()
    assert programs is not None
    return str(programs.directory / "psql")


def _jars() -> Path:
    """Return the folder of the jars. Maven downloads them once."""
    assert shutil.which("mvn"), "Maven is not installed; install the Debian packages maven and openjdk-17-jdk-headless"
    stamp = JARS / "complete"
    if not stamp.exists() or stamp.read_text() != POM.read_text():
        shutil.rmtree(JARS, ignore_errors=True)
        command = ["mvn", "--quiet", "--batch-mode", "--file", str(POM), "dependency:copy-dependencies"]
        subprocess.run([*command, "-DincludeScope=runtime", f"-DoutputDirectory={JARS}"], check=True)
        stamp.write_text(POM.read_text())
    return JARS
