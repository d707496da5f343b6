"""`python -m bench.worst`: how long the worst legal requests block the event loop, and how much memory they take.

    python -m bench.worst                 everything, some minutes
    python -m bench.worst produce fetch   cases whose name contains one of these
    python -m bench.worst longest         those with the longest strings

The requests come from `bench/worst_requests.py`. "Held" is the CPU time of the loop's thread between two turns of the
loop (`bench/probe.py`), so other processes on the machine do not matter. "Late" is by the wall clock, so they do.
"Grown" is the growth of the process' resident memory at its peak. It does not include memory that the allocator kept
from earlier requests, so it is a lower bound.

A case is marked if it blocks the loop above 20 ms, is answered with more than 64 MB, or takes more than sixteen times
its size. If any case is marked, the command ends with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from uuid import UUID

import asyncpg

from bench.depth import FILL
from bench.frames import Connection, frame
from bench.librdkafka import create_topic
from bench.worst_requests import (
    ABORTED,
    ABORTED_TRANSACTIONS,
    IN_MANY,
    READ_ABORTED,
    TRANSACTIONAL_ID,
    WIDE,
    WIDE_PARTITIONS,
    Case,
    administration,
    behind_aborted,
    costly_contents,
    costly_patterns,
    in_many_partitions,
    in_transactions,
    longest_strings,
    of_share_groups,
    whole_apis,
)
from gateway.config.broker_clients import STANDARD_AUTHORIZER
from gateway.config.jaas import PLAIN_MODULE
from protocol.api_keys import ApiKey
from protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.messages.sasl_authenticate import SaslAuthenticateRequest
from protocol.messages.sasl_handshake import SaslHandshakeRequest
from protocol.records import Record, build_batch
from storage.embedded import EmbeddedPostgres
from tests.gateway_process import GatewayProcess, find_coordinator, free_ports
from tests.wire import WireClient

LIMIT_MS = 20.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_GROWTH, LEAST_BYTES = 16, 4 * 1024 * 1024
"""The memory that a request may use, as a multiple of its size. A request smaller than `LEAST_BYTES` counts as one of
that size.
"""
ANSWER_TIMEOUT_S = 120.0

ABORT = """
insert into sluice.aborted_transaction (partition_key, producer_id, first_offset, last_offset, last_stable_offset)
select p.partition_key, 1000000 + n, n, $2 + n, case when n < $2 - 1 then n + 1 else 2 * $2 end
from sluice.partition p join sluice.topic t using (topic_id), generate_series(0, $2::bigint - 1) n
where t.name = $1
"""


@dataclass(frozen=True, slots=True)
class Held:
    case: str
    held_ms: float
    collected_ms: float
    late_ms: float
    took_s: float
    note: str
    sent_bytes: int
    """Bytes of the largest request."""
    answer_bytes: int
    """Bytes of the largest answer."""
    grown_bytes: int
    """Growth of the process at its peak: resident memory, as the kernel counts it."""

    @property
    def violates(self) -> bool:
        return (
            self.held_ms > LIMIT_MS
            or self.answer_bytes > MAX_ANSWER_BYTES
            or self.grown_bytes > MAX_GROWTH * max(self.sent_bytes, LEAST_BYTES)
        )


@dataclass(slots=True)
class Exchanged:
    note: str = "answered"
    sent_bytes: int = 0
    answer_bytes: int = 0


async def abort_around_one_batch(gateway: Gateway) -> None:
    """Write that many transactions into one partition, all open at once and then aborted.

    A reader of the last batch before their markers receives a list of all these transactions. The function writes the
    resulting rows directly, because beginning and ending so many transactions takes minutes.
    """
    url = EmbeddedPostgres(gateway.data_dir).running_url()
    assert url is not None
    connection = await asyncpg.connect(url)
    try:
        a_batch = build_batch([Record(0, 0, None, b"aborted", ())])
        await connection.execute(FILL, ABORTED, 2 * ABORTED_TRANSACTIONS, a_batch)
        await connection.execute(ABORT, ABORTED, ABORTED_TRANSACTIONS)
    finally:
        await connection.close()


# --- measuring -----------------------------------------------------------------------------------------------------


class Gateway(GatewayProcess):
    """A gateway that runs the probe in its process."""

    def __init__(self, directory: Path) -> None:
        self.report = directory / "probe.json"
        opened, asking = free_ports(2)
        self.asking = f"127.0.0.1:{asking}"
        """Address of the listener on which clients must authenticate."""
        super().__init__(
            directory,
            database_url=None,
            # The ACLs make each check search for the ACLs of its resource.
            settings={
                "listeners": f"OPEN://127.0.0.1:{opened},ASKING://127.0.0.1:{asking}",
                "listener.security.protocol.map": "OPEN:PLAINTEXT,ASKING:SASL_PLAINTEXT",
                "sasl.enabled.mechanisms": "PLAIN",
                "listener.name.asking.plain.sasl.jaas.config": f'{PLAIN_MODULE} required user_bench="bench";',
                "delegation.token.secret.key": "bench",
                "group.initial.rebalance.delay.ms": "0",
                "message.max.bytes": "8000000",
                "authorizer.class.name": STANDARD_AUTHORIZER,
                "allow.everyone.if.no.acl.found": "true",
            },
            environment={"BENCH_PROBE": str(self.report)},
        )
        self._arguments[self._arguments.index("gateway.cli")] = "bench.probe"

    async def probe(self) -> tuple[float, float, float]:
        """Return (blocked, longest garbage collection, late) in ms since the last call."""
        self.report.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while not self.report.exists():  # noqa: ASYNC110 (another process writes it)
                await asyncio.sleep(0.01)
        figures = json.loads(self.report.read_text())
        return figures["held_ms"], figures["collected_ms"], figures["late_ms"]


@contextlib.contextmanager
def probed_gateway() -> Iterator[Gateway]:
    directory = Path(tempfile.mkdtemp(prefix="sluice-worst-", dir=os.environ.get("SLUICE_BENCH_DIR")))
    directory.chmod(0o755)
    gateway = Gateway(directory)
    gateway.start()
    find_coordinator(gateway.bootstrap)
    try:
        yield gateway
    finally:
        gateway.close()
        shutil.rmtree(directory)


def _who() -> Iterator[bytes]:
    yield frame(ApiKey.SASL_HANDSHAKE, 1, 1, SaslHandshakeRequest(mechanism="PLAIN"))
    yield frame(ApiKey.SASL_AUTHENTICATE, 2, 1, SaslAuthenticateRequest(auth_bytes=b"\0bench\0bench"))


async def ask_all(gateway: Gateway, case: Case) -> Exchanged:
    """Send the case's requests, each after the answer to the previous one. Return their outcomes."""
    seen = Exchanged()
    host, _, port = (gateway.asking if case.known else gateway.bootstrap).rpartition(":")
    connection = await Connection.open(host, int(port))
    frames = (frame(case.api_key, case.version, 1, request) for request in case.requests)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            for sent in chain(_who() if case.known else (), frames):
                seen.sent_bytes = max(seen.sent_bytes, len(sent))
                connection.writer.write(sent)
                await connection.writer.drain()
                size = int.from_bytes(await connection.reader.readexactly(4), "big")
                left = size
                seen.answer_bytes = max(seen.answer_bytes, size)
                while left:
                    left -= len(await connection.reader.readexactly(min(left, 2**20)))
    except (asyncio.IncompleteReadError, ConnectionError):
        seen.note = "closed"
    except TimeoutError:
        seen.note = "not answered in time"
    connection.writer.close()
    return seen


def start_peak(pid: int) -> int:
    """Return the resident bytes of the process, and reset the kernel's peak value."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status_bytes(pid, "VmRSS")


def peak(pid: int) -> int:
    return _status_bytes(pid, "VmHWM")


def _status_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


async def topic_id_of(gateway: Gateway, name: str) -> UUID:
    async with await WireClient.connect(gateway.bootstrap) as client:
        answer = await client.send(MetadataRequest(topics=(MetadataRequestTopic(name=name),)), 12)
        return answer.topics[0].topic_id


async def initialized(gateway: Gateway, transactional_id: str) -> InitProducerIdResponse:
    async with await WireClient.connect(gateway.bootstrap) as client:
        asked = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=600_000)
        return await client.send(asked, 4)


async def measure(chosen: Callable[[str], bool]) -> list[Held]:
    rows: list[Held] = []
    with probed_gateway() as gateway:
        make = asyncio.to_thread
        await make(create_topic, gateway.bootstrap, "plain", 8)
        await make(create_topic, gateway.bootstrap, "compacted", 8, {"cleanup.policy": "compact"})
        await make(create_topic, gateway.bootstrap, "stamped", 8, {"message.timestamp.type": "LogAppendTime"})
        await make(create_topic, gateway.bootstrap, WIDE, WIDE_PARTITIONS)
        if chosen(READ_ABORTED):
            await make(create_topic, gateway.bootstrap, ABORTED, 1)
            await abort_around_one_batch(gateway)
        cases = chain(
            costly_contents(chosen),
            in_transactions(await initialized(gateway, TRANSACTIONAL_ID)),
            behind_aborted(),
            costly_patterns(),
            of_share_groups(await topic_id_of(gateway, WIDE)),
            whole_apis(chosen),
            longest_strings(chosen),
            administration(),
            in_many_partitions(chosen, gateway.bootstrap, await initialized(gateway, IN_MANY)),
        )
        for case in cases:
            if not chosen(case.name):
                continue
            await gateway.probe()
            before = start_peak(gateway.pid)
            started = time.perf_counter()
            seen = await ask_all(gateway, case)
            took_s = time.perf_counter() - started
            held_ms, collected_ms, late_ms = await gateway.probe()
            grown = peak(gateway.pid) - before
            row = Held(
                case.name,
                held_ms,
                collected_ms,
                late_ms,
                took_s,
                seen.note,
                seen.sent_bytes,
                seen.answer_bytes,
                grown,
            )
            rows.append(row)
            figures = f"{held_ms:7.1f} ms held, {collected_ms:7.1f} collecting, {late_ms:7.1f} late, {took_s:6.1f} s"
            sizes = f"{_mb(seen.sent_bytes)} MB sent, {_mb(seen.answer_bytes)} answered, {_mb(grown)} grown"
            line = f"{'!' if row.violates else ' '} {figures}, {sizes}: {case.name} ({seen.note})"
            print(line, file=sys.stderr, flush=True)
    return rows


def _mb(size: int) -> str:
    return f"{size / 2**20:.1f}"


def report(rows: list[Held]) -> str:
    """Print violations first, and then the other cases by how long they blocked the event loop."""
    heads = ("", "request", "held, ms", "longest collection, ms", "late, ms", "took, s", "sent, MB", "answer, MB")
    lines = [f"| {' | '.join((*heads, 'grown, MB', ''))} |", "|---" * (len(heads) + 2) + "|"]
    for row in sorted(rows, key=lambda row: (not row.violates, -row.held_ms)):
        times = (f"{value:.1f}" for value in (row.held_ms, row.collected_ms, row.late_ms, row.took_s))
        sizes = map(_mb, (row.sent_bytes, row.answer_bytes, row.grown_bytes))
        cells = ("**!**" if row.violates else "", row.case, *times, *sizes, row.note)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.worst", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("names", nargs="*", help="measure cases whose name contains one of these")
    arguments = parser.parse_args()
    names: list[str] = arguments.names
    rows = asyncio.run(measure(lambda case: not names or any(name in case for name in names)))
    print(report(rows))
    return int(any(row.violates for row in rows))


if __name__ == "__main__":
    sys.exit(main())
