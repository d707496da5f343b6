"""`sluice doctor`: check Postgres, disk, clock, addresses and limits, and say for each finding what to do.

The one idea: each check returns findings, and a finding is one line with its remedy. The command changes nothing, and
it reads the settings that `serve` reads. A node pins `synchronous_commit` and the timeouts of idle sessions for its own
connections, so the server's values of these do not matter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from gateway.config.listeners import render_address
from gateway.config.settings import Settings
from storage.doctor import ServerReport, read_server
from storage.embedded_socket import running_url
from storage.errors import PoolerError, StorageError
from storage.pool import Database
from storage.types import Address

EXIT_FINDINGS, EXIT_CANNOT_LOOK = 1, 2
MIN_POSTGRES = 15
MIN_WAL_BYTES = 512 * 1024 * 1024
MAX_CLOCK_ERROR_MS = 500
SYNCS = 20
SYNC_BLOCK_BYTES = 4096
MAX_SYNC_MS = 10.0
"""A commit waits for one sync. A data-centre disk takes less than a millisecond, a rotating disk about ten."""
CONNECT_TIMEOUT_S = 3.0
MIN_OPEN_FILES = 4096

Configure = Callable[[argparse.Namespace], Settings]


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem, and its remedy."""

    check: str
    problem: str
    remedy: str


def add_doctor(parser: argparse.ArgumentParser, settings: Configure) -> None:
    def run(given: argparse.Namespace) -> int:
        return _run(settings(given), as_json=bool(given.json))

    parser.add_argument("--json", action="store_true", help="JSON instead of lines")
    parser.set_defaults(run=run)


def _run(settings: Settings, *, as_json: bool) -> int:
    try:
        url = settings.database_url or running_url(settings.data_dir)
        if url is None:
            place = settings.data_dir.absolute()
            print(
                f"sluice: no gateway serves from {place}: give --config, --database-url or --data-dir",
                file=sys.stderr,
            )
            return EXIT_CANNOT_LOOK
        findings = asyncio.run(_examine(settings, url))
    except StorageError as error:
        reason = " ".join(str(error).split())
        print(f"sluice: Postgres cannot be examined: {reason}. Check --database-url and the server.", file=sys.stderr)
        return EXIT_CANNOT_LOOK
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    elif findings:
        print("\n".join(f"{finding.check}: {finding.problem}. {finding.remedy}." for finding in findings))
    else:
        print("no findings")
    return EXIT_FINDINGS if findings else 0


async def _examine(settings: Settings, url: str) -> list[Finding]:
    findings = await _examine_postgres(settings, url)
    for place in (settings.data_dir, settings.log_place):
        if isinstance(place, Path) and place.is_dir():
            findings += await asyncio.to_thread(examine_disk, place)
    advertised = [
        (host, port + worker)
        for listener in settings.listeners
        for host, port in (listener.advertised,)
        for worker in range(1 if listener.is_shared else settings.workers)
        if port
    ]
    for reached in await asyncio.gather(*(examine_address(address) for address in advertised)):
        findings += reached
    return findings + examine_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


async def _examine_postgres(settings: Settings, url: str) -> list[Finding]:
    try:
        database = await Database.open(url, hot_connections=1, cold_connections=1, control_connections=1)
    except PoolerError as error:
        return [Finding("pooler", str(error), "Set pool_mode = session, or give the URL of Postgres itself")]
    try:
        before_ms = time.time() * 1000
        report = await read_server(database)
        after_ms = time.time() * 1000
    finally:
        await database.close()
    needed = settings.workers * settings.connections
    return examine_server(report, needed) + examine_clock(report.clock_ms, before_ms, after_ms)


def examine_server(report: ServerReport, needed_connections: int) -> list[Finding]:
    """Return findings about a server that must serve `needed_connections` of the nodes on this host."""
    findings: list[Finding] = []
    if report.major_version < MIN_POSTGRES:
        findings.append(
            Finding("version", f"Postgres {report.major_version} is too old", f"Upgrade it to {MIN_POSTGRES} or later")
        )
    if not report.fsync:
        findings.append(
            Finding(
                "fsync",
                "fsync is off: a crash of the host loses acknowledged records",
                "Set fsync = on and reload Postgres",
            )
        )
    if not report.full_page_writes:
        findings.append(
            Finding(
                "full_page_writes",
                "full_page_writes is off: a crash of the host can corrupt tables",
                "Set full_page_writes = on and reload Postgres",
            )
        )
    if report.max_wal_bytes < MIN_WAL_BYTES:
        findings.append(
            Finding(
                "max_wal_size",
                f"max_wal_size is {report.max_wal_bytes // 1024**2} MB: frequent checkpoints slow down commits",
                "Set max_wal_size = 1GB and reload Postgres",
            )
        )
    if report.usable_connections < needed_connections:
        findings.append(
            Finding(
                "max_connections",
                f"Postgres admits {report.usable_connections} connections, and this host's nodes open up to "
                f"{needed_connections}",
                "Raise max_connections and restart Postgres, or lower --hot-connections and --cold-connections",
            )
        )
    return findings


def examine_clock(clock_ms: float, before_ms: float, after_ms: float) -> list[Finding]:
    """Compare Postgres' clock with this host's clock, which is read before and after Postgres answers."""
    error_ms = max(before_ms - clock_ms, clock_ms - after_ms)
    if error_ms <= MAX_CLOCK_ERROR_MS:
        return []
    problem = f"the clocks of this host and of Postgres differ by {error_ms:.0f} ms"
    return [Finding("clock", problem, "Synchronise both hosts by NTP")]


def examine_disk(directory: Path) -> list[Finding]:
    """Measure the syncs of a small temporary file in the directory. The file has no name and is removed when the call
    ends.
    """
    durations_ms: list[float] = []
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            for _ in range(SYNCS):
                os.write(file.fileno(), bytes(SYNC_BLOCK_BYTES))
                began_s = time.perf_counter()
                os.fdatasync(file.fileno())
                durations_ms.append((time.perf_counter() - began_s) * 1000)
    except OSError as error:
        problem = f"{directory} cannot be written: {error.strerror}"
        return [Finding("disk", problem, "Make the directory writable for this account, and free space")]
    return judge_syncs(directory, statistics.median(durations_ms))


def judge_syncs(directory: Path, median_ms: float) -> list[Finding]:
    """Return a finding if syncs in the directory take too long; `median_ms` is the median duration of one sync."""
    if median_ms <= MAX_SYNC_MS:
        return []
    problem = f"a sync in {directory} takes {median_ms:.1f} ms, and each commit waits for one"
    return [Finding("disk", problem, "Move the directory to a faster disk")]


async def examine_address(address: Address) -> list[Finding]:
    """Connect to an advertised address from this host."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(*address)
    except OSError as error:
        reason = error.strerror or str(error) or "no answer"
        return [
            Finding(
                "advertised",
                f"{render_address(address)} cannot be reached from this host: {reason}",
                "Start the node, or correct --advertise, DNS and firewalls",
            )
        ]
    writer.close()
    return []


def examine_open_files(limit: int) -> list[Finding]:
    """Check the hard limit, to which a node raises its own. Each client connection is an open file."""
    if limit == resource.RLIM_INFINITY or limit >= MIN_OPEN_FILES:
        return []
    problem = f"the limit of open files is {limit}, and each client connection is one"
    return [Finding("open-files", problem, "Raise it, e.g. LimitNOFILE=65536 in the systemd unit")]
