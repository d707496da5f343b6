"""`sluice consume --group`: a member of a group, by aiokafka, which prints records and commits what it printed.

The one idea: a position is committed after its records have reached the output, and before the group may move its
partition. So a failure may print a record twice, but loses no record.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Collection

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import BrokerResponseError, CommitFailedError, IllegalStateError, KafkaError

from gateway.commands.arguments import Address
from gateway.commands.errors import CommandError
from gateway.commands.refusals import reason
from gateway.commands.render import ranges
from gateway.commands.security import ClientSecurity
from protocol.errors import ErrorCode
from protocol.records import Record

COMMIT_INTERVAL_S = 1.0
RECORDS_PER_READ = 500
RESETS = {"beginning": "earliest", "end": "latest"}
"""Position at which a member starts if its group has committed nothing, as in Kafka's auto.offset.reset."""

_WAIT_MS = 500

Print = Callable[[int, Record], None]


class _Member(ConsumerRebalanceListener):
    def __init__(self, consumer: AIOKafkaConsumer, *, verbose: bool) -> None:
        self._consumer = consumer
        self._verbose = verbose
        self._printed: dict[TopicPartition, int] = {}
        """Next offset of each partition whose printed records are not committed yet."""
        self._committed_at_s = time.monotonic()
        self.assigned: set[TopicPartition] | None = None
        """Assigned partitions. None if the group has not assigned any yet."""
        self.ends: dict[TopicPartition, int] = {}
        """Log ends of the assigned partitions at the time of the assignment."""

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        await self.commit()
        self._say("revoked", revoked)

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self.assigned = set(assigned)
        self._say("assigned", assigned)

    def _say(self, what: str, partitions: Collection[TopicPartition]) -> None:
        if self._verbose:
            found = ranges(each.partition for each in partitions) or "no partitions"
            print(f"sluice: {what} {found}", file=sys.stderr, flush=True)

    def printed(self, partition: TopicPartition, offset: int) -> None:
        self._printed[partition] = offset + 1

    async def commit_when_due(self) -> None:
        if time.monotonic() - self._committed_at_s >= COMMIT_INTERVAL_S:
            await self.commit()

    async def commit(self) -> None:
        """Commit the positions of printed records, for the partitions that this member still owns."""
        owned = self._consumer.assignment()
        due = {each: offset for each, offset in self._printed.items() if each in owned}
        self._printed.clear()
        self._committed_at_s = time.monotonic()
        if due:
            try:
                await self._consumer.commit(due)
            except (CommitFailedError, IllegalStateError):
                # The group has moved the partitions: their new owner prints these records again.
                print("sluice: the group has moved partitions; some records may be printed twice", file=sys.stderr)

    async def is_at_end(self) -> bool:
        """Return whether each assigned partition was printed up to the end that it had when it was assigned."""
        if self.assigned is None:
            return False
        missing = [each for each in self.assigned if each not in self.ends]
        if missing:
            self.ends |= await self._consumer.end_offsets(missing)
        try:
            return all([await self._consumer.position(each) >= self.ends[each] for each in self.assigned])
        except IllegalStateError:
            return False  # the group is moving a partition at this moment


def consume(bootstrap: tuple[Address, ...], security: ClientSecurity, given: argparse.Namespace, show: Print) -> int:
    """Print records until Ctrl-C, or until the limits of `given` are reached."""
    if given.start not in RESETS:
        raise CommandError("with --group, --from is beginning or end: the group's commits say where to go on")
    if given.partition:
        raise CommandError("with --group, the group chooses the partitions: leave out --partition")
    try:
        asyncio.run(_consume(bootstrap, security, given, show))
    except KafkaError as error:
        needs = f"--operation read --group {given.group}"
        code = error.errno if isinstance(error, BrokerResponseError) else ErrorCode.NONE
        raise CommandError(f"group {given.group}: {reason(code, str(error), needs=needs)}") from error
    return 0


async def _consume(
    bootstrap: tuple[Address, ...], security: ClientSecurity, given: argparse.Namespace, show: Print
) -> None:
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # failures are shown to the user as one sentence
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=[f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in bootstrap],
        client_id="sluice-cli",
        group_id=given.group,
        enable_auto_commit=False,
        auto_offset_reset=RESETS[given.start],
        isolation_level="read_committed",
        request_timeout_ms=max(int(given.timeout * 1000), 1_000),
        **security.as_aiokafka(),
    )
    member = _Member(consumer, verbose=given.verbose)
    consumer.subscribe([given.topic], listener=member)
    await consumer.start()
    try:
        await _print(consumer, member, given, show, stopped)
        await member.commit()
    finally:
        await consumer.stop()


async def _print(
    consumer: AIOKafkaConsumer, member: _Member, given: argparse.Namespace, show: Print, stopped: asyncio.Event
) -> None:
    left: int | None = given.records
    while left != 0 and not stopped.is_set():
        most = RECORDS_PER_READ if left is None else min(left, RECORDS_PER_READ)
        found = await consumer.getmany(timeout_ms=_WAIT_MS, max_records=most)
        for partition, records in found.items():
            for each in records:
                headers = tuple(each.headers)
                show(partition.partition, Record(each.offset, each.timestamp, each.key, each.value, headers))
                member.printed(partition, each.offset)
            if left is not None:
                left -= len(records)
        sys.stdout.flush()
        await member.commit_when_due()
        if given.exit_at_end and not found and await member.is_at_end():
            return
