"""A consumer group being changed: the working copy that one step makes, alters and seals.

The one idea: mutation lives for the length of one step, and `seal` says which rows it touched. The verbs keep in
agreement what must agree: a member that goes takes its target, its deadlines and its partitions with it, and no
partition gets a second owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from uuid import UUID

from gateway.coordinator.consumer.assignors import ASSIGNORS, Subscriber
from gateway.coordinator.consumer.model import (
    Changes,
    ConsumerGroup,
    ConsumerGroupHeartbeatReply,
    ConsumerMember,
    ConsumerSettings,
    ConsumerStep,
    MemberState,
    Subscription,
    subscription_of,
)
from gateway.coordinator.consumer.partitions import NOTHING, Partitions
from gateway.coordinator.consumer.topics import ClusterTopics, Pattern, metadata_hash, resolve_pattern
from gateway.coordinator.model import MemberId, RequestId


class Draft:
    """Fields are those of `ConsumerGroup`, under the same names; `seal` puts them together again."""

    __slots__ = (
        "_copied_owners",
        "_resolved",
        "assignment_epoch",
        "assignor",
        "before",
        "group_epoch",
        "instances",
        "members",
        "metadata_hash",
        "now_ms",
        "owners",
        "patterns",
        "reasons",
        "rebalance_deadlines",
        "replies",
        "session_deadlines",
        "settings",
        "subscriptions",
        "target",
        "topics",
        "topics_version",
        "touched",
    )

    def __init__(self, group: ConsumerGroup, now_ms: int, settings: ConsumerSettings, topics: ClusterTopics) -> None:
        self.before = group
        self.now_ms = now_ms
        self.settings = settings
        self.topics = topics
        self.replies: list[tuple[RequestId, ConsumerGroupHeartbeatReply]] = []
        self.reasons: list[str] = []
        self.touched: dict[MemberId, None] = {}
        self._copied_owners: set[UUID] = set()
        self._resolved: dict[Subscription, frozenset[UUID]] = {}
        self.group_epoch = group.group_epoch
        self.assignment_epoch = group.assignment_epoch
        self.metadata_hash = group.metadata_hash
        self.assignor = group.assignor
        self.members = dict(group.members)
        self.target = dict(group.target)
        self.owners = dict(group.owners)
        self.instances = dict(group.instances)
        self.patterns = dict(group.patterns)
        self.subscriptions = dict(group.subscriptions)
        self.topics_version = group.topics_version
        self.session_deadlines = dict(group.session_deadlines)
        self.rebalance_deadlines = dict(group.rebalance_deadlines)

    def seal(self) -> ConsumerStep:
        before = self.before
        group = ConsumerGroup(
            group_id=before.group_id,
            group_epoch=self.group_epoch,
            assignment_epoch=self.assignment_epoch,
            metadata_hash=self.metadata_hash,
            assignor=self.assignor,
            members=self.members,
            target=self.target,
            owners=self.owners,
            instances=self.instances,
            patterns=self.patterns,
            subscriptions=self.subscriptions,
            topics_version=self.topics_version,
            session_deadlines=self.session_deadlines,
            rebalance_deadlines=self.rebalance_deadlines,
        )
        return ConsumerStep(group, tuple(self.replies), self._changes(), tuple(self.reasons))

    def _changes(self) -> Changes:
        before = self.before
        moved = (self.group_epoch, self.assignment_epoch, self.metadata_hash, self.assignor) != (
            before.group_epoch,
            before.assignment_epoch,
            before.metadata_hash,
            before.assignor,
        )
        targets = {
            member_id: partitions
            for member_id, partitions in self.target.items()
            if (old := before.target.get(member_id)) is not partitions and old != partitions
        }
        return Changes(
            group=moved,
            members=tuple(
                self.members[member_id]
                for member_id in self.touched
                if member_id in self.members
                and not _stored_alike(before.members.get(member_id), self.members[member_id])
            ),
            removed_members=tuple(
                member_id for member_id in self.touched if member_id in before.members and member_id not in self.members
            ),
            targets=targets,
            removed_targets=tuple(member_id for member_id in before.target if member_id not in self.target),
        )

    def answer(self, request_id: RequestId, reply: ConsumerGroupHeartbeatReply) -> None:
        self.replies.append((request_id, reply))

    def say(self, reason: str) -> None:
        self.reasons.append(reason)

    # --- members ----------------------------------------------------------------------------------------------------

    def put(self, member: ConsumerMember) -> None:
        """Adds the member, or replaces what is held under its id. AssertionError if a partition had two owners then."""
        before = self.members.get(member.member_id)
        if before is member:
            return
        self.touched[member.member_id] = None
        if before is None or subscription_of(before) != subscription_of(member):
            if before is not None:
                self._forget_subscription(before)
            subscription = subscription_of(member)
            self.subscriptions[subscription] = self.subscriptions.get(subscription, 0) + 1
        if before is None or (before.assigned, before.pending_revocation) != (
            member.assigned,
            member.pending_revocation,
        ):
            if before is not None:
                self._release(before)
            self._own(member)
        if before is not None and before.instance_id not in (None, member.instance_id):
            self.instances.pop(before.instance_id, None)
        if member.instance_id is not None:
            self.instances[member.instance_id] = member.member_id
        self.members[member.member_id] = member

    def remove(self, member_id: MemberId) -> ConsumerMember:
        """Takes the member out; its partitions are free from here on."""
        member = self.members.pop(member_id)
        self.touched[member_id] = None
        self._forget_subscription(member)
        self._release(member)
        if member.instance_id is not None and self.instances.get(member.instance_id) == member_id:
            del self.instances[member.instance_id]
        self.target.pop(member_id, None)
        self.session_deadlines.pop(member_id, None)
        self.rebalance_deadlines.pop(member_id, None)
        return member

    def lose(self, member_id: MemberId, reason: str) -> None:
        """Takes out a member that left or failed. The target is computed again with the next heartbeat of anyone."""
        self.remove(member_id)
        self.group_epoch += 1
        self.say(reason)
        if not self.members:
            self.patterns = {}
            self.metadata_hash = 0

    def succeed(self, old_id: MemberId, member: ConsumerMember) -> None:
        """Puts `member` in the place of a static member that left for a while: its target goes over too."""
        target = self.target.get(old_id, NOTHING)
        self.remove(old_id)
        self.put(member)
        self.target[member.member_id] = target

    def _forget_subscription(self, member: ConsumerMember) -> None:
        subscription = subscription_of(member)
        left = self.subscriptions[subscription] - 1
        if left:
            self.subscriptions[subscription] = left
        else:
            del self.subscriptions[subscription]

    def _release(self, member: ConsumerMember) -> None:
        for held in (member.assigned, member.pending_revocation):
            for topic_id, indexes in held.items():
                owned = self._owned(topic_id)
                for index in indexes:
                    owned.pop(index, None)
                if not owned:
                    del self.owners[topic_id]
                    self._copied_owners.discard(topic_id)

    def _own(self, member: ConsumerMember) -> None:
        for held in (member.assigned, member.pending_revocation):
            for topic_id, indexes in held.items():
                owned = self._owned(topic_id)
                for index in indexes:
                    if owned.setdefault(index, member.member_id) != member.member_id:
                        taken = f"{topic_id}-{index} of {owned[index]} given to {member.member_id}"
                        raise AssertionError(f"group {self.before.group_id}: {taken}")

    def _owned(self, topic_id: UUID) -> dict[int, MemberId]:
        owned = self.owners.get(topic_id)
        if topic_id not in self._copied_owners or not isinstance(owned, dict):
            owned = self.owners[topic_id] = dict(owned or {})
            self._copied_owners.add(topic_id)
        return owned

    # --- subscriptions and the target -------------------------------------------------------------------------------

    def see_topics(self) -> bool:
        """Compares what members subscribe to with the topics as they are now. Whether that differs from what the group
        epoch was decided with: other topics, or other partitions of them."""
        for text in {text for _, text in self.subscriptions if text}:
            self.patterns[text] = resolve_pattern(text, self.topics, self.patterns.get(text))
        in_use = {text for _, text in self.subscriptions}
        self.patterns = {text: pattern for text, pattern in self.patterns.items() if text in in_use}
        names = {name for subscribed, _ in self.subscriptions for name in subscribed}
        names.update(*(pattern.matched for pattern in self.patterns.values()))
        found = metadata_hash(names, self.topics)
        self.topics_version = self.topics.version
        self._resolved.clear()
        if found == self.metadata_hash:
            return False
        self.metadata_hash = found
        return True

    def topic_ids(self, subscription: Subscription) -> frozenset[UUID]:
        """The existing topics that a member with this subscription reads. `see_topics` has been called for it."""
        found = self._resolved.get(subscription)
        if found is None:
            subscribed, text = subscription
            pattern: Pattern | None = self.patterns.get(text)
            names: Iterable[str] = subscribed if pattern is None else {*subscribed, *pattern.matched}
            by_name = self.topics.by_name
            found = frozenset(by_name[name].topic_id for name in names if name in by_name)
            self._resolved[subscription] = found
        return found

    def compute_target(self) -> None:
        """Decides anew who should own what; only members whose share differs are written."""
        self.assignor = self._preferred_assignor()
        subscribers = {
            member_id: Subscriber(
                topic_ids=self.topic_ids(subscription_of(member)),
                instance_id=member.instance_id,
                last=self.target.get(member_id, NOTHING),
            )
            for member_id, member in self.members.items()
        }
        subscribed = frozenset[UUID]().union(*(self.topic_ids(each) for each in self.subscriptions))
        counts = {topic_id: self.topics.by_id[topic_id].partition_count for topic_id in subscribed}
        computed: dict[MemberId, Partitions] = ASSIGNORS[self.assignor](subscribers, counts)
        for member_id, partitions in computed.items():
            if self.target.get(member_id) != partitions:
                self.target[member_id] = partitions
        self.assignment_epoch = self.group_epoch

    def _preferred_assignor(self) -> str:
        """What most members ask for; of two asked for equally often, the one configured first."""
        asked = Counter(
            member.server_assignor
            for member in self.members.values()
            if member.server_assignor is not None and member.server_assignor in self.settings.assignors
        )
        return max(self.settings.assignors, key=lambda name: asked[name])

    # --- time -------------------------------------------------------------------------------------------------------

    def arm_session(self, member_id: MemberId) -> None:
        self.session_deadlines[member_id] = self.now_ms + self.settings.session_timeout_ms

    def arm_rebalance(self, before: ConsumerMember | None, member: ConsumerMember) -> None:
        """Counts from the moment at which the member is told what to let go of."""
        if member.state is not MemberState.UNREVOKED:
            self.rebalance_deadlines.pop(member.member_id, None)
        elif before is None or before.pending_revocation != member.pending_revocation:
            self.rebalance_deadlines[member.member_id] = self.now_ms + member.rebalance_timeout_ms


def _stored_alike(before: ConsumerMember | None, after: ConsumerMember) -> bool:
    return before is not None and replace(before, connection_number=after.connection_number) == after
