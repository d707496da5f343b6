"""The parts of a node that serve groups, on a real Postgres and without sockets: stores, leases, runner, and handlers
that tests call directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import asyncpg

from gateway.apis import SERVED
from gateway.apis.coordinator_topics import InternalTopics
from gateway.apis.groups.classic_groups import heartbeat, join_group, leave_group, sync_group
from gateway.apis.groups.consumer_groups import consumer_group_describe, consumer_group_heartbeat
from gateway.apis.groups.find_coordinator import find_coordinator
from gateway.apis.groups.group_admin import delete_groups, describe_groups, list_groups
from gateway.apis.groups.offset_commit import offset_commit
from gateway.apis.groups.offset_delete import offset_delete
from gateway.apis.groups.offset_fetch import offset_fetch
from gateway.apis.groups.share_groups import share_group_describe, share_group_heartbeat
from gateway.apis.transactions.txn_offset_commit import txn_offset_commit
from gateway.building.services import Services
from gateway.cluster.leases import Leases
from gateway.cluster.membership import Membership
from gateway.config.broker import BrokerConfig
from gateway.coordinator.classic.machine import CLASSIC
from gateway.coordinator.classic.model import Group
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId, StoredGroup
from gateway.coordinator.requests import (
    Heartbeat,
    JoinGroup,
    JoinReply,
    LeaveGroup,
    LeavingMember,
    OffsetCommit,
    SyncGroup,
    SyncReply,
)
from gateway.coordinator.settings import Settings
from gateway.groups.groups import Groups
from gateway.log.catalog import Catalog
from gateway.log.tail import Tail
from gateway.net.context import ConnectionInfo, RequestContext
from gateway.share.partitions import SharePartitions
from gateway.transactions.coordinator import Transactions
from protocol import codec
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.schema import message_schema
from storage.groups import GroupStore
from storage.nodes import NodeStore
from storage.offsets import OffsetStore
from storage.pool import Database
from storage.producers import ProducerStore
from storage.share import ShareStore
from storage.topics import TopicStore
from storage.transactions import TransactionStore
from storage.types import CoordinatorLease, NewTopic, Topic
from tests.steps.waiting import until

QUICK = Settings(group_initial_rebalance_delay_ms=0, group_min_session_timeout_ms=10)
REFUSE = {line.api_key: line.refusal for line in SERVED}
HANDLERS: dict[ApiKey, Any] = {
    ApiKey.JOIN_GROUP: join_group,
    ApiKey.SYNC_GROUP: sync_group,
    ApiKey.HEARTBEAT: heartbeat,
    ApiKey.LEAVE_GROUP: leave_group,
    ApiKey.CONSUMER_GROUP_HEARTBEAT: consumer_group_heartbeat,
    ApiKey.CONSUMER_GROUP_DESCRIBE: consumer_group_describe,
    ApiKey.SHARE_GROUP_HEARTBEAT: share_group_heartbeat,
    ApiKey.SHARE_GROUP_DESCRIBE: share_group_describe,
    ApiKey.FIND_COORDINATOR: find_coordinator,
    ApiKey.DESCRIBE_GROUPS: describe_groups,
    ApiKey.LIST_GROUPS: list_groups,
    ApiKey.DELETE_GROUPS: delete_groups,
    ApiKey.OFFSET_COMMIT: offset_commit,
    ApiKey.OFFSET_FETCH: offset_fetch,
    ApiKey.OFFSET_DELETE: offset_delete,
    ApiKey.TXN_OFFSET_COMMIT: txn_offset_commit,
}


@dataclass
class Clock:
    """A clock in seconds that only a test moves."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class LeaseNews:
    """Passes news of leases on to the groups. A test may interrupt it."""

    groups: Groups
    is_cut: bool = False

    def acquired(self, lease: CoordinatorLease) -> None:
        if not self.is_cut:
            self.groups.shard_acquired(lease)

    def lost(self, shard: int) -> None:
        if not self.is_cut:
            self.groups.shard_lost(shard)


@dataclass
class GroupNode:
    database: Database
    store: GroupStore
    offsets: OffsetStore
    topics: TopicStore
    leases: Leases
    groups: Groups
    services: Services
    lease_clock: Clock
    lease_news: LeaseNews

    def member(self, group_id: str, connection_id: str, **given: Any) -> Member:
        return Member(self.groups, group_id, ConnectionId(connection_id), **given)

    async def stored(self, group_id: str) -> Group | None:
        """Return the classic group as stored now. The read itself changes nothing."""
        rows = await self.database.hot.fetch(
            "select g.*, m.member_id, m.document as member from consumer_group g left join group_member m "
            "using (group_id) where group_id = $1",
            group_id,
        )
        if not rows:
            return None
        row = rows[0]
        members = {MemberId(each["member_id"]): json.loads(each["member"]) for each in rows if each["member_id"]}
        stored = StoredGroup(row["state"], row["protocol_type"], row["generation_id"], json.loads(row["document"]))
        return CLASSIC.restore(group_id, stored, members, None, 0, QUICK)

    async def create_topic(self, name: str, partitions: int = 1) -> Topic:
        (topic,) = await self.topics.create([NewTopic(name, partitions, {})])
        assert isinstance(topic, Topic)
        return topic

    async def ask(
        self,
        request: Any,
        version: int,
        *,
        connection: str = "c",
        client_id: str | None = "client",
        listener: str = "PLAINTEXT",
    ) -> Any:
        """Send `request` at `version` through the codec and the handler, and return the answer as a client reads it."""
        api_key = message_schema(type(request)).api_key
        decoded = codec.decode_request(api_key, version, b"".join(codec.encode(request, version)))
        context = RequestContext(
            api_key, version, 1, client_id, ConnectionInfo(connection, "/127.0.0.1", listener), self.services
        )
        try:
            response = await HANDLERS[api_key](decoded, context)
        except KafkaError as refused:
            response = REFUSE[api_key](decoded, version, refused.code, refused.message)
        body = b"".join(codec.encode_response(response, version))
        answer, end = codec.decode(codec.response_class(api_key), version, body)
        assert end == len(body)
        return answer


@contextlib.asynccontextmanager
async def group_node(
    url: str, *, port: int = 9092, settings: Settings = QUICK, statement_timeout_ms: int = 10_000, **given: Any
) -> AsyncGenerator[GroupNode, None]:
    """Run a node that holds every lease that no other node holds. At the end of the context the node is killed: nothing
    is drained or released.
    """
    database = await Database.open(url, statement_timeout_ms=statement_timeout_ms)
    try:
        clock = Clock()
        nodes = NodeStore(database)
        membership = Membership(nodes, {"PLAINTEXT": ("127.0.0.1", port)}, None, 60_000)
        await membership.join()
        leases = Leases(nodes, membership, 60_000, monotonic=clock)
        store, offsets, tail = GroupStore(database), OffsetStore(database), Tail(0)
        topics = TopicStore(database, nodes.registration)
        groups = Groups(store, offsets, leases, settings, **given)
        news = LeaseNews(groups)
        leases.listen(acquired=news.acquired, lost=news.lost)
        await leases.renew()
        broker = BrokerConfig(group_initial_rebalance_delay_ms=settings.group_initial_rebalance_delay_ms)
        services = SimpleNamespace(
            authorizer=None,
            share=SharePartitions(ShareStore(database)),
            settings=SimpleNamespace(broker=broker),
            catalog=Catalog(topics, tail, broker),
            topics=topics,
            internal_topics=InternalTopics(),
            offsets=offsets,
            groups=groups,
            idle_owners=None,
            membership=membership,
            transactions=Transactions(TransactionStore(database), ProducerStore(database), tail, membership),
        )
        yield GroupNode(database, store, offsets, topics, leases, groups, cast(Services, services), clock, news)
        for task in groups.under_way:
            task.cancel()
    finally:
        await database.close(timeout_s=0.1)


async def forget_everything(url: str) -> None:
    """Empty a database that the tests of a module share, because creating a database takes longer than most of these
    tests.
    """
    connection = await asyncpg.connect(url, server_settings={"search_path": "sluice"})
    try:
        await connection.execute("truncate consumer_group, topic, node cascade")
    finally:
        await connection.close()


class Member:
    """One member whose requests become coordinator events. Each goes through `Groups.submit`."""

    def __init__(
        self,
        groups: Groups,
        group_id: str,
        connection_id: ConnectionId,
        *,
        group_instance_id: str | None = None,
        session_timeout_ms: int = 10_000,
        rebalance_timeout_ms: int = 20_000,
        protocol_type: str = "consumer",
        metadata: bytes = b"subscription",
        connection_number: int = -1,
        protocol_name: str = "range",
    ) -> None:
        self.protocol_name = protocol_name
        self.groups = groups
        self.group_id = group_id
        self.connection_id = connection_id
        self.group_instance_id = group_instance_id
        self.session_timeout_ms = session_timeout_ms
        self.rebalance_timeout_ms = rebalance_timeout_ms
        self.protocol_type = protocol_type
        self.metadata = metadata
        self.connection_number = connection_number
        self.member_id = MemberId("")
        self.generation_id = -1
        self.members: tuple[MemberId, ...] = ()

    def join(self) -> asyncio.Task[JoinReply]:
        """Submit a join before returning. It has version 3, in which the coordinator does not first return an id."""
        answer = self.groups.submit(
            self.group_id,
            JoinGroup(
                request_id=self.groups.next_request_id(),
                connection_id=self.connection_id,
                version=3,
                client_id="client",
                client_host="/127.0.0.1",
                member_id=self.member_id,
                group_instance_id=self.group_instance_id,
                protocol_type=self.protocol_type,
                protocols=((self.protocol_name, self.metadata),),
                session_timeout_ms=self.session_timeout_ms,
                rebalance_timeout_ms=self.rebalance_timeout_ms,
                new_member_id=MemberId(f"member-{self.connection_id}"),
                connection_number=self.connection_number,
            ),
        )
        return asyncio.get_running_loop().create_task(self._joined(answer))

    async def _joined(self, answer: JoinReply | asyncio.Future[JoinReply]) -> JoinReply:
        reply = await answer if isinstance(answer, asyncio.Future) else answer
        if reply.error is ErrorCode.NONE:
            self.member_id, self.generation_id = reply.member_id, reply.generation_id
            self.members = tuple(member.member_id for member in reply.members)
        return reply

    def sync(self, assignments: dict[MemberId, bytes] | None = None) -> SyncReply | asyncio.Future[SyncReply]:
        return self.groups.submit(
            self.group_id,
            SyncGroup(
                request_id=self.groups.next_request_id(),
                connection_id=self.connection_id,
                member_id=self.member_id,
                group_instance_id=self.group_instance_id,
                generation_id=self.generation_id,
                protocol_type=None,
                protocol_name=None,
                assignments=tuple((assignments or {}).items()),
            ),
        )

    def heartbeat(self) -> Any:
        """Return the reply itself if no await was needed, else a future."""
        return self.groups.submit(
            self.group_id,
            Heartbeat(
                request_id=self.groups.next_request_id(),
                connection_id=self.connection_id,
                member_id=self.member_id,
                group_instance_id=self.group_instance_id,
                generation_id=self.generation_id,
            ),
        )

    async def beat(self) -> ErrorCode:
        reply = self.heartbeat()
        return (await reply if isinstance(reply, asyncio.Future) else reply).error

    def leave(self) -> Any:
        return self.groups.submit(
            self.group_id,
            LeaveGroup(
                self.groups.next_request_id(),
                self.connection_id,
                (LeavingMember(self.member_id, self.group_instance_id),),
            ),
        )

    def may_commit(self) -> Any:
        return self.groups.submit(
            self.group_id,
            OffsetCommit(
                self.groups.next_request_id(),
                self.connection_id,
                8,
                self.member_id,
                self.group_instance_id,
                self.generation_id,
            ),
        )


async def reply_of(answer: Any) -> Any:
    return await asyncio.wait_for(answer, 30) if isinstance(answer, asyncio.Future) else answer


async def settle(*members: Member) -> None:
    """Bring all members into one Stable generation. The first member leads, and each member's
    assignment is its own id.
    """
    first, *others = members
    assert (await first.join()).error is ErrorCode.NONE
    if others:
        joins = [member.join() for member in others]
        joins.append(first.join())
        assert all(reply.error is ErrorCode.NONE for reply in await asyncio.gather(*joins))
    syncs = [member.sync() for member in others]
    syncs.insert(0, first.sync({member_id: member_id.encode() for member_id in first.members}))
    for member, sync in zip(members, syncs, strict=True):
        reply = await reply_of(sync)
        assert (reply.error, reply.assignment) == (ErrorCode.NONE, member.member_id.encode())


@contextlib.asynccontextmanager
async def locked_group(url: str, group_id: str) -> AsyncGenerator[asyncpg.Connection, None]:
    """Block every write of the stored group until the context ends, as a stalled Postgres would."""
    connection = await asyncpg.connect(url, server_settings={"search_path": "sluice"})
    try:
        async with connection.transaction():
            locked = await connection.fetchval(
                "select group_id from consumer_group where group_id = $1 for update", group_id
            )
            assert locked == group_id
            yield connection
    finally:
        await connection.close()


async def write_is_waiting(connection: asyncpg.Connection) -> None:
    """Wait until another connection waits for a lock that `connection` holds."""
    waiting = "select exists (select from pg_stat_activity where pg_backend_pid() = any (pg_blocking_pids(pid)))"

    async def is_waiting() -> bool:
        return bool(await connection.fetchval(waiting))

    await until(is_waiting)


async def lose_lease(node: GroupNode, group_id: str) -> None:
    """Let another node acquire the lease of the group's shard, and let this node learn of that."""
    other = await NodeStore(node.database).register("other:9092", {"PLAINTEXT": ("other", 9092)}, None, 60_000)
    await node.database.hot.fetch(
        "update coordinator_lease"
        " set node_id = $1, lease_epoch = lease_epoch + 1, expires_at = now() + interval '1 hour'"
        " where kind = 'groups' and shard = $2",
        int(other),
        node.leases.shard_of(group_id),
    )
    await node.leases.renew()
    assert node.leases.lease_for(group_id) is None
