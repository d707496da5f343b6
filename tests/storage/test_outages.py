"""Postgres is killed, or the disk is full, at any step of append, roll, rewrite and delete, while the process
continues.

Each acknowledged record must be stored, and stored once. The process needs only room and a Postgres to continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import asyncpg
import psutil
import pytest

from storage.embedded import FIRST_BACKOFF_SECONDS, Bounds, EmbeddedPostgres
from storage.errors import StorageError
from storage.history import HistoryStore
from storage.migrate import migrate
from storage.pool import Database
from storage.segments import SegmentDirectory
from storage.topics import TopicStore
from storage.types import NewTopic, Topic
from tests.disks import Disk, mounted
from tests.postgres import cluster_directory
from tests.storage.conftest import MakeTopic
from tests.storage.crash_child import SEGMENT_BYTES, Work, at_every_step
from tests.storage.crashes import KILLS, LAST_STEP, collected, verify

SEED = int(os.environ.get("SLUICE_TEST_SEED", "1"))
FULL_ROUNDS = max(3, KILLS // 4)
"""Rounds with a disk that is really full. Each lasts up to 5 s longer, until Postgres is started again."""

DEADLINE_S = 60.0
RETRY_S = 0.005
SHUT_S = 10.0
"""If Postgres accepts no connection for this long, it accepts none until the disk has room."""
WRITES = ("pwritev", "fdatasync", "fsync", "posix_fallocate")
"""Calls that a full disk refuses."""

WRITE_AHEAD = "select pg_logical_emit_message(false, 'full', ''); select pg_switch_wal()"
"""Write a row that changes nothing, and fill the rest of its segment of the write-ahead log."""

SMALL_WAL = "max_wal_size = '64MB'\nmin_wal_size = '32MB'\n"


class Steps:
    """Count calls to disk and Postgres down to the one at which the fault happens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = 0
        self._strike: Callable[[], None] = lambda: None
        self._refused = 0
        self.struck = threading.Event()

    def arm(self, steps: int, strike: Callable[[], None]) -> None:
        with self._lock:
            self.struck.clear()
            self._left, self._strike = steps, strike

    def refuse(self, calls: int) -> None:
        """Let the next so many writes fail for want of room. A fault calls this."""
        self._refused = calls

    def __call__(self, name: str) -> None:
        with self._lock:
            if self._left:
                self._left -= 1
                if not self._left:
                    self._strike()
                    self.struck.set()
            if self._refused and name in WRITES:
                self._refused -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    made = Steps()
    at_every_step(made, disk=random.Random(SEED), patch=monkeypatch.setattr)
    return made


class Play:
    """Work that continues through every failure of its storage until it is asked to pause."""

    def __init__(self, database: Database, store: SegmentDirectory, keys: Sequence[int]) -> None:
        self.work = Work(database, store, SEED, dict.fromkeys(keys, 0))
        self.failures = 0
        self._database, self._store = database, store
        self._pausing = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def acknowledged(self) -> int:
        return sum(self.work.next_sequences.values())

    def go_on(self) -> None:
        self._pausing = False
        self._tasks = [asyncio.create_task(self._repeat(each)) for each in (self.work.append, self.work.maintain)]

    async def _repeat(self, work: Callable[[], Awaitable[object]]) -> None:
        failed = False
        while failed or not self._pausing:
            try:
                await work()
                failed = False
            except StorageError:
                self.failures += 1
                failed = True
                await asyncio.sleep(RETRY_S)

    async def until(self, holds: Callable[[], bool], which: str) -> None:
        """Wait while the work continues; raise if the work fails."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            for task in self._tasks:
                if task.done():
                    task.result()
            assert time.monotonic() < deadline, which
            await asyncio.sleep(RETRY_S)

    async def comes_back(self, which: str) -> None:
        """Wait until appends are acknowledged again, pause, and assert that all acknowledged records are stored."""
        before = self.acknowledged
        await self.until(lambda: self.acknowledged > before + 20, f"{which}: it does not go on")
        self._pausing = True
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*self._tasks)
        ends = await verify(self._database, self._store, self.work.next_sequences, which)
        assert ends == self.work.next_sequences, f"{which}: something is there that was not acknowledged"

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.work.roller.close()
        await self.work.log.close()

    async def is_collected(self) -> None:
        await self.close()
        await collected(self._database, self._store)


# --- Postgres is killed -----------------------------------------------------------------------------------------------


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedPostgres]:
    # A server that is killed repeatedly returns more and more slowly, which this test need not show.
    bounds = Bounds(last_backoff_s=FIRST_BACKOFF_SECONDS)
    with cluster_directory() as directory:
        made = EmbeddedPostgres(directory, bounds=bounds)
        await made.start()
        yield made
        await made.stop()


@contextlib.asynccontextmanager
async def playing(server: EmbeddedPostgres, directory: Path) -> AsyncIterator[tuple[Database, Play]]:
    """Play on a database of the server's own, whose history is known."""
    database = await Database.open(server.url, hot_connections=3, cold_connections=2)
    play: Play | None = None
    try:
        await migrate(database)
        histories = HistoryStore(database)
        histories.accept(*await histories.adopt())
        (topic,) = await TopicStore(database).create([NewTopic("orders", 4, {})])
        assert isinstance(topic, Topic)
        directory.mkdir(exist_ok=True)
        store = SegmentDirectory(directory, segment_bytes=SEGMENT_BYTES)
        play = Play(database, store, [partition.partition_key for partition in topic.partitions])
        yield database, play
    finally:
        if play is not None:
            await play.close()
        await database.close()


def kill(pid: int, what: str, generator: random.Random) -> list[psutil.Process]:
    """Send SIGKILL to the postmaster, to one of its processes, or to all at once. Return the processes that end because
    of that: if one is killed, the postmaster ends all others.
    """
    ending = list[psutil.Process]()
    with contextlib.suppress(psutil.NoSuchProcess):
        postmaster = psutil.Process(pid)
        children = postmaster.children(recursive=True)
        killed = {"postmaster": [postmaster], "all": [postmaster, *children], "one": generator.sample(children, 1)}
        for process in killed[what]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
                ending = children
    return ending


@pytest.mark.timeout(120 + 30 * KILLS)
async def test_a_killed_postgres_loses_no_acknowledged_record(
    server: EmbeddedPostgres, steps: Steps, tmp_path: Path
) -> None:
    generator = random.Random(SEED)
    async with playing(server, tmp_path / "log") as (database, play):
        for number in range(KILLS):
            step, what = generator.randint(1, LAST_STEP), ("postmaster", "all", "one")[number % 3]
            which = f"kill {number} of {what}, seed {SEED}, at step {step}"
            pid, restarts = server.pid, server.restarts
            assert pid is not None, which
            ending = list[psutil.Process]()
            steps.arm(step, lambda pid=pid, what=what, ending=ending: ending.extend(kill(pid, what, generator)))
            play.go_on()
            await play.until(steps.struck.is_set, which)
            if what != "one":
                await play.until(lambda restarts=restarts: server.restarts > restarts, f"{which}: it stays away")
            else:
                # The postmaster notices the kill a moment later, and then ends all its processes.
                await play.until(
                    lambda ending=ending: not any(each.is_running() for each in ending), f"{which}: processes go on"
                )
            await play.comes_back(which)
        assert play.failures >= KILLS // 2, "too few noticed to prove anything"
        assert not database.guard.broken.is_set(), "the same history goes on"
        await play.is_collected()


# --- the disk is full -------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120 + 30 * KILLS)
async def test_writes_that_find_no_room_lose_no_acknowledged_record(
    database: Database, make_topic: MakeTopic, steps: Steps, tmp_path: Path
) -> None:
    generator = random.Random(SEED)
    keys = [partition.partition_key for partition in (await make_topic(partition_count=4)).partitions]
    play = Play(database, SegmentDirectory(tmp_path, segment_bytes=SEGMENT_BYTES), keys)
    try:
        for number in range(KILLS):
            step, calls = generator.randint(1, LAST_STEP), generator.randint(1, 12)
            steps.arm(step, lambda calls=calls: steps.refuse(calls))
            play.go_on()
            which = f"round {number} of seed {SEED}, {calls} writes from step {step}"
            await play.until(steps.struck.is_set, which)
            await play.comes_back(which)
        assert play.failures >= KILLS // 2, "too few noticed to prove anything"
        await play.is_collected()
    finally:
        await play.close()


@pytest.fixture
def disk() -> Iterator[Disk]:
    with mounted() as made:
        yield made


async def nothing() -> None:
    pass


async def fill_again_and_again(
    play: Play, steps: Steps, disk: Disk, press: Callable[[], Awaitable[None]] = nothing
) -> None:
    """Fill the disk at a step, and empty it once that has been noticed often enough, FULL_ROUNDS times. In every other
    round `press` makes things worse in between."""
    generator = random.Random(SEED)
    for number in range(FULL_ROUNDS):
        step, failures = generator.randint(1, LAST_STEP), generator.randint(1, 20)
        which = f"round {number} of seed {SEED}, full at step {step} until {failures} failures"
        steps.arm(step, disk.fill)
        play.go_on()
        await play.until(steps.struck.is_set, which)
        enough = play.failures + failures
        if number % 2 == 0:
            await press()

        def noticed(enough: int = enough) -> bool:
            # Removing swept files makes room.
            disk.fill()
            return play.failures >= enough

        await play.until(noticed, f"{which}: nobody noticed")
        disk.empty()
        await play.comes_back(which)


@pytest.mark.timeout(120 + 60 * FULL_ROUNDS)
async def test_a_full_directory_loses_no_acknowledged_record(
    database: Database, make_topic: MakeTopic, steps: Steps, disk: Disk
) -> None:
    keys = [partition.partition_key for partition in (await make_topic(partition_count=4)).partitions]
    directory = disk.directory / "log"
    directory.mkdir()
    play = Play(database, SegmentDirectory(directory, segment_bytes=SEGMENT_BYTES), keys)
    try:
        await fill_again_and_again(play, steps, disk)
        await play.is_collected()
    finally:
        await play.close()


@pytest.mark.timeout(120 + 60 * FULL_ROUNDS)
async def test_a_disk_full_for_postgres_and_the_log_loses_no_acknowledged_record(disk: Disk, steps: Steps) -> None:
    """In every other round Postgres also needs room for its write-ahead log. Then it either ends, or accepts no
    connection: a server that restarted on the full disk cannot write what a new connection needs."""
    server = EmbeddedPostgres(disk.directory)
    await server.start()
    try:
        with (server.cluster_dir / "postgresql.auto.conf").open("a") as file:
            file.write(SMALL_WAL)
        await server.stop()
        await server.start()
        async with playing(server, disk.directory / "log") as (database, play):

            async def end_postgres() -> None:
                restarts, pid = server.restarts, server.pid
                deadline = time.monotonic() + DEADLINE_S
                let_in = time.monotonic()
                while server.pid == pid and server.restarts == restarts and time.monotonic() < let_in + SHUT_S:
                    assert time.monotonic() < deadline, "Postgres still finds room for its write-ahead log"
                    disk.fill()
                    with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                        connection = await asyncpg.connect(server.url, timeout=5)
                        let_in = time.monotonic()
                        try:
                            await connection.execute(
                                "select pg_logical_emit_message(false, 'full', '') ; select pg_switch_wal()"
                            )
                        finally:
                            await connection.close(timeout=5)
                    await asyncio.sleep(RETRY_S)

            await fill_again_and_again(play, steps, disk, end_postgres)
            assert not database.guard.broken.is_set(), "the same history goes on"
            await play.is_collected()
    finally:
        await server.stop()
