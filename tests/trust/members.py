"""Clients of several kinds as members of a group. The life of a member lasts from its subscription until it closes.

The one idea: each kind reads, processes, commits every hundred records, and commits before it revokes. `Membership`
keeps positions and writes the history, so that the same checks apply to every kind.
"""

# The type stubs of these clients declare only a part of their API.
# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiokafka
import aiokafka.abc
import confluent_kafka
import kafka
from aiokafka.coordinator.assignors.range import RangePartitionAssignor as AiokafkaRange
from aiokafka.errors import KafkaError as AiokafkaError
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from kafka.consumer.subscription_state import (
    AsyncConsumerRebalanceListener,  # pyright: ignore[reportAttributeAccessIssue]
)
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.errors import KafkaError as KafkaPythonError
from kafka.structs import OffsetAndMetadata
from kafka.structs import TopicPartition as KafkaPythonPartition

from tests.aiokafka_stop import stop_aiokafka
from tests.closing import close, responds
from tests.trust.foreign import ForeignProcess
from tests.trust.history import Change, Consumed, History, OffsetCommitted, Outcome, OwnerChanged, number_in
from tests.trust.patience import CALL_S, LEAVE_S, PATIENT, WorkloadError

SIMPLE = "simple"
"""The protocol of a group without members. Its one consumer assigns itself all partitions."""
COMMIT_EVERY = 100
POLL_S = 0.1
JOINING_S = 2.0
"""How long a member of kafka-python polls while it owns nothing. If the poll ends before the JoinGroup answer arrives,
kafka-python drops that answer and sends nothing until its session has expired.
"""


Isolation = Literal["read_uncommitted", "read_committed"]


@dataclass(frozen=True)
class Life:
    """Settings of one life of a member. `ended` becomes true when the member must leave."""

    bootstrap: str
    group: str
    topic: str
    protocol: str
    isolation: Isolation
    instance: str | None
    session_ms: int
    name: str
    release_s: float
    """How long the application still works on records that it has read before it releases their partition."""
    ended: Callable[[], bool]


class Membership:
    """A member's positions and its part of the history. An event has the current time, unless the client reports a
    time.
    """

    def __init__(self, history: History, life: Life) -> None:
        self._history, self._life = history, life
        self._positions: dict[int, int] = {}
        """For each owned partition the offset to commit: one past the last processed record."""
        self.owned: set[int] = set()
        self.uncommitted = 0
        """Number of records that were processed since the last commit of all positions."""
        self.heard_s = time.monotonic()
        """When the client last received a record or partitions."""

    def took(self, partition: int, offset: int, value: int, at_s: float | None = None) -> None:
        life = self._life
        at_s = time.monotonic() if at_s is None else at_s
        self._history.add(Consumed(life.group, life.name, life.topic, partition, offset, value, at_s))
        self._positions[partition] = offset + 1
        self.uncommitted += 1
        self.heard_s = at_s

    def to_commit(self, partitions: Collection[int] | None = None) -> dict[int, int]:
        """Return the offsets to commit of these partitions, or of all: one past the last processed record."""
        if partitions is None:
            self.uncommitted = 0
        return {part: at for part, at in self._positions.items() if partitions is None or part in partitions}

    def committed(
        self,
        offsets: Mapping[int, int],
        invoked_s: float,
        outcomes: Mapping[int, Outcome],
        completed_s: float | None = None,
    ) -> None:
        life = self._life
        completed_s = time.monotonic() if completed_s is None else completed_s
        for partition, offset in offsets.items():
            self._history.add(
                OffsetCommitted(
                    *(life.group, life.name, life.topic, partition, offset, invoked_s, completed_s),
                    outcomes.get(partition, Outcome.UNKNOWN),
                )
            )

    def assigned(self, partitions: Iterable[int], at_s: float | None = None) -> None:
        self._changed(partitions, Change.ASSIGNED, at_s)

    def revoked(self, partitions: Iterable[int], at_s: float | None = None) -> None:
        self._changed(partitions, Change.REVOKED, at_s)

    def lost(self, partitions: Iterable[int], at_s: float | None = None) -> None:
        self._changed(partitions, Change.LOST, at_s)

    def _changed(self, partitions: Iterable[int], change: Change, at_s: float | None) -> None:
        life = self._life
        for partition in list(partitions):
            if change is not Change.ASSIGNED and partition not in self.owned:
                continue  # some clients call this callback once more when they close
            self._positions.pop(partition, None)
            self.owned.add(partition) if change is Change.ASSIGNED else self.owned.discard(partition)
            at_s = time.monotonic() if at_s is None else at_s
            if change is Change.ASSIGNED:
                self.heard_s = at_s
            self._history.add(OwnerChanged(life.group, life.name, life.topic, partition, change, at_s))


# --- librdkafka ---------------------------------------------------------------------------------------------------


class LibrdkafkaMember:
    def __init__(self, life: Life, membership: Membership) -> None:
        self._life, self._membership = life, membership
        self._consumer = confluent_kafka.Consumer(_librdkafka_settings(life))

    def live(self) -> None:
        is_simple = self._life.protocol == SIMPLE
        if is_simple:
            self._assign()
        else:
            self._consumer.subscribe(
                [self._life.topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
            )
        try:
            while not self._life.ended():
                self._take()
                # A group without members commits seldom. An offset that fell shows only until the next commit.
                if self._membership.uncommitted >= COMMIT_EVERY * (3 if is_simple else 1):
                    self._commit()
            if is_simple:
                self._commit()
                self._consumer.close()
            elif responds(self._consumer, TopicPartition(self._life.topic, 0), LEAVE_S):
                close(self._consumer, self._take, patience_s=LEAVE_S)
            else:
                # The client has deadlocked. It no longer sends heartbeats, so its group goes on without it.
                self._membership.lost(set(self._membership.owned), self._membership.heard_s)
        except KafkaException as error:
            if not _is_fatal(error.args[0]):
                raise
            # A static member is fenced if its JoinGroup arrives twice and the first copy arrives last. The fenced
            # client cannot continue, and a new one takes its place.
            self._membership.lost(set(self._membership.owned))
            self._consumer.close()

    def _assign(self) -> None:
        """Assign all partitions of the topic, and begin at the group's committed offsets."""
        topic = self._life.topic
        while not self._life.ended():
            try:
                count = len(self._consumer.list_topics(topic, CALL_S).topics[topic].partitions)
                found = self._consumer.committed([TopicPartition(topic, index) for index in range(count)], CALL_S)
            except KafkaException:
                continue  # the commit got no answer, so the member sends it again
            if count and not any(part.error for part in found):
                self._consumer.assign([TopicPartition(topic, part.partition, max(part.offset, 0)) for part in found])
                return

    def _take(self) -> None:
        message = self._consumer.poll(POLL_S)
        if message is None:
            return
        error = message.error()
        if error is not None:
            if _is_fatal(error):
                raise KafkaException(error)
            return
        partition, offset, value = message.partition(), message.offset(), message.value()
        assert partition is not None
        assert offset is not None
        self._membership.took(partition, offset, number_in(value))

    def _commit(self, partitions: Collection[int] | None = None) -> None:
        wanted = self._membership.to_commit(partitions)
        if not wanted:
            return
        invoked_s = time.monotonic()
        outcomes: dict[int, Outcome] = {}
        try:
            offsets = [TopicPartition(self._life.topic, part, at) for part, at in wanted.items()]
            for answered in self._consumer.commit(offsets=offsets, asynchronous=False) or ():
                outcomes[answered.partition] = Outcome.OK if answered.error is None else Outcome.FAILED
        except KafkaException:
            pass  # refused or without an answer: the outcome stays unknown
        self._membership.committed(wanted, invoked_s, outcomes)

    def _assigned(self, _: confluent_kafka.Consumer, partitions: list[TopicPartition]) -> None:
        self._membership.assigned(_numbers(partitions))

    def _revoked(self, _: confluent_kafka.Consumer, partitions: list[TopicPartition]) -> None:
        time.sleep(self._life.release_s)
        self._commit(_numbers(partitions))
        self._membership.revoked(_numbers(partitions))

    def _lost(self, _: confluent_kafka.Consumer, partitions: list[TopicPartition]) -> None:
        self._membership.lost(_numbers(partitions))


def _is_fatal(error: KafkaError) -> bool:
    """Return whether the client refuses every further call."""
    return error.fatal() or error.code() == KafkaError._FATAL  # noqa: SLF001 - its public name


def _librdkafka_settings(life: Life) -> dict[str, Any]:
    common = {
        "bootstrap.servers": life.bootstrap,
        "client.id": life.name,
        "group.id": life.group,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "isolation.level": life.isolation,
        "check.crcs": True,
        **PATIENT,
    }
    if life.protocol == "consumer":
        return {**common, "group.protocol": "consumer"}
    static = {} if life.instance is None else {"group.instance.id": life.instance}
    return {
        **common,
        **static,
        "session.timeout.ms": life.session_ms,
        "heartbeat.interval.ms": 500,
        "partition.assignment.strategy": "range" if life.protocol == "eager" else "cooperative-sticky",
    }


# --- kafka-python -------------------------------------------------------------------------------------------------


class KafkaPythonMember(AsyncConsumerRebalanceListener):
    """A member of kafka-python. Its callbacks must not block, so its rebalance listener is asynchronous."""

    def __init__(self, life: Life, membership: Membership) -> None:
        self._life, self._membership = life, membership
        self._consumer: Any = kafka.KafkaConsumer(
            bootstrap_servers=life.bootstrap,
            client_id=life.name,
            group_id=life.group,
            group_instance_id=life.instance,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            isolation_level=life.isolation,
            session_timeout_ms=life.session_ms,
            heartbeat_interval_ms=500,
            reconnect_backoff_max_ms=500,
            partition_assignment_strategy=[
                RangePartitionAssignor if life.protocol == "eager" else CooperativeStickyAssignor
            ],
        )

    def live(self) -> None:
        self._consumer.subscribe([self._life.topic], listener=self)
        try:
            while not self._life.ended():
                with contextlib.suppress(KafkaPythonError):  # no coordinator for some seconds, or fenced
                    self._take(POLL_S if self._membership.owned else JOINING_S)
                if self._membership.uncommitted >= COMMIT_EVERY:
                    self._commit()
            self._commit()
        finally:
            self._membership.revoked(self._membership.owned)
            self._consumer.close(autocommit=False, timeout_ms=int(CALL_S * 1_000))

    def _take(self, seconds: float) -> None:
        for records in self._consumer.poll(int(seconds * 1_000)).values():
            for record in records:
                self._membership.took(record.partition, record.offset, number_in(record.value))

    def _commit(self) -> None:
        wanted = self._membership.to_commit()
        if not wanted:
            return
        invoked_s = time.monotonic()
        outcomes: dict[int, Outcome] = {}
        try:
            self._consumer.commit(self._offsets(wanted), timeout_ms=int(CALL_S * 1_000))
            outcomes = dict.fromkeys(wanted, Outcome.OK)
        except KafkaPythonError:
            pass  # refused or without an answer: the outcome stays unknown
        self._membership.committed(wanted, invoked_s, outcomes)

    def _offsets(self, offsets: Mapping[int, int]) -> dict[Any, Any]:
        return {
            KafkaPythonPartition(self._life.topic, part): OffsetAndMetadata(at, "", -1) for part, at in offsets.items()
        }

    async def on_partitions_assigned(self, assigned: Collection[Any]) -> None:
        self._membership.assigned(set(_numbers(assigned)) - self._membership.owned)

    async def on_partitions_revoked(self, revoked: Collection[Any]) -> None:
        wanted = self._membership.to_commit(_numbers(revoked))
        if wanted:
            invoked_s = time.monotonic()
            outcomes: dict[int, Outcome] = {}
            try:
                await self._consumer.commit_async(self._offsets(wanted))
                outcomes = dict.fromkeys(wanted, Outcome.OK)
            except KafkaPythonError:
                pass  # refused or without an answer: the outcome stays unknown
            self._membership.committed(wanted, invoked_s, outcomes)
        self._membership.revoked(_numbers(revoked))

    async def on_partitions_lost(self, lost: Collection[Any]) -> None:
        self._membership.lost(_numbers(lost))


# --- aiokafka -----------------------------------------------------------------------------------------------------


class AiokafkaMember(aiokafka.abc.ConsumerRebalanceListener):
    """A member with the eager protocol. It has an event loop of its own, on the caller's thread."""

    def __init__(self, life: Life, membership: Membership) -> None:
        self._life, self._membership = life, membership
        self._consumer: Any = None

    def live(self) -> None:
        asyncio.run(self._live())

    async def _live(self) -> None:
        life = self._life
        self._consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=life.bootstrap,
            client_id=life.name,
            group_id=life.group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            isolation_level=life.isolation,
            session_timeout_ms=life.session_ms,
            heartbeat_interval_ms=500,
            partition_assignment_strategy=(AiokafkaRange,),
        )
        self._consumer.subscribe([life.topic], listener=self)
        try:
            await self._consumer.start()
            while not life.ended():
                for records in (await self._consumer.getmany(timeout_ms=int(POLL_S * 1_000))).values():
                    for record in records:
                        # A rebalance may have begun between the fetch and this line. The member still owns a partition
                        # until its callback runs. Skip records of other partitions, because the member does not own
                        # these any more.
                        if record.partition in self._membership.owned:
                            self._membership.took(record.partition, record.offset, number_in(record.value))
                if self._membership.uncommitted >= COMMIT_EVERY:
                    await self._commit()
            await self._commit()
        except AiokafkaError:
            pass  # no node answers, or the coordinator refuses for good: the next client follows
        finally:
            self._membership.revoked(self._membership.owned)
            with contextlib.suppress(AiokafkaError, TimeoutError):
                await asyncio.wait_for(stop_aiokafka(self._consumer), LEAVE_S)

    async def _commit(self, partitions: Collection[int] | None = None) -> None:
        wanted = self._membership.to_commit(partitions)
        if not wanted:
            return
        invoked_s = time.monotonic()
        outcomes: dict[int, Outcome] = {}
        try:
            offsets = {aiokafka.TopicPartition(self._life.topic, part): at for part, at in wanted.items()}
            await asyncio.wait_for(self._consumer.commit(offsets), CALL_S)
            outcomes = dict.fromkeys(wanted, Outcome.OK)
        except (AiokafkaError, TimeoutError):
            pass  # refused or without an answer: the outcome stays unknown
        self._membership.committed(wanted, invoked_s, outcomes)

    async def on_partitions_assigned(self, assigned: Collection[Any]) -> None:
        self._membership.assigned(_numbers(assigned))

    async def on_partitions_revoked(self, revoked: Collection[Any]) -> None:
        if revoked:
            await asyncio.sleep(self._life.release_s)
            await self._commit(_numbers(revoked))
        self._membership.revoked(_numbers(revoked))


# --- Java and franz-go --------------------------------------------------------------------------------------------


class ForeignMember:
    def __init__(self, life: Life, membership: Membership, process: ForeignProcess) -> None:
        self._life, self._membership = life, membership
        self._client = process.start(
            *("member", life.name, life.group, life.topic, life.protocol, life.isolation),
            *(life.instance or "", int(life.release_s * 1_000)),
            on_event=self._heard,
        )

    def live(self) -> None:
        while not self._life.ended() and not self._client.wait(POLL_S):
            pass
        self._client.stop()
        if not self._client.wait(LEAVE_S):
            raise WorkloadError(f"member {self._life.name} of {self._life.group} does not end")

    def _heard(self, event: Sequence[str]) -> None:
        name, _, partition, *values = event
        match name:
            case "took":
                self._membership.took(int(partition), int(values[0]), number_in(values[1]), float(values[2]))
            case "committed":
                offset, invoked_s, completed_s, outcome = values
                self._membership.committed(
                    {int(partition): int(offset)},
                    float(invoked_s),
                    {int(partition): Outcome(outcome)},
                    float(completed_s),
                )
            case "assigned":
                self._membership.assigned([int(partition)], float(values[0]))
            case "revoked":
                self._membership.revoked([int(partition)], float(values[0]))
            case "lost":
                self._membership.lost([int(partition)], float(values[0]))
            case _:
                raise AssertionError(event)


def _numbers(partitions: Iterable[Any]) -> list[int]:
    return [each.partition for each in partitions]


LIBRDKAFKA, KAFKA_PYTHON, AIOKAFKA, JAVA, FRANZ_GO = "librdkafka", "kafka-python", "aiokafka", "Java", "franz-go"
ALL_KINDS = (LIBRDKAFKA, KAFKA_PYTHON, AIOKAFKA, JAVA, FRANZ_GO)
SPOKEN: Mapping[str, Sequence[str]] = {
    "eager": ALL_KINDS,
    "cooperative": (LIBRDKAFKA, KAFKA_PYTHON, JAVA, FRANZ_GO),
    "static": (LIBRDKAFKA, JAVA, FRANZ_GO),
    "consumer": (LIBRDKAFKA, JAVA, FRANZ_GO),
    SIMPLE: (LIBRDKAFKA,),
}
"""Kinds of clients by the group protocol that their members can speak."""


def draw(kinds: Sequence[str], protocol: str, chance: random.Random) -> str:
    """Choose a kind among `kinds` that speaks the protocol. If none does, choose librdkafka, which speaks every
    protocol.
    """
    return chance.choice([kind for kind in kinds if kind in SPOKEN[protocol]] or [LIBRDKAFKA])
