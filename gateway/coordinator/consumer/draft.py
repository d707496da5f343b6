"""A consumer group being changed: the working copy that one step makes, alters and seals.

The one idea: mutation lasts for one step, and `seal` reports which rows it touched. The verbs keep the parts of the
group consistent: a member that leaves takes its target, its deadlines and its partitions with it, and no partition gets
a second owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from uuid import UUID

from gateway.coordinator.cluster import Cluster, Reader
from gateway.coordinator.consumer import handoff, unsettled
from gateway.coordinator.consumer.assignors import ASSIGNORS, UNIFORM, Subscriber
from gateway.coordinator.consumer.model import (
    ConsumerGroup,
    ConsumerMember,
    MemberState,
    Moving,
    ReadAs,
    Subscription,
    Unsettled,
    read_as,
    session_ms,
    subscription_of,
)
from gateway.coordinator.consumer.partitions import NOTHING, Partitions, difference, size
from gateway.coordinator.consumer.sessions import Deadlines
from gateway.coordinator.consumer.spread import Spread, respread, spread_of
from gateway.coordinator.consumer.topics import Pattern, Shown, metadata_hash, resolve_pattern, show
from gateway.coordinator.facts import (
    Departure,
    EveryoneHeard,
    Fact,
    MemberChanged,
    MemberId,
    MemberLeft,
    RebalanceBegun,
    TargetComputed,
    Trigger,
    shortened,
)
from gateway.coordinator.handoff import HandoffEnd
from gateway.coordinator.machine import Reply, RequestId, Step
from gateway.coordinator.member_epochs import Fields
from gateway.coordinator.settings import ConsumerSettings

_FIELDS = Fields(ConsumerGroup)


class Draft:
    """Working copy with all fields of `ConsumerGroup`; `seal` puts them together again. Only the fields that steps
    change are declared here."""

    group_epoch: int
    assignment_epoch: int
    metadata_hash: int
    assignor: str
    topics_revision: int
    members: dict[MemberId, ConsumerMember]
    target: dict[MemberId, Partitions]
    owners: dict[UUID, Mapping[int, MemberId]]
    instances: dict[str, MemberId]
    subscriptions: dict[Subscription, int]
    patterns: dict[str, Pattern]
    postponed: str
    shown: dict[tuple[str, Reader], Shown]
    seen: Cluster | None
    unheard: set[MemberId]
    spread: Spread | None
    session_deadlines: Deadlines
    rebalance_deadlines: dict[MemberId, int]
    moving: dict[tuple[UUID, int], Moving]
    unsettled: tuple[Unsettled, ...]
    drain_deadlines: dict[MemberId, int]
    join_deadlines: dict[MemberId, int]
    sync_deadlines: dict[MemberId, int]

    def __init__(self, group: ConsumerGroup, now_ms: int, settings: ConsumerSettings, cluster: Cluster) -> None:
        self.__dict__.update(_FIELDS.of(group))
        self.before = group
        self.now_ms = now_ms
        self.settings = settings
        self.cluster = cluster
        self.replies: list[tuple[RequestId, Reply]] = []
        self.facts: list[Fact] = []
        self._put: dict[MemberId, None] = {}
        self._copied_owners: set[UUID] = set()
        self._resolved: dict[ReadAs, frozenset[UUID]] = {}

    def seal(self) -> Step[ConsumerGroup]:
        """Return the step. Facts keep the order in which they were added. Members that no fact touches, but whose
        stored form changed, come last."""
        before = self.before
        if self.unsettled:
            unsettled.follow_owners(self)
        if before.unheard and not self.unheard:
            self.tell(EveryoneHeard())
        touched = {member_id for fact in self.facts for member_id in fact.touches()}
        for member_id in self._put:
            if member_id not in touched and member_id in self.members:
                old = before.members.get(member_id)
                if old is None or not _stored_alike(old, self.members[member_id]):
                    self.tell(MemberChanged(member_id))
        return Step(_FIELDS.together(self.__dict__), tuple(self.replies), tuple(self.facts))

    def answer(self, request_id: RequestId, reply: Reply) -> None:
        self.replies.append((request_id, reply))

    def tell(self, fact: Fact) -> None:
        self.facts.append(fact)

    def raise_epoch(self, trigger: Trigger, member_id: MemberId | None = None) -> None:
        """Raise the group epoch, because subscriptions have changed since the target was computed."""
        self.group_epoch += 1
        self.tell(RebalanceBegun(trigger, member_id))

    # --- members ----------------------------------------------------------------------------------------------------

    def put(self, member: ConsumerMember, reason: HandoffEnd = HandoffEnd.ACKNOWLEDGED) -> None:
        """Add the member, or replace the one with its id. `reason` says why the member lost the partitions that it
        owned before. Raise AssertionError if a partition would then have two owners.
        """
        before = self.members.get(member.member_id)
        if before is member:
            return
        self._put[member.member_id] = None
        if before is None or subscription_of(before) != subscription_of(member):
            if before is not None:
                self._forget_subscription(before)
            subscription = subscription_of(member)
            self.subscriptions[subscription] = self.subscriptions.get(subscription, 0) + 1
        if before is None or (before.assigned, before.pending_revocation, before.undrained) != (
            member.assigned,
            member.pending_revocation,
            member.undrained,
        ):
            if before is not None:
                self._release(before)
            self._own(member)
            if before is not None:
                handoff.member_changed(self, before, member, reason)
        if before is not None and before.instance_id not in (None, member.instance_id):
            self.instances.pop(before.instance_id, None)
        if member.instance_id is not None:
            self.instances[member.instance_id] = member.member_id
        self.members[member.member_id] = member

    def remove(self, member_id: MemberId, reason: HandoffEnd = HandoffEnd.SOURCE_LEFT) -> ConsumerMember:
        """Remove the member and free its partitions. `reason` is reported to the handoffs that wait for them."""
        member = self.members.pop(member_id)
        self._forget_subscription(member)
        self._release(member)
        if member.instance_id is not None and self.instances.get(member.instance_id) == member_id:
            del self.instances[member.instance_id]
        share = self.target.pop(member_id, NOTHING)
        if self.spread is not None:
            self.spread = self.spread.without(member_id, share)
        self.unheard.discard(member_id)
        self.session_deadlines = self.session_deadlines.without(member_id)
        for deadlines in (self.rebalance_deadlines, self.join_deadlines, self.sync_deadlines):
            deadlines.pop(member_id, None)
        handoff.member_changed(self, member, None, reason)
        handoff.member_gone(self, member_id)
        return member

    def lose(self, member_id: MemberId, departure: Departure, reason: str | None = None) -> None:
        """Remove a member that left or failed. The next request of any member computes the target again."""
        self.lose_all({member_id: (departure, reason)})

    def lose_all(self, departures: Mapping[MemberId, tuple[Departure, str | None]]) -> None:
        """Remove these members. The epoch rises once, however many leave."""
        for member_id, (departure, reason) in departures.items():
            self.remove(member_id, handoff.left(departure))
            self.tell(MemberLeft(member_id, departure, shortened(reason)))
        self.raise_epoch(Trigger.MEMBER_LEFT, next(iter(departures)))
        if not self.members:
            self.patterns, self.shown, self.postponed = {}, {}, ""
            self.metadata_hash = 0

    def succeed(self, old_id: MemberId, member: ConsumerMember) -> None:
        """Put `member` in the place of a static member that left for a while, with that member's target."""
        target = self.target.get(old_id, NOTHING)
        self.remove(old_id, HandoffEnd.SUPERSEDED)
        unsettled.owner_replaced(self, old_id, member.member_id)
        self.put(member)
        self.target[member.member_id] = target
        self.spread = None

    def _forget_subscription(self, member: ConsumerMember) -> None:
        subscription = subscription_of(member)
        left = self.subscriptions[subscription] - 1
        if left:
            self.subscriptions[subscription] = left
        else:
            del self.subscriptions[subscription]

    def _release(self, member: ConsumerMember) -> None:
        for held in (member.assigned, member.pending_revocation, member.undrained):
            for topic_id, indexes in held.items():
                owned = self._owned(topic_id)
                for index in indexes:
                    owned.pop(index, None)
                if not owned:
                    del self.owners[topic_id]
                    self._copied_owners.discard(topic_id)

    def _own(self, member: ConsumerMember) -> None:
        for held in (member.assigned, member.pending_revocation, member.undrained):
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

    def see_topics(self, postponed: str = "") -> bool:
        """Match the members' subscriptions with the current topics. Return whether the group epoch was decided with
        other topics, other partitions of them, or other topics that a pattern matches. The postponed pattern matches no
        topic yet."""
        self.postponed = postponed
        read = {read_as(subscription, self.cluster.describing) for subscription in self.subscriptions}
        in_use = {text for _, text, _ in read if text not in ("", postponed)}
        self.patterns = {text: resolve_pattern(text, self.cluster, self.patterns.get(text)) for text in in_use}
        if self.seen is None or self.seen.describing is not self.cluster.describing:
            self.shown = {}
        names = {name for subscribed, _, _ in read for name in subscribed}
        views = {text: set[frozenset[str]]() for text in in_use}
        shown = {(text, reader) for _, text, reader in read if text in in_use}
        for text, reader in shown:
            views[text].add(self._matched(text, reader))
        self.shown = {key: known for key, known in self.shown.items() if key in shown}
        names.update(*(view for of_text in views.values() for view in of_text))
        differing = [
            ((text, *(reader or ())), self._matched(text, reader)) for text, reader in shown if len(views[text]) > 1
        ]
        if postponed:
            # Resolving the pattern must raise the epoch, after a failover too, even if other members already read the
            # same topics.
            differing.append(((postponed,), frozenset()))
        found = metadata_hash(names, self.cluster, differing)
        self.seen = self.cluster
        self._resolved.clear()
        if found == self.metadata_hash:
            return False
        self.metadata_hash = found
        return True

    def wants_others(self, before: ConsumerMember, member: ConsumerMember) -> bool:
        """Return whether the member now reads other topics. Either its subscription has changed, or its principal or
        host has changed and may see other matches of the pattern. The caller has called `see_topics` for the new
        subscription.
        """
        (*said, who), (*says, is_who) = subscription_of(before), subscription_of(member)
        return said != says or (
            who != is_who and self.topic_ids(subscription_of(before)) != self.topic_ids(subscription_of(member))
        )

    def to_postpone(self, member: ConsumerMember) -> str:
        """Return the member's pattern if the member names topics too and no member has had this pattern; ""
        otherwise. A member that subscribes by pattern alone need not wait for it."""
        names, text, _ = subscription_of(member)
        known = text == "" or any(text == other for _, other, _ in self.before.subscriptions)
        return text if names and not known else ""

    def is_unfit(self) -> bool:
        """Return whether the target is unfit. It is if it leaves a subscribed partition without a member, if it
        assigns one to a member that does not read it, or if a member has nothing while another has two partitions
        and could spare one for it."""
        read = {topic_id for subscription in self.subscriptions for topic_id in self.topic_ids(subscription)}
        given = Counter[UUID]()
        to_spare: set[UUID] = set()
        for member_id, share in self.target.items():
            if not self.topic_ids(subscription_of(self.members[member_id])).issuperset(share):
                return True
            given.update({topic_id: len(indexes) for topic_id, indexes in share.items()})
            if size(share) > 1:
                to_spare.update(share)
        for member_id, member in self.members.items():
            if not self.target.get(member_id) and not to_spare.isdisjoint(self.topic_ids(subscription_of(member))):
                return True
        return any(given[topic_id] < self.cluster.by_id[topic_id].partition_count for topic_id in read)

    def topic_ids(self, subscription: Subscription) -> frozenset[UUID]:
        """Return the existing topics that a member with this subscription reads. The caller has called `see_topics`
        for it."""
        read = read_as(subscription, self.cluster.describing)
        found = self._resolved.get(read)
        if found is None:
            subscribed, text, reader = read
            names: Iterable[str] = subscribed
            if text in self.patterns:
                names = {*subscribed, *self._matched(text, reader)}
            by_name = self.cluster.topics
            found = frozenset(by_name[name].topic_id for name in names if name in by_name)
            self._resolved[read] = found
        return found

    def _matched(self, text: str, reader: Reader | None) -> frozenset[str]:
        """Return the matches of the pattern that the reader may see."""
        pattern, describing = self.patterns[text], self.cluster.describing
        if reader is None or describing is None:
            return pattern.matched
        shown = show(pattern, reader, describing, self.shown.get((text, reader)))
        self.shown[text, reader] = shown
        return shown.names

    def compute_target(self) -> None:
        """Compute the target anew. Only members whose share differs are written."""
        self.assignor = self._preferred_assignor()
        subscribed = frozenset[UUID]().union(*(self.topic_ids(each) for each in self.subscriptions))
        counts = {topic_id: self.cluster.by_id[topic_id].partition_count for topic_id in subscribed}
        alike = self.assignor == UNIFORM and self._read_alike()
        if alike and self.spread is not None and self.spread.counts == counts:
            self.spread, shares = respread(self.spread, self.target, self.members)
        else:
            shares = ASSIGNORS[self.assignor](self._subscribers(), counts)
            self.spread = spread_of(shares, counts) if alike else None
        changed: list[MemberId] = []
        gained: list[tuple[MemberId, Partitions]] = []
        for member_id, partitions in shares.items():
            last = self.target.get(member_id)
            if last is not partitions and last != partitions:
                self.target[member_id] = partitions
                changed.append(member_id)
                gained.append((member_id, difference(partitions, last or NOTHING)))
        self.assignment_epoch = self.group_epoch
        self.topics_revision = max(self.topics_revision, self.cluster.revision)
        self.tell(TargetComputed(self.assignment_epoch, self.assignor, tuple(changed)))
        handoff.target_moved(self, gained)

    def _read_alike(self) -> bool:
        """Return whether all members subscribe to the same topics and may describe the same ones."""
        return len({read_as(subscription, self.cluster.describing) for subscription in self.subscriptions}) == 1

    def _subscribers(self) -> dict[MemberId, Subscriber]:
        return {
            member_id: Subscriber(
                topic_ids=self.topic_ids(subscription_of(member)),
                instance_id=member.instance_id,
                last=self.target.get(member_id, NOTHING),
            )
            for member_id, member in self.members.items()
        }

    def _preferred_assignor(self) -> str:
        """Return the assignor that most members name. If two are named equally often, the one that is configured first
        wins.
        """
        asked = Counter(
            member.server_assignor
            for member in self.members.values()
            if member.server_assignor is not None and member.server_assignor in self.settings.assignors
        )
        return max(self.settings.assignors, key=lambda name: asked[name])

    # --- time -------------------------------------------------------------------------------------------------------

    def hear(self, member_id: MemberId) -> None:
        """Restart the session of a member that has sent a request."""
        self.unheard.discard(member_id)
        deadline_ms = self.now_ms + session_ms(self.members[member_id], self.settings)
        self.session_deadlines = self.session_deadlines.moved(member_id, deadline_ms)

    def arm_rebalance(self, before: ConsumerMember | None, member: ConsumerMember) -> None:
        """Start the member's rebalance timeout when the response lists what it must revoke."""
        if member.state is not MemberState.UNREVOKED:
            self.rebalance_deadlines.pop(member.member_id, None)
        elif before is None or before.pending_revocation != member.pending_revocation:
            self.rebalance_deadlines[member.member_id] = self.now_ms + member.rebalance_timeout_ms


def _stored_alike(before: ConsumerMember, after: ConsumerMember) -> bool:
    spoken = replace(before, connection_number=after.connection_number, connection_id=after.connection_id)
    return before == after or spoken == after
