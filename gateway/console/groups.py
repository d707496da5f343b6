"""Groups as the console shows them, on every node.

The one idea: the coordinator of a group knows the newest value, and Postgres knows the last stored one. This node shows
its own groups from memory and all others as they are stored, so every node shows the whole cluster.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NotRequired, TypedDict
from uuid import UUID

from gateway.config.suggestions import SUGGESTIONS, did_you_mean
from gateway.console.kafka import Kafka, Viewer
from gateway.console.timeline import Timeline, timeline
from gateway.coordinator.classic.model import Group
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerMember
from gateway.coordinator.settings import Settings
from gateway.coordinator.share.model import ShareGroup
from gateway.coordinator.streams.model import StreamsGroup
from gateway.groups.journal_members import OwnedPartition, instance_of, owned_by, session_timeout_ms
from gateway.groups.kinds import AnyGroup, AnyMember
from gateway.log.catalog import Catalog
from gateway.security.kinds import AclOperation, ResourceType
from gateway.security.turns import Turns
from protocol.errors import ErrorCode, KafkaError
from storage.console import ConsoleStore, Loaded
from storage.groups import GroupStore

MAX_GROUPS = 500
MAX_OFFSETS = 2_000
MAX_MEMBERS = 1_000
MAX_LAG_POINTS = 20_000
MAX_COMPARED_CHARS = 64
"""Length up to which an unknown name is compared with the known ones. To compare 500 long names takes seconds."""
MAX_TIMELINES = 4
"""Number of timelines that a node draws at once. One may take thirty megabytes and a second of a thread."""
WEEK_MS = 8 * 24 * 3600 * 1000
"""Longest window of a timeline."""
_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]+")


class Topics:
    """Names of topics by id, in the form in which the journal's functions take them."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def name_of(self, topic_id: UUID) -> str:
        topic = self._catalog.get_by_id(topic_id)
        return str(topic_id) if topic is None else topic.name

    def id_of(self, name: str) -> UUID | None:
        topic = self._catalog.get(name)
        return None if topic is None else topic.topic_id

    def partition_count_of(self, name: str) -> int:
        topic = self._catalog.get(name)
        return 0 if topic is None else len(topic.partitions)


class GroupRow(TypedDict):
    """A group as one row of a list."""

    id: str
    type: str
    protocol: str
    state: str
    members: int
    lag: int | None
    changed: int | None


class GroupList(TypedDict):
    groups: list[GroupRow]
    cut: bool


class Owned(TypedDict):
    topic: str
    partition: int


class MemberRow(TypedDict):
    id: str
    client: str
    host: str
    instance: str | None
    owned: list[Owned]
    leader: bool
    protocol: str
    epoch: int | None
    heard: int | None


class OffsetRow(TypedDict):
    """A group's commit for a partition, or a partition that a member owns without a commit."""

    topic: str
    partition: int
    committed: int | None
    lag: int | None
    start: NotRequired[int | None]
    end: NotRequired[int | None]
    at: NotRequired[int | None]
    owner: NotRequired[str | None]


class GroupAnswer(TypedDict):
    id: str
    type: str
    protocol: str
    state: str
    generation: int
    assignor: str | None
    members: list[MemberRow]
    memberCount: int
    offsets: list[OffsetRow]
    coordinator: int | None
    isHere: bool
    journal: bool


class GroupViews:
    def __init__(self, kafka: Kafka, store: ConsoleStore, groups: GroupStore) -> None:
        self._kafka = kafka
        self._store = store
        self._groups = groups
        self._topics = Topics(kafka.services.catalog)
        self._drawing = Turns(MAX_TIMELINES)

    # --- lists --------------------------------------------------------------------------------------------------------

    async def list(self, who: Viewer, search: str) -> GroupList:
        """Return the groups that the viewer may describe, at most MAX_GROUPS."""
        rows = await self._store.groups(search, MAX_GROUPS)
        live = self._live()
        shown: list[GroupRow] = [
            {
                "id": row["group_id"],
                "type": row["group_type"],
                "protocol": row["protocol_type"],
                "state": live.get(row["group_id"], (row["state"], 0))[0],
                "members": live[row["group_id"]][1] if row["group_id"] in live else row["members"],
                "lag": self._lag(who, row["lags"]),
                "changed": row["changed_ms"],
            }
            for row in rows
            if self.may_describe(who, row["group_id"])
        ]
        return {"groups": shown, "cut": len(rows) == MAX_GROUPS}

    def _lag(self, who: Viewer, lags: Mapping[str, int]) -> int | None:
        """Return the lag in the topics that the viewer may describe, or None if the group has committed none of
        them."""
        shown = [lag for topic, lag in lags.items() if self.may_describe_topic(who, topic)]
        return sum(shown) if shown else None

    def _live(self) -> dict[str, tuple[str, int]]:
        """Return state and number of members of the groups that this node holds in memory."""
        groups = self._kafka.services.groups
        summaries = (groups.summary(value) for value in groups.in_memory())
        return {each.group_id: (each.state, each.member_count) for each in summaries if each.exists}

    def may_describe(self, who: Viewer, group_id: str) -> bool:
        return self._kafka.may(who, AclOperation.DESCRIBE, ResourceType.GROUP, group_id)

    def may_describe_topic(self, who: Viewer, topic: str) -> bool:
        return self._kafka.may(who, AclOperation.DESCRIBE, ResourceType.TOPIC, topic)

    async def suggestion(self, who: Viewer, name: str, known: Sequence[str]) -> str:
        """Return the end of a sentence that says that a name is unknown."""
        if len(name) > MAX_COMPARED_CHARS:
            return "."
        async with self._drawing.turn(who.host):
            return await asyncio.to_thread(did_you_mean, name, known, SUGGESTIONS) or "."

    # --- one group ----------------------------------------------------------------------------------------------------

    async def describe(self, who: Viewer, group_id: str) -> GroupAnswer:
        """Return the group with members and lag. Raise KafkaError if it does not exist or the viewer may not see it."""
        self._kafka.require(who, AclOperation.DESCRIBE, ResourceType.GROUP, group_id)
        groups, services = self._kafka.services.groups, self._kafka.services
        value, is_live = await self._value(group_id)
        summary = groups.summary(value)
        if not summary.exists:
            known = [row["id"] for row in (await self.list(who, ""))["groups"]]
            hint = await self.suggestion(who, group_id, known)
            raise KafkaError(ErrorCode.GROUP_ID_NOT_FOUND, f"There is no group {group_id}{hint}")
        owners: dict[tuple[str, int], str] = {}
        members: list[MemberRow] = []
        now_ms = asyncio.get_running_loop().time() * 1000
        for member in list(value.members.values())[:MAX_MEMBERS]:
            owned = self._named(_held(value, member, self._topics))
            owners |= {key: str(member.member_id) for key in owned}
            members.append(
                {
                    "id": member.member_id,
                    "client": member.client_id,
                    "host": member.client_host.removeprefix("/"),
                    "instance": instance_of(member),
                    "owned": [
                        {"topic": topic, "partition": index}
                        for topic, index in sorted(owned)
                        if self.may_describe_topic(who, topic)
                    ],
                    "leader": isinstance(value, Group) and value.leader_id == member.member_id,
                    "protocol": _protocol(value, member),
                    "epoch": getattr(member, "member_epoch", None) or None,
                    "heard": _heard_ms_ago(value, member, now_ms, services.groups.settings) if is_live else None,
                }
            )
        offsets = await self.offsets(who, group_id)
        for row in offsets:
            row["owner"] = owners.get((row["topic"], row["partition"]))
        known = {(row["topic"], row["partition"]) for row in offsets}
        for (topic, index), owner in sorted(owners.items()):
            if (topic, index) not in known and self.may_describe_topic(who, topic):
                row: OffsetRow = {"topic": topic, "partition": index, "owner": owner, "committed": None, "lag": None}
                offsets.append(row)
        state = summary.state
        if not is_live:
            rows = await self._store.groups(group_id, MAX_GROUPS)
            state = next((row["state"] for row in rows if row["group_id"] == group_id), state)
        return {
            "id": group_id,
            "type": summary.group_type,
            "protocol": summary.protocol_type,
            "state": state,
            "generation": summary.generation_id,
            "assignor": _assignor(value),
            "members": members,
            "memberCount": summary.member_count,
            "offsets": offsets,
            "coordinator": await self._coordinator(group_id),
            "isHere": is_live,
            "journal": services.groups.journal is not None,
        }

    async def offsets(self, who: Viewer, group_id: str) -> list[OffsetRow]:
        """Return the committed offsets with their lag, of the topics that the viewer may describe. Raise KafkaError if
        the viewer may not describe the group."""
        self._kafka.require(who, AclOperation.DESCRIBE, ResourceType.GROUP, group_id)
        return [
            {
                "topic": row["topic"],
                "partition": row["partition"],
                "committed": row["committed_offset"],
                "start": row["log_start_offset"],
                "end": row["log_end_offset"],
                "lag": row["lag"],
                "at": row["committed_ms"],
            }
            for row in await self._store.group_offsets(group_id, MAX_OFFSETS)
            if self.may_describe_topic(who, row["topic"])
        ]

    async def timeline(self, who: Viewer, group_id: str, from_ms: int, to_ms: int) -> Timeline:
        """Return the ownership timeline between two times, without partitions that the viewer may not describe."""
        self._kafka.require(who, AclOperation.DESCRIBE, ResourceType.GROUP, group_id)
        async with self._drawing.turn(who.host):
            return await self._drawn(who, group_id, from_ms, to_ms)

    async def _drawn(self, who: Viewer, group_id: str, from_ms: int, to_ms: int) -> Timeline:
        from_ms = max(from_ms, to_ms - WEEK_MS)
        stretch = await self._store.stretch(group_id, from_ms, to_ms)
        drawn = await asyncio.to_thread(timeline, stretch, from_ms, to_ms)
        named = {lane["topic"] for lane in drawn["lanes"]} | {row["topic"] for row in stretch.refusals}
        if self._kafka.services.authorizer is not None:
            catalog = self._kafka.services.catalog
            words = await asyncio.to_thread(_words_of_details, stretch.events)
            named |= {word for word in words if catalog.get(word) is not None}
        hidden = {topic for topic in named if not self.may_describe_topic(who, topic)}
        if hidden:
            drawn["lanes"] = [lane for lane in drawn["lanes"] if lane["topic"] not in hidden]
            # The sentences mention topics, so a viewer who may not see all of these topics gets no sentences.
            drawn["words"], drawn["stories"], drawn["marks"] = [], [], []
        drawn["position"] = await self._store.group_position(group_id)
        return drawn

    async def lag_history(self, who: Viewer, group_id: str, from_ms: int, to_ms: int) -> dict[str, object]:
        """Return the greatest lag of each partition in 120 slots of the window, from the newest rows of the journal."""
        self._kafka.require(who, AclOperation.DESCRIBE, ResourceType.GROUP, group_id)
        rows = await self._store.lag_history(group_id, from_ms, to_ms, MAX_LAG_POINTS)
        step_ms = max(to_ms - from_ms, 1) / 120
        return {
            "points": [
                [row["topic"], row["partition"], round(from_ms + row["slot"] * step_ms), row["lag"]]
                for row in rows
                if self.may_describe_topic(who, row["topic"])
            ]
        }

    async def _value(self, group_id: str) -> tuple[AnyGroup, bool]:
        """Return the group's value, and whether it comes from this node's memory."""
        groups = self._kafka.services.groups
        if groups.lease_for(group_id) is not None:
            try:
                return await groups.view(group_id), True
            except KafkaError:
                pass  # the lease has just moved to another node, so show the stored value
        for record, _ in await self._groups.as_stored((group_id,)):
            return await asyncio.to_thread(groups.as_stored, record), False
        return Group(group_id), False

    async def _coordinator(self, group_id: str) -> int | None:
        try:
            return int((await self._kafka.coordinator(group_id)).node_id)
        except KafkaError:
            return None

    def _named(self, owned: Iterable[OwnedPartition]) -> list[tuple[str, int]]:
        name_of = self._topics.name_of
        return [(each if isinstance(each, str) else name_of(each), index) for each, index in owned]


def _words_of_details(events: Iterable[Loaded]) -> set[str]:
    """Return the words of the events' details that may be names of topics. A detail is free text: for example, it says
    what an administrator did. It writes a partition as `topic[0]` or `topic-0`."""
    found: set[str] = set()
    for event in events:
        for word in _TOPIC_NAME.findall(event["detail"] or ""):
            found |= {word, word.rstrip("."), word.rpartition("-")[0]}
    return found


def _held(value: AnyGroup, member: AnyMember, topics: Topics) -> set[OwnedPartition]:
    """Return the partitions that the member reads. Several members of a share group may read one partition."""
    if isinstance(value, ShareGroup):
        shared = value.members[member.member_id].assigned
        return {(topic_id, index) for topic_id, indexes in shared.items() for index in indexes}
    return owned_by(value, member.member_id, topics)


def _assignor(value: AnyGroup) -> str | None:
    match value:
        case Group():
            return value.protocol_name
        case ConsumerGroup():
            return value.assignor or None
        case _:
            return None


def _protocol(value: AnyGroup, member: AnyMember) -> str:
    match value:
        case Group():
            return "classic"
        case ConsumerGroup():
            is_classic = isinstance(member, ConsumerMember) and member.classic is not None
            return "classic" if is_classic else "consumer"
        case StreamsGroup():
            return "streams"
        case _:
            return "share"


def _heard_ms_ago(value: AnyGroup, member: AnyMember, now_ms: float, settings: Settings) -> int | None:
    """Return how long ago the coordinator last heard from the member. Return None if a request of the member is
    waiting.
    """
    deadline_ms = value.session_deadlines.get(member.member_id)
    if deadline_ms is None:
        return None
    timeout_ms = session_timeout_ms(member)
    if not timeout_ms:
        match value:
            case ConsumerGroup():
                timeout_ms = settings.consumer_for(value.group_id).session_timeout_ms
            case StreamsGroup():
                timeout_ms = settings.streams_for(value.group_id).session_timeout_ms
            case _:
                timeout_ms = settings.share_for(value.group_id).session_timeout_ms
    return max(0, round(now_ms - (deadline_ms - timeout_ms)))
