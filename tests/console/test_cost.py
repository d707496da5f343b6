"""The cost of a console: the statements that it sends to Postgres, and the memory that it holds."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp
import psutil
import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # pyright: ignore[reportPrivateImportUsage]

from gateway.app import App
from gateway.config.settings import load
from storage.pool import Pool
from tests.console.consoles import Person, start_consoled
from tests.gateway_process import GatewayFactory, GatewayProcess, free_ports
from tests.postgres import Databases

LOOK_S = 2.5
"""Longer than the refresh interval of every page that is refreshed."""


LARGE_BYTES = 50 * 1024 * 1024
MOST_BYTES = 5 * 1024 * 1024
"""Limit of the memory of an unused console (1.9 MB measured, in addition to metrics, which also use aiohttp)."""


def calls_of_console(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        if "/gateway/console/" in frame.f_code.co_filename:
            yield frame.f_code.co_name
        frame = frame.f_back


def create_topic(bootstrap: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic("silent", 1)])["silent"].result(30)


def streams() -> int:
    """Count the open streams of this process."""
    return sum("_fill" in str(task.get_coro()) for task in asyncio.all_tasks())


async def test_console_asks_postgres_only_while_someone_looks(
    postgres: Databases, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    """No statement is sent before the first request. Statements are sent while a page is open, and none after its
    reader has left.
    """
    asked: list[str] = []
    run = Pool.run

    async def counted(pool: Pool, work: Any) -> Any:
        asked.extend(list(calls_of_console(inspect.currentframe()))[:1])
        return await run(pool, work)

    monkeypatch.setattr(Pool, "run", counted)
    url = postgres.create()
    port, console_port = free_ports(2)
    flags = {"listen": f"127.0.0.1:{port}", "metrics-listen": "off", "database-url": url, "data-dir": str(tmp_path)}
    app = App(load(flags, [f"console.listen=127.0.0.1:{console_port}"], {}).settings)
    interval = sys.getswitchinterval()
    try:
        await app.start()
        await asyncio.sleep(LOOK_S)
        assert asked == []
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{console_port}", cookie_jar=jar) as session:
            assert (await session.get("/")).status == 200
            assert (await session.get("/api/session")).status == 200
            assert asked == []
            stream = await session.get("/api/live/overview")
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    while await stream.content.readline():
                        pass
            assert len(asked) > 5
            stream.close()
            await asyncio.sleep(0.5)
            asked.clear()
            await asyncio.sleep(LOOK_S)
            assert asked == []
            await asyncio.to_thread(create_topic, f"127.0.0.1:{port}")
            # Nothing is written to this stream, so only the closed connection shows that the reader has left.
            stream = await session.get("/api/live/records", params={"topic": "silent"})
            assert streams() == 1
            stream.close()
            for _ in range(int(LOOK_S / 0.01)):
                if not streams():
                    break
                await asyncio.sleep(0.01)
            assert streams() == 0
    finally:
        await app.stop()
        sys.setswitchinterval(interval)
        postgres.drop(url)


def held_bytes(process: GatewayProcess) -> int:
    """Return the memory that belongs to the node alone. Memory shared with other processes does not count."""
    return psutil.Process(process.pid).memory_full_info().uss


def test_console_that_nobody_opens_holds_little_memory(gateway_factory: GatewayFactory):
    """Two nodes with metrics, each a process of its own. Only one of them has a console."""
    own = {"PYTHONHASHSEED": "0"}
    without = gateway_factory(environment=own)
    consoled = start_consoled(gateway_factory, environment=own)
    assert consoled.gateway.log_text().count('"event": "console"') == 1
    assert held_bytes(consoled.gateway) - held_bytes(without) < MOST_BYTES


MEASURED_S = 10.0
MOST_OF_A_CORE = 0.01
"""Limit of the CPU share of an open timeline (0.4 % measured on a busy machine; 1.5 % with fifty
refreshes a second).
"""


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of a node and of the Postgres that it has started."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def peak_bytes(process: GatewayProcess) -> int:
    """Return the most memory that the node has used so far."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_many_searches_of_a_record_that_decompresses_to_much_hold_little_of_it(gateway_factory: GatewayFactory):
    consoled = start_consoled(gateway_factory)
    consoled.topic("large", 1)
    more: Any = {"compression.type": "zstd", "message.max.bytes": 2 * LARGE_BYTES}
    producer = Producer({"bootstrap.servers": consoled.gateway.bootstrap, **more})
    producer.produce("large", bytes(LARGE_BYTES), partition=0)
    assert producer.flush(60) == 0

    def search(person: Person) -> None:
        found = person.get("topic/records", topic="large", begin="earliest", text="something")
        assert (found["records"], found["scanned"]) == ([], 1)

    search(consoled.person)
    peak_of_one = peak_bytes(consoled.gateway)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(search, [consoled.person for _ in range(8)]))
    assert peak_bytes(consoled.gateway) - peak_of_one < 6 * LARGE_BYTES


OWNERSHIP = """
insert into journal_ownership (seq, at_ms, node_id, group_id, generation_id, topic, partition, change, member_id)
select 1000000 + n, (extract(epoch from now()) * 1000)::bigint - 1000, 1, 'eventful', n / 1000, 'silent', n % 500,
    case when n / 500 % 2 = 0 then 'assigned' else 'released' end, 'member-' || n / 1000
from generate_series(1, 20000) n
"""
EVENTS = """
insert into journal_event (seq, at_ms, node_id, group_id, group_type, kind, generation_id, member_id, client_id)
select 2000000 + n, (extract(epoch from now()) * 1000)::bigint - 1000, 1, 'eventful', 'classic', 'member_synced', 1,
    'member-' || n % 40, 'client'
from generate_series(1, 20000) n
"""


def test_many_timelines_of_a_group_with_a_long_history_hold_little_memory(gateway_factory: GatewayFactory):
    consoled = start_consoled(gateway_factory)
    create_topic(consoled.gateway.bootstrap)
    consumer = Consumer({"bootstrap.servers": consoled.gateway.bootstrap, "group.id": "eventful"})
    consumer.commit(offsets=[TopicPartition("silent", 0, 0)], asynchronous=False)
    consumer.close()
    assert consoled.gateway.database_url is not None
    with psycopg.connect(consoled.gateway.database_url, autocommit=True) as connection:
        connection.execute(OWNERSHIP)
        connection.execute(EVENTS)

    def draw(person: Person) -> None:
        assert len(person.get("group/timeline", id="eventful")["lanes"]) == 500

    before = peak_bytes(consoled.gateway)
    draw(consoled.person)
    peak_of_one = peak_bytes(consoled.gateway)
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(draw, [consoled.person for _ in range(16)]))
    assert peak_bytes(consoled.gateway) - peak_of_one < 6 * (peak_of_one - before)


@pytest.mark.alone
def test_open_timeline_costs_a_hundredth_of_a_core(gateway_factory: GatewayFactory):
    """A group has two consumers that commit twice a second. The test measures without and with a page that shows the
    group.
    """
    consoled = start_consoled(gateway_factory, embedded=True)
    node = psutil.Process(consoled.gateway.pid)

    def measured_s() -> float:
        before_s = cpu_s(node)
        time.sleep(MEASURED_S)
        return cpu_s(node) - before_s

    try:
        consoled.topic("orders", 4)
        for client in ("one", "two"):
            consoled.join("billing", client, "orders")
        without_s = measured_s()
        person = consoled.person
        connection = http.client.HTTPConnection("127.0.0.1", consoled.port, timeout=30)
        connection.request("GET", "/api/live/group?id=billing", headers={"Cookie": person.cookie, **person.headers})
        response = connection.getresponse()
        assert response.status == 200
        assert b"billing" in response.read1()
        share = (measured_s() - without_s) / MEASURED_S
        connection.close()
    finally:
        consoled.close()
    print(f"an open timeline: {share:.2%} of a core, beside {without_s / MEASURED_S:.2%} of the node and its Postgres")
    assert share < MOST_OF_A_CORE
