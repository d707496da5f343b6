"""Readers that are stock clients: librdkafka with `group.protocol=consumer`. A scenario says when they read and commit.

The one idea: a consumer is paused except while it reads. So the gateway serves it no more than its application
receives. The order of its rebalance callbacks shows which partitions it owns. librdkafka's own thread sends its
heartbeats.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import asyncpg
import confluent_kafka

from gateway.coordinator.handoff import HandoffEnd
from protocol.errors import ErrorCode
from protocol.messages.offset_commit import OffsetCommitRequest, OffsetCommitRequestPartition, OffsetCommitRequestTopic
from tests.clients.line import Line
from tests.closing import close
from tests.frames.members import fresh
from tests.gateway_process import GatewayProcess
from tests.gateway_readers import LEADS_AGAIN, GatewayReaders
from tests.readers import Partition

MORTAL_MS = 4_000
HEARTBEAT_MS = 300
"""In milliseconds. With 100 ms, members rejoined if the machine stopped the gateway for a second: librdkafka had given
up on answers that carried new epochs.
"""
READ_S = 20.0
"""Maximal number of seconds from the production of a record until its receipt."""
LOOK_S = 0.05
ONE_AT_A_TIME = {"queued.min.messages": 1, "fetch.message.max.bytes": 1, "statistics.interval.ms": 50}
"""With these settings librdkafka holds one batch. It fetches the next batch a second later (`fetch.queue.backoff.ms`),
unless the partition is paused. It fetches at once if it finds that the application has already taken the batch. It then
drops the answer when the application pauses the partition, and its statistics show that.
"""


class Client:
    """One consumer. It reports to `tells` until `forget` is called."""

    def __init__(self, readers: StockReaders, name: str, bootstrap: str, group_id: str) -> None:
        self.client_id = fresh(f"{group_id}-{name}")
        self.statistics: Mapping[str, Any] = {}
        self._name = name
        self._readers: StockReaders | None = readers
        self.consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group_id,
                "client.id": self.client_id,
                "group.protocol": "consumer",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "topic.metadata.refresh.interval.ms": 500,
                **({**ONE_AT_A_TIME, "stats_cb": self._counted} if readers.one_at_a_time else {}),
            }
        )

    def _counted(self, statistics: str) -> None:
        self.statistics = json.loads(statistics)

    def is_idle_since(self, since_s: float) -> bool:
        """Return whether the client was idle: its newest statistics are from after `then_s` (monotonic clock) and show
        no request under way.
        """
        return self.statistics.get("ts", 0) > since_s * 1e6 and not any(
            each["waitresp_cnt"] or each["outbuf_cnt"] for each in self.statistics["brokers"].values()
        )

    def subscribe(self, topics: Iterable[str]) -> None:
        self.consumer.subscribe(list(topics), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)

    def _assigned(self, consumer: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]) -> None:
        if self._readers is None:
            consumer.incremental_assign(partitions)
            return
        # If librdkafka is resumed while its offset request is under way, it sends the request again, and begins to read
        # twice.
        begin = consumer.committed(partitions, timeout=READ_S)
        for each in begin:
            assert each.error is None, each
            each.offset = max(each.offset, 0)
            # librdkafka can pause a partition only after it knows the partition.
            consumer.get_watermark_offsets(each, cached=True)
        consumer.pause(begin)
        consumer.incremental_assign(begin)
        self._readers.gained(self._name, begin)

    def _revoked(self, _consumer: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        if self._readers is not None:
            self._readers.let_go(self._name, partitions)

    def _lost(self, _consumer: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        assert self._readers is None, f"{self._name} has lost {partitions}"

    def forget(self) -> None:
        self._readers = None


class StockReaders(GatewayReaders):
    look_s = 0.05
    moment_s = 3 * HEARTBEAT_MS / 1_000

    def __init__(
        self,
        gateway: GatewayProcess,
        line: Line,
        partitions: int,
        *,
        topics: tuple[str, ...] = ("t",),
        timeout_ms: int = 30_000,
        mortal: bool = False,
        one_at_a_time: bool = False,
    ) -> None:
        """`line` leads to the gateway. Readers that must fall silent use it."""
        configs = {
            "group_handoff_timeout_ms": str(timeout_ms),
            "consumer_heartbeat_interval_ms": str(HEARTBEAT_MS),
        }
        if mortal:
            configs["consumer_session_timeout_ms"] = str(MORTAL_MS)
        super().__init__(gateway, partitions, topics, configs)
        self.one_at_a_time = one_at_a_time
        self._line = line
        self._bootstrap = line.address if mortal else gateway.bootstrap
        self._called = {called: topic for topic, called in self._names.items()}
        self._clients: dict[str, Client] = {}
        self._idle: dict[str, Client] = {}
        """Clients of readers that left. A reader that returns with the same name continues as the same member."""
        self._silent: list[Client] = []
        self._committed: dict[Partition, int] = {}
        self._done: dict[tuple[str, Partition], int] = {}
        """Offset behind the last record that each reader received and has not committed. A reader that receives a
        partition again begins at the committed offset, but its finished work stays finished."""

    def close(self) -> None:
        clients = [*self._clients.values(), *self._idle.values(), *self._silent]
        with ExitStack() as stack:
            stack.callback(self._runner.close)
            stack.callback(lambda: self._run(self._admin.close()))
            for client in clients:
                client.forget()
                self._line.unmute(client.client_id)
                stack.callback(close, client.consumer)
            for client in clients:
                client.consumer.unsubscribe()  # Unsubscribe all clients first; `close` then waits for each of them.

    # --- what callbacks say -------------------------------------------------------------------------------------------

    def gained(self, name: str, partitions: Iterable[confluent_kafka.TopicPartition]) -> None:
        reader = self.readers[name]
        begins = {(self._called[each.topic], each.partition): each.offset for each in partitions}
        for partition in self.answered(name, 0, reader.owned | begins.keys()):
            assert begins[partition] == self._committed.get(partition, 0), f"{name} begins at {begins[partition]}"
            reader.positions[partition] = begins[partition]

    def let_go(self, name: str, partitions: Iterable[confluent_kafka.TopicPartition]) -> None:
        self.readers[name].told -= self._known(partitions)
        self.about_to_beat(name)

    def deliver(self, name: str, partition: Partition, offset: int) -> None:
        super().deliver(name, partition, offset)
        self._done[name, partition] = max(offset + 1, self._done.get((name, partition), 0))

    def _known(self, partitions: Iterable[confluent_kafka.TopicPartition]) -> set[Partition]:
        return {(self._called[each.topic], each.partition) for each in partitions}

    def _spoken(self, partitions: Iterable[Partition]) -> list[confluent_kafka.TopicPartition]:
        return [confluent_kafka.TopicPartition(self._names[topic], index) for topic, index in sorted(partitions)]

    # --- how they speak -----------------------------------------------------------------------------------------------

    def member_id(self, name: str) -> str:
        return self._clients[name].consumer.memberid() or ""

    async def speak(self, *names: str) -> None:
        for name in names:
            self._serve(name, 0)

    def _serve(self, name: str, timeout_s: float) -> Partition | None:
        """Poll once. Return the partition of the record, if a record came."""
        message = self._clients[name].consumer.poll(timeout_s)
        if message is None:
            return None
        error, topic = message.error(), self._called.get(message.topic() or "")
        if error is not None:
            gone = topic is not None and topic not in self.partition_counts
            if gone and error.code() == confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART:
                return None
            raise confluent_kafka.KafkaException(error)
        partition, offset = message.partition(), message.offset()
        assert topic is not None
        assert partition is not None
        assert offset is not None
        self.deliver(name, (topic, partition), offset)
        return topic, partition

    async def read(self, name: str, at_most: int | None = None) -> set[Partition]:
        """Read only from partitions that the reader will keep. If the reader released records that it was served but
        never saw, the coordinator would wait for their commit. So a reader that was served more than `at_most` records
        reads all of these.
        """
        reader = self.readers[name]
        targets = {each.member_id: each.target_assignment for each in (await self.describe()).members}
        kept = self.partitions_of(targets[self.member_id(name)].topic_partitions)
        until = {each: self._until(name, each, at_most) for each in reader.owned & kept & self.partitions()}
        if not self.one_at_a_time:
            return self._receive(name, until)
        found: set[Partition] = set()
        while until:
            positions, served = dict(reader.positions), self._served(name)
            found |= self._receive(name, until)
            unseen = self._served(name) - served
            for partition in until:
                unseen[partition] -= reader.positions[partition] - positions[partition]
            until = {
                each: self._until(name, each, 1)
                for each in until
                if unseen[each] > 0 and each in reader.owned and reader.positions[each] < self.ends[each]
            }
        return found

    def _served(self, name: str) -> Counter[Partition]:
        """Return how many records the client was served of each partition, at most. Pause its partitions first, and
        count when no fetch is under way.
        """
        client = self._clients[name]
        since_s = time.monotonic()
        while not client.is_idle_since(since_s):
            assert time.monotonic() < since_s + READ_S, client.statistics
            self._serve(name, LOOK_S)
        return Counter(
            {
                (called, int(index)): each["rxmsgs"] + each["rx_ver_drops"]
                for topic, counts in client.statistics["topics"].items()
                if (called := self._called.get(topic)) is not None
                for index, each in counts["partitions"].items()
            }
        )

    def _receive(self, name: str, until: Mapping[Partition, int]) -> set[Partition]:
        """Resume the partitions until each has delivered the records up to its offset in `until`. Return the partitions
        that delivered a record."""
        reader, consumer = self.readers[name], self._clients[name].consumer
        left = {partition for partition, end in until.items() if reader.positions[partition] < end}
        found: set[Partition] = set()
        consumer.resume(self._spoken(left))
        deadline = time.monotonic() + READ_S
        while left:
            assert time.monotonic() < deadline, f"{name} is to read {left}, and is at {reader.positions}"
            partition = self._serve(name, LOOK_S)
            if partition is not None:
                found.add(partition)
                if reader.positions[partition] >= until[partition]:
                    consumer.pause(self._spoken([partition]))
                    left.discard(partition)
            left &= reader.owned
        return found

    def _until(self, name: str, partition: Partition, at_most: int | None) -> int:
        end = self.ends.get(partition, 0)
        return end if at_most is None else min(end, self.readers[name].positions[partition] + at_most)

    async def commit_of(self, name: str, only: Iterable[Partition] | None = None) -> None:
        wanted = self.to_commit(name, only)
        offsets = {each: self._done[name, each] for each in wanted if (name, each) in self._done}
        if not offsets:
            return
        asked = [
            confluent_kafka.TopicPartition(self._names[topic], index, offset)
            for (topic, index), offset in offsets.items()
        ]
        while True:
            if self._stored(name, asked):
                break
            await asyncio.sleep(self.look_s)
        self._committed |= offsets
        for partition in offsets:
            del self._done[name, partition]

    def _stored(self, name: str, offsets: list[confluent_kafka.TopicPartition]) -> bool:
        """Commit and return whether it succeeded. The commit fails until the next heartbeat has brought the member its
        new epoch.
        """
        try:
            committed = self._clients[name].consumer.commit(offsets=offsets, asynchronous=False)
        except confluent_kafka.KafkaException as refused:
            if refused.args[0].code() == confluent_kafka.KafkaError.STALE_MEMBER_EPOCH:
                return False
            raise
        assert all(each.error is None for each in committed or ()), committed
        return True

    # --- what readers do ----------------------------------------------------------------------------------------------

    def come(self, *names: str) -> None:
        for name in names:
            client = self._clients.pop(name, None)
            if client is not None:
                self._silence(client)
            self.begin(name)
            self._done = {key: offset for key, offset in self._done.items() if key[0] != name}
            again = self._idle.pop(name, None)
            self._clients[name] = again or Client(self, name, self._bootstrap, self._group_id)
            self._clients[name].subscribe(self._names.values())
        self._run(self._arrive(names))

    async def _arrive(self, names: Collection[str]) -> None:
        """Wait until these readers are members, own what the coordinator can assign at once, and keep it for a moment.

        In the meantime all other readers do nothing, even if a heartbeat asks them to, and so keep their partitions.
        """
        clock = asyncio.get_running_loop().time
        since_s = None
        while True:
            members = {each.member_id: each for each in (await self.describe()).members}
            await self.speak(*names)
            found = [(self.readers[name], members.get(self.member_id(name))) for name in names]
            if any(m is None or self.partitions_of(m.assignment.topic_partitions) != r.owned for r, m in found):
                since_s = None
            elif since_s is None:
                since_s = clock()
            elif clock() - since_s >= self.moment_s:
                return
            await asyncio.sleep(self.look_s)

    def leave(self, *names: str) -> None:
        for name in names:
            self._clients[name].consumer.unsubscribe()
        self._run(self._depart(names))
        for name in names:
            self.end(name)
            self._idle[name] = self._clients.pop(name)

    async def _depart(self, names: Collection[str]) -> None:
        ids = {self.member_id(name) for name in names}
        while (
            any(self._clients[name].consumer.assignment() for name in names)
            or {each.member_id for each in (await self.describe()).members} & ids
        ):
            await self.speak(*names)
            await asyncio.sleep(self.look_s)

    def die(self, *names: str) -> None:
        for name in names:
            self.end(name)
            self._silence(self._clients.pop(name))
        self._run(self._bury())

    def _silence(self, client: Client) -> None:
        assert self._bootstrap == self._line.address, "only who is mortal falls silent"
        client.forget()
        self._line.mute(client.client_id)
        self._silent.append(client)

    async def _bury(self) -> None:
        while {each.member_id for each in (await self.describe()).members} != set(map(self.member_id, self.readers)):
            await self.speak(*self.readers)
            await asyncio.sleep(self.look_s)

    # --- what tests ask -----------------------------------------------------------------------------------------------

    @property
    def ended(self) -> set[HandoffEnd]:
        reasons = "select distinct reason from journal_handoff where group_id = $1 and phase = 'ended'"
        return {HandoffEnd(row["reason"]) for row in self._run(self._journaled(reasons))}

    def history(self) -> str:
        """Return the group's journal events, for the report of a failure."""
        events = "select at_ms, kind, reason, detail, generation_id, client_id from journal_event where group_id = $1"
        return "\n".join(" ".join(map(str, row)) for row in self._run(self._journaled(f"{events} order by seq")))

    async def _journaled(self, query: str) -> list[asyncpg.Record]:
        """Return rows of the journal. The journal is written in the order of events. So once it contains a commit that
        this method makes, it contains all earlier events.
        """
        follows, (called, *_) = fresh("follows"), self._names.values()
        partition = OffsetCommitRequestPartition(partition_index=0, committed_offset=0, committed_metadata="")
        commit = OffsetCommitRequest(
            group_id=follows,
            generation_id_or_member_epoch=-1,
            member_id="",
            topics=(OffsetCommitRequestTopic(name=called, partitions=(partition,)),),
        )
        while True:
            response = await self._admin.send(commit, 8)
            code = response.topics[0].partitions[0].error_code
            if code not in LEADS_AGAIN:
                break
            await asyncio.sleep(self.look_s)
        assert code == ErrorCode.NONE, response
        connection = await asyncpg.connect(self._gateway.database_url)
        try:
            written = "select exists (select from journal_offset where group_id = $1)"
            while True:
                if await connection.fetchval(written, follows):
                    break
                await asyncio.sleep(self.look_s)
            return await connection.fetch(query, self._group_id)
        finally:
            await connection.close()
