"""Observation of what consumers claim and what their leader assigns; reports where they depart from KIP-429.

The one idea: the observer reads and reports. It looks twice at each generation of a group of protocol type `consumer`:
when the join phase has ended (which member claims which partitions) and when the leader has assigned (which member gets
which). Bytes that it cannot read are opaque and counted, never refused. Only `guarded`, if `group.cooperative.guard`
asks for it, changes an assignment: partitions that a member of a cooperative group still claims are removed from other
members' assignments. Those members get them after the release, as with a leader that keeps the rule.

Cooperative protocols are known by name alone; a consumer's metadata does not say it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.coordinator.classic.model import Delivered, Group, GroupState, Member, Watch
from gateway.coordinator.cluster import Cluster
from gateway.coordinator.facts import (
    MAX_NAMED,
    Fact,
    GenerationAssigned,
    GenerationStarted,
    MemberId,
    MemberReplaced,
    PartitionsWithheld,
    ProtocolViolated,
    Violation,
)
from gateway.coordinator.machine import Event, Step
from gateway.coordinator.protocols import CONSUMER_PROTOCOL_TYPE, metadata_of
from gateway.coordinator.requests import JoinReply, SyncGroup, SyncReply
from protocol.consumer import Assignment, TopicPartition, decode_assignment, decode_subscription, encode_assignment
from protocol.errors import ErrorCode, ProtocolError

ORPHANED_GENERATIONS = 3
"""Generations without an owner before a partition counts as orphaned. A cooperative move leaves a partition
unassigned for one generation, or two if a member joins in the meantime."""
MAX_UNASSIGNED = 10_000
"""Partitions without an owner that the observer remembers. Of more it remembers none: a client names the topics."""
CHURN_GENERATIONS = 10
CHURN_MS = 60_000
FOLLOW_UP_MS = 30_000
"""Time for members to join again by themselves after partitions were withheld."""
NO_GENERATION = -1

Partition = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Claim:
    """A member's claim of partitions, in the metadata of the chosen protocol."""

    topics: frozenset[str]
    partitions: frozenset[Partition]
    generation_id: int
    """Generation in which the member received the partitions. −1 if the version of its metadata does not say."""


Claims = Mapping[MemberId, Claim]


class ClaimingGroup(Protocol):
    """A group whose members claim partitions: a `Group`, or the draft of one."""

    @property
    def members(self) -> Mapping[MemberId, Member]: ...

    @property
    def protocol_name(self) -> str | None: ...

    @property
    def watch(self) -> Watch: ...


def is_cooperative(protocol_name: str | None) -> bool:
    """Return True for `cooperative-sticky` of all clients, assignors named after it, and Kafka Streams' own."""
    return protocol_name is not None and ("cooperative" in protocol_name or protocol_name == "stream")


def is_half_way(group: Group) -> bool:
    """Return True if the group is in the middle of an upgrade from eager to cooperative, or back: its members do not
    all offer the same kinds of protocols, or the chosen one is cooperative while a member also offers an eager one.

    Members that all offer both and use the eager one are at rest: Java's default configuration is such a case.
    """
    offered = {frozenset(is_cooperative(name) for name, _ in member.protocols) for member in group.members.values()}
    return len(offered) > 1 or (is_cooperative(group.protocol_name) and any(False in kinds for kinds in offered))


# --- looking --------------------------------------------------------------------------------------------------------


def observe(before: Group, event: Event, taken: Step[Group], cluster: Cluster, now_ms: int) -> Step[Group]:
    """Return the step with the observer's facts added."""
    after: Group = taken.group
    if after is before or after.protocol_type != CONSUMER_PROTOCOL_TYPE:
        return taken
    found = _Findings(after.generation_id)
    watch = after.watch
    for fact in taken.facts:
        if isinstance(fact, GenerationStarted):
            watch = replace(watch, absent=_absent(before, after, taken))
            watch = _generation_started(after.with_watch(watch), found, now_ms)
        elif isinstance(fact, MemberReplaced):
            # A static member may return with other protocols, and without a rebalance.
            watch = replace(watch, half_way=is_half_way(after))
        elif isinstance(fact, GenerationAssigned):
            newest = max(watch.topics_revision, cluster.revision)
            watch = replace(_generation_assigned(after, watch, found, cluster), topics_revision=newest)
            if isinstance(event, SyncGroup):
                strangers = {member_id for member_id, _ in event.assignments} - after.members.keys()
                if strangers:
                    found.add_all(Violation.UNKNOWN_MEMBER, strangers)
    delivered = _delivered(before, taken)
    if delivered:
        watch = replace(watch, delivered={**watch.delivered, **delivered})
    if watch is after.watch:
        return taken
    return Step(after.with_watch(watch), taken.replies, (*taken.facts, *found.facts()))


def claims_of(group: ClaimingGroup, found: _Findings | None = None) -> dict[MemberId, Claim]:
    """Return the claims of the members whose subscription can be read."""
    claims: dict[MemberId, Claim] = {}
    for member in group.members.values():
        try:
            claims[member.member_id] = claim_of(member, group.protocol_name)
        except ProtocolError:
            if found is not None:
                found.add(Violation.UNREADABLE_SUBSCRIPTION, member.member_id)
    return claims


def claim_of(member: Member, protocol_name: str | None) -> Claim:
    """Return the member's claim. Raise ProtocolError if its subscription cannot be read."""
    read = decode_subscription(metadata_of(member, protocol_name))
    return Claim(frozenset(read.topics), frozenset(_each(read.owned_partitions)), read.generation_id)


def claimants(group: ClaimingGroup, claims: Claims) -> dict[Partition, set[MemberId]]:
    """Return the holders of each partition by their own claims: the claimants of the newest generation.

    A stale claim counts if no member has a newer one: its member may have missed the reply that revoked the partition.
    A member that was absent from the join holds what it was last delivered.
    """
    holders: dict[Partition, set[MemberId]] = {}
    newest: dict[Partition, int] = {}
    for member_id, claim in claims.items():
        for partition in () if member_id in group.watch.absent else claim.partitions:
            known = newest.get(partition)
            if known is None or claim.generation_id > known != NO_GENERATION:
                holders[partition] = {member_id}
                newest[partition] = claim.generation_id
            elif claim.generation_id in (known, NO_GENERATION) or known == NO_GENERATION:
                holders[partition].add(member_id)
                newest[partition] = max(known, claim.generation_id)
    for member_id, partitions in group.watch.absent.items():
        for partition in partitions if member_id in group.members else ():
            holders.setdefault(partition, set()).add(member_id)
    return holders


def _is_stale(watch: Watch, member_id: MemberId, claim: Claim) -> bool:
    delivered = watch.delivered.get(member_id)
    return delivered is not None and NO_GENERATION < claim.generation_id < delivered.generation_id


def _absent(before: Group, after: Group, taken: Step[Group]) -> dict[MemberId, frozenset[Partition]]:
    """Return the absent members of the generation that begins. A restart of the gateway forgets what was delivered;
    then the member's claims or its stored assignment count."""
    present = {reply.member_id for _, reply in taken.replies if isinstance(reply, JoinReply)}
    watch = before.watch
    absent: dict[MemberId, frozenset[Partition]] = {}
    for key in after.members.keys() - present:
        if key in watch.absent:
            absent[key] = watch.absent[key]
        elif key in watch.delivered:
            absent[key] = partitions_or_none(watch.delivered[key].assignment)
        elif key in before.members:
            given = partitions_or_none(before.members[key].assignment)
            absent[key] = given | _claimed(before, key)
    return absent


def _claimed(group: Group, member_id: MemberId) -> frozenset[Partition]:
    try:
        read = decode_subscription(metadata_of(group.members[member_id], group.protocol_name))
    except ProtocolError:
        return frozenset()
    return frozenset(_each(read.owned_partitions))


def _generation_started(group: Group, found: _Findings, now_ms: int) -> Watch:
    if not group.members:
        return Watch()
    watch = group.watch
    claims = claims_of(group, found)
    for partition, members in claimants(group, claims).items():
        if len(members) > 1:
            found.add_all(Violation.DOUBLE_CLAIM, members, partition)
    for member_id, claim in claims.items():
        if member_id in watch.absent:
            continue
        # KIP-429 makes a member that also offers an eager protocol an eager one: it claims nothing when it joins.
        keeps = all(is_cooperative(name) for name, _ in group.members[member_id].protocols)
        _compare_with_delivered(watch, member_id, claim, found, keeps and is_cooperative(group.protocol_name))
    cooperative = is_cooperative(group.protocol_name)
    if not cooperative:
        for member in group.members.values():
            if any(is_cooperative(name) for name, _ in member.protocols):
                found.add(Violation.MIXED_MODE, member.member_id)
    if watch.cooperative is not None and watch.cooperative is not cooperative:
        found.add_all(Violation.MODE_CHANGED, group.members)
    member_ids = frozenset(group.members)
    began_ms = (*(at_ms for at_ms in watch.generations_ms if now_ms - at_ms < CHURN_MS), now_ms)
    if member_ids != watch.member_ids:
        began_ms = (now_ms,)
    elif len(began_ms) > CHURN_GENERATIONS:
        found.add_all(Violation.CHURN, member_ids)
        began_ms = (now_ms,)
    return Watch(
        delivered={key: each for key, each in watch.delivered.items() if key in group.members},
        unassigned=watch.unassigned,
        absent=watch.absent,
        half_way=is_half_way(group),
        member_ids=member_ids,
        generations_ms=began_ms,
        cooperative=cooperative,
        topics_revision=watch.topics_revision,
    )


def _compare_with_delivered(
    watch: Watch, member_id: MemberId, claim: Claim, found: _Findings, cooperative: bool
) -> None:
    if _is_stale(watch, member_id, claim):
        found.add_each(Violation.STALE_CLAIM, member_id, claim.partitions)
        return
    delivered = watch.delivered.get(member_id)
    if delivered is None:
        return
    try:
        given = _partitions_in(delivered.assignment)
    except ProtocolError:
        return
    found.add_each(Violation.UNDELIVERED_CLAIM, member_id, claim.partitions - given)
    if not cooperative or claim.generation_id != delivered.generation_id:
        # An eager member has released everything. A member that names no generation has lost its partitions.
        return
    kept = {partition for partition in given if partition[0] in claim.topics}
    untaken = kept - claim.partitions
    violation = Violation.DELIVERED_UNCLAIMED if claim.partitions else Violation.NOTHING_TAKEN
    found.add_each(violation, member_id, untaken)


def _generation_assigned(group: Group, watch: Watch, found: _Findings, cluster: Cluster) -> Watch:
    claims = claims_of(group)
    held = claimants(group, claims) if is_cooperative(group.protocol_name) else {}
    given: defaultdict[Partition, list[MemberId]] = defaultdict(list)
    unreadable = False
    for member in group.members.values():
        try:
            partitions = _partitions_in(member.assignment)
        except ProtocolError:
            unreadable = True
            found.add(Violation.UNREADABLE_ASSIGNMENT, member.member_id)
            continue
        claim = claims.get(member.member_id)
        for partition in partitions:
            given[partition].append(member.member_id)
            topic = cluster.topics.get(partition[0])
            others = held.get(partition, set[MemberId]()) - {member.member_id}
            if others:
                found.add_all(Violation.MOVED_WHILE_CLAIMED, (member.member_id, *sorted(others)), partition)
            if claim is not None and partition[0] not in claim.topics:
                found.add(Violation.NOT_SUBSCRIBED, member.member_id, partition)
            if topic is not None and not 0 <= partition[1] < topic.partition_count:
                found.add(Violation.NO_SUCH_PARTITION, member.member_id, partition)
    for partition, member_ids in given.items():
        if len(member_ids) > 1:
            found.add_all(Violation.ASSIGNED_TWICE, member_ids, partition)
    if unreadable or len(claims) < len(group.members):
        # The owners are not known.
        return replace(watch, unassigned={})
    unassigned = _unassigned(watch, claims, given, cluster)
    for partition, generations in unassigned.items():
        if generations == ORPHANED_GENERATIONS:
            found.add_all(Violation.ORPHANED, (), partition)
    return replace(watch, unassigned=unassigned)


def _unassigned(watch: Watch, claims: Claims, given: Container[Partition], cluster: Cluster) -> dict[Partition, int]:
    topics = {name for claim in claims.values() for name in claim.topics} & cluster.topics.keys()
    found: dict[Partition, int] = {}
    for name in topics:
        for index in range(cluster.topics[name].partition_count):
            partition = name, index
            if partition in given:
                continue
            if len(found) == MAX_UNASSIGNED:
                return {}
            found[partition] = watch.unassigned.get(partition, 0) + 1
    return found


def _delivered(before: Group, taken: Step[Group]) -> dict[MemberId, Delivered]:
    """Return the members whose SyncGroup the step answers with an assignment. Repeats are the same."""
    after: Group = taken.group
    if after.state is not GroupState.STABLE or not any(isinstance(reply, SyncReply) for _, reply in taken.replies):
        return {}
    answered = [reply for _, reply in taken.replies if isinstance(reply, SyncReply) and reply.error is ErrorCode.NONE]
    synced = (before.pending_sync | {k for k, m in before.members.items() if m.parked_sync}) - after.pending_sync
    synced -= {key for key, member in after.members.items() if member.parked_sync}
    return {
        key: Delivered(after.generation_id, after.members[key].assignment)
        for key in (synced & after.members.keys() if answered else ())
    }


# --- enforcing ------------------------------------------------------------------------------------------------------


def guarded(group: Group, event: SyncGroup) -> tuple[SyncGroup, dict[MemberId, set[Partition]]]:
    """Return the leader's SyncGroup without partitions claimed by members other than their new owners, and the
    partitions withheld from each member. Bytes that need no change, or cannot be read, stay as they came."""
    assigns = group.state is GroupState.COMPLETING_REBALANCE and event.member_id == group.leader_id
    if not assigns or group.protocol_type != CONSUMER_PROTOCOL_TYPE or not is_cooperative(group.protocol_name):
        return event, {}
    held = claimants(group, claims_of(group))
    withheld: dict[MemberId, set[Partition]] = {}
    assignments: list[tuple[MemberId, bytes]] = []
    for member_id, given in event.assignments:
        taken_out = {each for each in partitions_or_none(given) if held.get(each, set[MemberId]()) - {member_id}}
        if taken_out and member_id in group.members:
            withheld[member_id] = taken_out
            given = _without(given, taken_out)
        assignments.append((member_id, given))
    return (replace(event, assignments=tuple(assignments)) if withheld else event), withheld


def withhold(taken: Step[Group], withheld: Mapping[MemberId, set[Partition]], now_ms: int) -> Step[Group]:
    """Return the step that settled a guarded assignment, with the fact about it and a deadline for another
    rebalance. Members that lose partitions join again by themselves, as after any cooperative generation."""
    if not withheld or not any(isinstance(fact, GenerationAssigned) for fact in taken.facts):
        return taken
    group: Group = taken.group
    partitions = sorted(set[Partition]().union(*withheld.values()))
    fact = PartitionsWithheld(
        group.generation_id,
        tuple(withheld)[:MAX_NAMED],
        len(withheld),
        tuple(partitions[:MAX_NAMED]),
        len(partitions),
    )
    watch = replace(group.watch, withheld=True, follow_up_ms=now_ms + FOLLOW_UP_MS)
    return replace(taken, group=replace(group, watch=watch), facts=(*taken.facts, fact))


def _without(assignment: bytes, withheld: set[Partition]) -> bytes:
    read = decode_assignment(assignment)
    left = (
        TopicPartition(topic, tuple(each for each in partitions if (topic, each) not in withheld))
        for topic, partitions in read.assigned_partitions
    )
    return encode_assignment(Assignment(read.version, tuple(each for each in left if each.partitions), read.user_data))


# --- reading --------------------------------------------------------------------------------------------------------


def _each(topics: Iterable[TopicPartition]) -> Iterable[Partition]:
    return ((topic, partition) for topic, partitions in topics for partition in partitions)


def _partitions_in(assignment: bytes) -> frozenset[Partition]:
    """Return the assigned partitions; zero bytes are an empty assignment. Raises ProtocolError."""
    return frozenset(_each(decode_assignment(assignment).assigned_partitions)) if assignment else frozenset()


def partitions_or_none(assignment: bytes) -> frozenset[Partition]:
    """Return the assigned partitions. Return no partitions if the bytes cannot be parsed."""
    try:
        return _partitions_in(assignment)
    except ProtocolError:
        return frozenset()


class _Findings:
    """Findings of one look, gathered by kind: one fact each, however many members and partitions it is about."""

    def __init__(self, generation_id: int) -> None:
        self._generation_id = generation_id
        self._members: defaultdict[Violation, dict[MemberId, None]] = defaultdict(dict)
        self._partitions: defaultdict[Violation, set[Partition]] = defaultdict(set)

    def add(self, violation: Violation, member_id: MemberId, partition: Partition | None = None) -> None:
        self.add_all(violation, (member_id,), partition)

    def add_each(self, violation: Violation, member_id: MemberId, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self.add(violation, member_id, partition)

    def add_all(self, violation: Violation, members: Iterable[MemberId], partition: Partition | None = None) -> None:
        self._members[violation].update(dict.fromkeys(members))
        if partition is not None:
            self._partitions[violation].add(partition)

    def facts(self) -> tuple[Fact, ...]:
        return tuple(
            ProtocolViolated(
                violation,
                self._generation_id,
                tuple(sorted(members)[:MAX_NAMED]),
                len(members),
                tuple(sorted(self._partitions[violation])[:MAX_NAMED]),
                len(self._partitions[violation]),
            )
            for violation, members in self._members.items()
        )
