"""Measure how long `analyze` takes over a large journal, how much memory it needs, and whether its figures are right.

`python -m bench.analysis --rows 10000000` simulates groups whose correct figures are known (tests/pipeline/planted.py)
and writes their journal to Postgres. Then it analyses the journal in a process of its own, as a user does, and compares
every figure. One group has nine of ten rows, as the largest group of a real cluster does. `--url URL --truth FILE`
keeps the planted journal and its correct figures, so that a later run can analyse the same journal again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import pyarrow.parquet as parquet

from pipeline.analyze.journal import TABLES
from storage.migrate import migrate
from storage.pool import SESSION_SETTINGS, Database
from tests.pipeline.planted import Clock, Group, Row, Truth, round_robin
from tests.postgres import EMPTY, databases

TARGET_SECONDS = 180
DRIVER_MEMORY = "1500m"
CHUNK = 50_000
PARTITIONS = 24
ROUNDS_BETWEEN = 40
FIGURES = ("rebalances", "partitions_moved", "minimum_moves", "unowned_partition_ms", "duplicates_min",
           "duplicates_max", "skipped", "forced", "accepted_commits", "refused_commits")  # fmt: skip
"""Figures of each group. The planted number and the number that the analysis wrote must be equal."""


class Writer:
    """Writes rows of all tables by binary COPY in chunks. Row numbers are reserved once, at the end."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._waiting: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self._columns = {name: tuple(schema.names) for name, schema in TABLES.items()}
        self.rows = 0

    def emit(self, table: str, row: Row) -> None:
        columns = self._columns.get(table)
        if columns is not None:
            self._waiting[table].append(tuple(row.get(name) for name in columns))
            self.rows += 1

    async def flush(self, at_least: int) -> None:
        for table, rows in self._waiting.items():
            if len(rows) >= at_least:
                await self._connection.copy_records_to_table(table, records=rows, columns=self._columns[table])
                rows.clear()


async def plant(url: str, rows: int) -> dict[str, Truth]:
    """Fill the journal with at least `rows` rows. Return the correct figures of each group."""
    database = await Database.open(url)
    await migrate(database)
    await database.close()
    connection = await asyncpg.connect(url, server_settings=dict(SESSION_SETTINGS))
    writer, clock = Writer(connection), Clock()
    truths: dict[str, Truth] = {}
    try:
        await connection.execute("select journal_make_partitions(1)")
        for number in range(11):
            group = Group(writer.emit, clock, f"group-{number}", PARTITIONS, number, cooperative=bool(number % 2))
            until = writer.rows + int(rows * (0.9 if number == 0 else 0.01))
            group.join(3)
            while writer.rows < until:
                await _an_hour(group, clock, writer)
            truths[group.group_id] = group.finish()
        await writer.flush(0)
        await connection.fetchval("select journal_reserve($1)", clock.seq)
    finally:
        await connection.close()
    return truths


def planted(url: str, rows: int, told: Path | None) -> dict[str, Truth]:
    """Return the correct figures of each group. If `told` is given, read the figures of an earlier run from it;
    otherwise plant a journal now.
    """
    if told is not None and told.exists():
        return {group: Truth(**truth) for group, truth in json.loads(told.read_text()).items()}
    started = time.monotonic()
    truths = asyncio.run(plant(url, rows))
    print(f"planted in {time.monotonic() - started:.0f} s", flush=True)
    if told is not None:
        kept = {group: {name: getattr(truth, name) for name in (*FIGURES, "storms")} for group, truth in truths.items()}
        told.write_text(json.dumps(kept))
    return truths


async def _an_hour(group: Group, clock: Clock, writer: Writer) -> None:
    """Simulate an hour in which every counted event happens, with much undisturbed work in between."""
    for act in (
        lambda: group.join(duplicates=11),
        lambda: group.leave(force=True),
        lambda: group.join(gap=7, assign=round_robin),
        lambda: group.leave(expire=True),
        lambda: group.storm(6, 4_000),
        group.interrupted,
    ):
        act()
        group.work(ROUNDS_BETWEEN, 30_000)
        clock.now_ms += 120_000
        await writer.flush(CHUNK)


def found(out: Path) -> dict[str, dict[str, int]]:
    """Return the figures that the analysis job wrote, summed in the same way as the correct figures."""
    sums: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in parquet.read_table(out / "rebalance").to_pylist():
        mine = sums[row["group_id"]]
        mine["rebalances"] += 1
        for name in ("partitions_moved", "minimum_moves", "unowned_partition_ms"):
            mine[name] += row[name] or 0
    for row in parquet.read_table(out / "handoff").to_pylist():
        mine = sums[row["group_id"]]
        for name in ("duplicates_min", "duplicates_max", "skipped", "forced"):
            mine[name] += row[name] or 0
    for row in parquet.read_table(out / "member_health").to_pylist():
        sums[row["group_id"]]["accepted_commits"] += row["commits"]
        sums[row["group_id"]]["refused_commits"] += row["refused_commits"]
    for row in parquet.read_table(out / "storm").to_pylist():
        sums[row["group_id"]]["storms"] += 1
    return sums


def differences(truths: dict[str, Truth], out: Path) -> list[str]:
    told = found(out)
    wrong = [
        f"{group_id}: {name} is {told[group_id][name]:,}, planted {getattr(truth, name):,}"
        for group_id, truth in truths.items()
        for name in FIGURES
        if told[group_id][name] != getattr(truth, name)
    ]
    wrong += [
        f"{group_id}: {told[group_id]['storms']} storms, planted {len(truth.storms)}"
        for group_id, truth in truths.items()
        if told[group_id]["storms"] != len(truth.storms)
    ]
    broken = parquet.read_table(out / "violation").num_rows
    return [*wrong, *([f"{broken} rules broken"] if broken else [])]


def analyze(url: str, out: Path, master: str) -> tuple[int, float, float, int, str]:
    """Return the job's exit code, its seconds, its CPU seconds, the peak resident memory of its processes (MiB) and its
    last output.
    """
    started, peak, busy = time.monotonic(), 0, 0.0
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", "analyze", "--database-url", url, "--out", str(out), "--master", master,
         "--memory", DRIVER_MEMORY, "--conf", "spark.sql.shuffle.partitions=16"],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak, busy
        while not ended.wait(0.5):
            total, used = 0, 0.0
            try:
                whole = psutil.Process(process.pid)
                for each in (whole, *whole.children(recursive=True)):
                    total += each.memory_info().rss
                    times = each.cpu_times()
                    used += times.user + times.system
            except psutil.NoSuchProcess:
                continue
            peak, busy = max(peak, total), max(busy, used)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        _, said = process.communicate(timeout=3_600)
    finally:
        process.kill()
        ended.set()
        watcher.join()
    return process.returncode, time.monotonic() - started, busy, peak >> 20, said.strip()[-400:]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.analysis", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the journal (default %(default)s)")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--url", help="a database to keep (default: create one and drop it)")
    parser.add_argument(
        "--truth",
        type=Path,
        help="file with the correct figures of --url; if it does not exist, plant the journal first",
    )
    parser.add_argument("--plant-only", action="store_true", help="fill --url without analysing it")
    given = parser.parse_args()
    if (given.url is None) != (given.truth is None) or (given.plant_only and given.url is None):
        parser.error("--url and --truth belong together, and --plant-only to both")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        url = given.url
        if url is None:
            server = stack.enter_context(databases())
            url = server.create(EMPTY)
            stack.callback(server.drop, url)
        truths = planted(url, given.rows, given.truth)
        if given.plant_only:
            return 0
        code, seconds, cpu_seconds, peak_mib, said = analyze(url, Path(folder), given.master)
        wrong = differences(truths, Path(folder)) if code in (0, 3) else [f"analyze ended with {code}: {said}"]
    result = {
        "rows": given.rows,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds),
        "peak_mib": peak_mib,
        "target_seconds": TARGET_SECONDS,
        "exact": not wrong,
    }
    print(json.dumps(result))
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
