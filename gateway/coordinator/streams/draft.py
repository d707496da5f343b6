"""A streams group being changed: the working copy that one step makes, alters and seals.

The one idea: mutation lasts for one step. The verbs keep the parts of the group consistent: a member that leaves takes
its target and its deadlines with it, and a change of anything that the target is computed from raises the group epoch
first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.sessions import Deadlines
from gateway.coordinator.consumer.topics import metadata_hash
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
)
from gateway.coordinator.machine import Reply, RequestId, Step
from gateway.coordinator.member_epochs import Fields
from gateway.coordinator.settings import StreamsSettings
from gateway.coordinator.streams.assignor import Worker, assign
from gateway.coordinator.streams.model import MemberState, StreamsGroup, StreamsMember, has_news
from gateway.coordinator.streams.tasks import NO_TASKS, Tasks
from gateway.coordinator.streams.topology import Configured, InvalidTopologyError, StatusCode, Topology, configure

STICKY = "sticky"
"""The name of the only assignor of streams groups."""

_FIELDS = Fields(StreamsGroup)


class Draft:
    """Working copy with all fields of `StreamsGroup`; `seal` puts them together again. Only the fields that steps
    change are declared here."""

    group_epoch: int
    assignment_epoch: int
    topology: Topology | None
    is_ready: bool
    metadata_hash: int
    standby_replicas: int
    topics_revision: int
    awaits_members: bool
    shutdown_by: MemberId | None
    endpoint_epoch: int
    members: dict[MemberId, StreamsMember]
    target: dict[MemberId, Tasks]
    seen: Cluster | None
    configured: Configured | None
    unheard: set[MemberId]
    session_deadlines: Deadlines
    rebalance_deadlines: dict[MemberId, int]
    delay_deadline_ms: int | None

    def __init__(self, group: StreamsGroup, now_ms: int, settings: StreamsSettings, cluster: Cluster) -> None:
        self.__dict__.update(_FIELDS.of(group))
        self.before = group
        self.now_ms = now_ms
        self.settings = settings
        self.cluster = cluster
        self.replies: list[tuple[RequestId, Reply]] = []
        self.facts: list[Fact] = []
        self._put: dict[MemberId, None] = {}

    def seal(self) -> Step[StreamsGroup]:
        """Return the step. Facts keep the order in which they were added. Members that no fact touches, but whose
        stored form changed, come last."""
        before = self.before
        if before.unheard and not self.unheard:
            self.tell(EveryoneHeard())
        touched = {member_id for fact in self.facts for member_id in fact.touches()}
        for member_id in self._put:
            if member_id not in touched and member_id in self.members:
                old = before.members.get(member_id)
                new = self.members[member_id]
                if old is None or replace(old, connection_number=new.connection_number) != new:
                    self.tell(MemberChanged(member_id))
        return Step(_FIELDS.together(self.__dict__), tuple(self.replies), tuple(self.facts))

    def answer(self, request_id: RequestId, reply: Reply) -> None:
        self.replies.append((request_id, reply))

    def tell(self, fact: Fact) -> None:
        self.facts.append(fact)

    def raise_epoch(self, trigger: Trigger, member_id: MemberId | None = None) -> None:
        """Raise the group epoch, because the members' needs have changed since the target was computed."""
        self.group_epoch += 1
        self.tell(RebalanceBegun(trigger, member_id))

    # --- members ----------------------------------------------------------------------------------------------------

    def put(self, member: StreamsMember) -> None:
        """Add the member, or replace the one with its id."""
        if self.members.get(member.member_id) is not member:
            self.members[member.member_id] = member
            self._put[member.member_id] = None

    def succeed(self, former_id: MemberId, member: StreamsMember) -> None:
        """Put the member in the place of a static member that has left for a while, and give it the same target. No
        epoch rises.
        """
        del self.members[former_id]
        self.put(member)
        if former_id in self.target:
            self.target[member.member_id] = self.target.pop(former_id)
        self.unheard.discard(former_id)
        self.session_deadlines = self.session_deadlines.without(former_id)
        self.rebalance_deadlines.pop(former_id, None)

    def lose_all(self, departures: Mapping[MemberId, Departure]) -> None:
        """Remove members that left or failed. The epoch rises once, however many leave, and the next request of any
        member computes the target again."""
        for member_id, departure in departures.items():
            member = self.members.pop(member_id)
            self.target.pop(member_id, None)
            self.unheard.discard(member_id)
            self.session_deadlines = self.session_deadlines.without(member_id)
            self.rebalance_deadlines.pop(member_id, None)
            self.endpoint_epoch += member.user_endpoint is not None
            self.tell(MemberLeft(member_id, departure))
        self.raise_epoch(Trigger.MEMBER_LEFT, next(iter(departures)))
        if not self.members:
            self.metadata_hash, self.is_ready = 0, False
            self.seen = self.configured = self.shutdown_by = None
            self.end_delay()

    # --- topics and the target --------------------------------------------------------------------------------------

    def take(self, topology: Topology) -> None:
        """Make the topology the group's, to be compared with the topics. Raise InvalidTopologyError if it could
        never run."""
        self.configured = configure(topology, self.cluster)
        self.topology, self.seen = topology, None

    def has_news(self) -> bool:
        return self.configured is None or self.seen is None or has_news(self.before, self.cluster)

    def see_topics(self) -> bool:
        """Compare the topology with the current topics. Return whether that differs from what the group epoch was
        decided with: other topics, other partitions of them, or all missing topics exist."""
        topology = self.topology or Topology()
        found = metadata_hash(topology.required_topics, self.cluster)
        # A draft that has just accepted a topology has compared it already; topics of other groups change all the time.
        if self.configured is None or (self.seen is not None and found != self.metadata_hash):
            self.configured = _configured(topology, self.cluster)
        self.seen = self.cluster
        is_same = found == self.metadata_hash and self.configured.is_ready == self.is_ready
        is_read = any(each.user_endpoint is not None and each.assigned for each in self.members.values())
        if is_read and found != self.metadata_hash:
            # The partitions that are read behind endpoints may differ although the tasks are the same.
            self.endpoint_epoch += 1
        self.metadata_hash, self.is_ready = found, self.configured.is_ready
        return not is_same

    def compute_target(self) -> None:
        """Compute the target anew. Only members whose share differs are written. A member with an older topology cannot
        run any of the tasks. The caller must have called `see_topics`, in this step or in the step of the last request.
        """
        configured = self.configured or Configured()
        shares = dict.fromkeys(self.members, NO_TASKS)
        if configured.is_ready and not self.awaits_members:
            epoch = self.topology.epoch if self.topology is not None else 0
            workers = {
                member_id: Worker(member.process, self.target.get(member_id, NO_TASKS))
                for member_id, member in self.members.items()
                if member.topology_epoch >= epoch
            }
            shares |= assign(workers, configured.task_counts, self.standby_replicas)
        changed = tuple(key for key, share in shares.items() if share != self.target.get(key))
        self.target = shares
        self.assignment_epoch = self.group_epoch
        self.topics_revision = max(self.topics_revision, self.cluster.revision)
        self.tell(TargetComputed(self.assignment_epoch, STICKY, changed))

    # --- time -------------------------------------------------------------------------------------------------------

    def hear(self, member_id: MemberId) -> None:
        """Restart the session of a member that has sent a request."""
        self.unheard.discard(member_id)
        deadline_ms = self.now_ms + self.settings.session_timeout_ms
        self.session_deadlines = self.session_deadlines.moved(member_id, deadline_ms)

    def arm_rebalance(self, before: StreamsMember | None, member: StreamsMember) -> None:
        """Start the member's rebalance timeout when the response lists what it must revoke."""
        if member.state is not MemberState.UNREVOKED:
            self.rebalance_deadlines.pop(member.member_id, None)
        elif before is None or before.pending_revocation != member.pending_revocation:
            self.rebalance_deadlines[member.member_id] = self.now_ms + member.rebalance_timeout_ms

    def begin_delay(self) -> None:
        """Give more members the time to join before any task is assigned."""
        if self.settings.initial_rebalance_delay_ms > 0:
            self.awaits_members = True
            self.delay_deadline_ms = self.now_ms + self.settings.initial_rebalance_delay_ms

    def end_delay(self) -> None:
        self.awaits_members, self.delay_deadline_ms = False, None


def _configured(topology: Topology, cluster: Cluster) -> Configured:
    """Return the topology compared with the topics. A topology that could run when it was sent is kept, even if its
    topics change."""
    try:
        return configure(topology, cluster)
    except InvalidTopologyError as invalid:
        return Configured(status=StatusCode.INCORRECTLY_PARTITIONED_TOPICS, detail=str(invalid))
