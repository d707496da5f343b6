"""A simulated consumer of the classic protocol. Like stock clients it has one request at a time, and it assigns
partitions if the coordinator makes it the leader. The client reads exactly what it owns. An eager client releases all
its partitions before it joins. A cooperative client keeps and claims its partitions, releases those that its assignment
leaves out, and then joins once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from gateway.coordinator.consumer.partitions import NOTHING, Partitions, contains, intersection, partitions_of
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId, RequestId
from gateway.coordinator.requests import (
    Heartbeat,
    JoinedMember,
    JoinGroup,
    JoinReply,
    LeaveGroup,
    LeavingMember,
    SyncGroup,
    SyncReply,
)
from protocol.consumer import (
    Assignment,
    Subscription,
    TopicPartition,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from protocol.errors import ErrorCode

from .node import NAMES, World, require

if TYPE_CHECKING:
    from .mixed import MixedServer

NO_ID = MemberId("")
HEARTBEAT_MS = 1_500
PATIENCE_MS = 3_000
FATAL = frozenset(
    {
        ErrorCode.FENCED_INSTANCE_ID,
        ErrorCode.GROUP_MAX_SIZE_REACHED,
    }
)
LOST = frozenset({ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION})


class ClassicClient:
    def __init__(self, world: World, name: str, instance_id: str | None, protocols: tuple[str, ...]) -> None:
        self.world = world
        self.name = name
        self.instance_id = instance_id
        self.protocols = protocols
        self.cooperative = all("cooperative" in protocol for protocol in protocols)
        self.version = world.random.choice((3, 5, 9))
        self.claims_last_generation = world.chance(0.5)
        """True if a rejoin claims the generation that the member joined last (Java). False if it claims the generation
        that assigned its partitions (librdkafka).
        """
        self.member_id = NO_ID
        self.generation_id = -1
        self.alive = True
        self.is_member = False
        self.owned: Partitions = NOTHING
        self.connection_number = world.number()
        self.join_patience_ms = world.random.choice((4_000, 25_000))
        self.stubborn = instance_id is None and world.chance(0.1)
        """True if the member ignores rebalances until it is removed, because its application is stuck. No static member
        is stubborn, because the group would wait for it as long as it sends heartbeats.
        """
        self.session_ms = world.random.choice((6_000, 10_000))
        self.rebalance_ms = world.random.choice((8_000, 20_000))
        self.names: tuple[str, ...] = ()
        self.reading = False
        self._owned_generation_id = -1
        self._protocol_name: str | None = None
        """The group's protocol, as the last answer to a join names it."""
        self._outstanding: int | None = None
        self._planned = 0
        self.announced: tuple[str, ...] = ()
        self._watched: dict[str, int | None] | None = None
        """Partition counts of the group's topics when this client last was the leader. None for a follower, which does
        not watch topics.
        """
        self._topics_then = world.cluster.topics
        """Topics at the time of the last answer. The names in the assignment refer to them."""
        self.choose_topics()

    @property
    def _counts(self) -> dict[str, int]:
        """Partition counts of all topics, as the node shows them."""
        return {name: topic.partition_count for name, topic in self._server.read_topics.topics.items()}

    @property
    def _server(self) -> MixedServer:
        """Return the server that answers classic members."""
        return cast("MixedServer", self.world.server)

    def choose_topics(self) -> None:
        """Choose other topics. The client's next request informs the coordinator."""
        self.names = tuple(self.world.random.sample(NAMES, self.world.random.randint(1, 3)))

    def start(self) -> None:
        self.world.tell(f"{self.name} starts, {self.protocols}, instance {self.instance_id}")
        self.join()

    def die(self) -> None:
        self.alive = False
        self.owned = NOTHING
        self.is_member = False

    def leave(self) -> None:
        if self.instance_id is None and self.member_id:
            leaving = (LeavingMember(self.member_id, None),)
            self._transmit(LeaveGroup(*self._ids(), leaving), lambda reply: None)
        self.die()

    def disconnect(self) -> None:
        """Close the connection. Its pending requests receive no answer."""
        self._server.disconnected(self)
        self.connection_number = self.world.number()
        if self._outstanding is not None:
            self._outstanding = None
            if self.alive:
                self._plan(self.world.random.randint(10, 500), self._go_on)

    def beat(self) -> None:
        if self.alive and self._outstanding is None and self.reading:
            self._heartbeat()

    def rejoin(self) -> None:
        if self.alive and self._outstanding is None and self.reading:
            self.join()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _ids(self) -> tuple[RequestId, ConnectionId]:
        return RequestId(self.world.number()), ConnectionId(str(self.connection_number))

    def join(self) -> None:
        self.reading = False
        if not self.cooperative:
            self.owned = NOTHING
        self.announced = self.names
        request_id, connection_id = self._ids()
        event = JoinGroup(
            request_id,
            connection_id,
            self.version,
            self.name,
            "/127.0.0.1",
            self.member_id,
            self.instance_id,
            "consumer",
            tuple((protocol, self._metadata()) for protocol in self.protocols),
            self.session_ms,
            self.rebalance_ms,
            MemberId(f"{self.name}-{self.world.number()}"),
            None,
            self.connection_number,
        )
        self._ask(event, self._joined, self.join_patience_ms)

    def _metadata(self) -> bytes:
        claimed: list[TopicPartition] = []
        for topic_id, indexes in self.owned.items():
            # The client knows topics by name. It does not know yet that a topic was deleted or recreated.
            claimed.append(TopicPartition(self.world.name_of[topic_id], tuple(sorted(indexes))))
        generation_id = self.generation_id if self.claims_last_generation else self._owned_generation_id
        return encode_subscription(Subscription(3, self.names, None, tuple(claimed), generation_id))

    def _sync(self, assignments: dict[MemberId, bytes]) -> None:
        given = tuple(assignments.items())
        name = self._protocol_name
        event = SyncGroup(*self._ids(), self.member_id, self.instance_id, self.generation_id, "consumer", name, given)
        self._ask(event, self._synced, self.join_patience_ms)

    def _heartbeat(self) -> None:
        event = Heartbeat(*self._ids(), self.member_id, self.instance_id, self.generation_id)
        self._ask(event, self._beaten, PATIENCE_MS)

    def _ask(self, event: Any, answered: Callable[[Any], None], patience_ms: int) -> None:
        if not self.alive:
            return
        number = self._outstanding = self.world.number()
        self._planned += 1

        def answer(reply: Any) -> None:
            if self.alive and self._outstanding == number:
                self._outstanding = None
                answered(reply)

        def give_up() -> None:
            if self.alive and self._outstanding == number:
                self.disconnect()

        self._transmit(event, answer)
        self.world.after(patience_ms, give_up)

    def _transmit(self, event: Any, answered: Callable[[Any], None]) -> None:
        world = self.world
        if world.chance(world.weather.lost_request):
            world.stuck.append(event)
            return
        delay_ms = world.random.randint(0, 5)
        if world.chance(world.weather.late):
            delay_ms += world.random.randint(0, 20_000)

        def reply(answer: Any) -> None:
            topics = world.cluster.topics

            def arrive() -> None:
                self._topics_then = topics
                answered(answer)

            if not world.chance(world.weather.lost_reply):
                world.after(world.random.randint(0, 5), arrive)

        world.after(delay_ms, lambda: self._server.receive(event, reply))

    def _plan(self, delay_ms: int, act: Callable[[], None]) -> None:
        self._planned += 1
        number = self._planned

        def go() -> None:
            if self.alive and self._planned == number and self._outstanding is None:
                act()

        self.world.after(delay_ms, go)

    def _go_on(self) -> None:
        if self.reading:
            self._heartbeat()
        else:
            self.join()

    # --- answers ------------------------------------------------------------------------------------------------------

    def _joined(self, reply: JoinReply) -> None:
        if reply.error is ErrorCode.MEMBER_ID_REQUIRED:
            self.member_id = reply.member_id
            self.join()
        elif reply.error is not ErrorCode.NONE:
            self._start_over(reply.error)
        else:
            self.member_id, self.generation_id = reply.member_id, reply.generation_id
            self.is_member = True
            self._protocol_name = reply.protocol_name
            self._watched = self._look(reply.members) if reply.members else None
            assignments = self._assign(reply.members) if reply.members and not reply.skip_assignment else {}
            pause_ms = self.world.random.randint(0, 20)
            self._plan(pause_ms, lambda: self._sync(assignments))

    def _look(self, members: tuple[JoinedMember, ...]) -> dict[str, int | None]:
        names = {name for member in members for name in decode_subscription(member.metadata).topics}
        counts = self._counts
        return {name: counts.get(name) for name in sorted(names)}

    def _sees_news(self) -> bool:
        counts, watched = self._counts, self._watched
        return watched is not None and any(counts.get(name) != count for name, count in watched.items())

    def _assign(self, members: tuple[JoinedMember, ...]) -> dict[MemberId, bytes]:
        """Assign round robin; a cooperative leader assigns nothing that another member claims (KIP-429)."""
        read = {member.member_id: decode_subscription(member.metadata) for member in members}
        holder: dict[tuple[str, int], tuple[int, MemberId]] = {}
        if "cooperative" in (self._protocol_name or ""):
            for member_id, subscription in read.items():
                for topic, indexes in subscription.owned_partitions:
                    for index in indexes:
                        claim = (subscription.generation_id, member_id)
                        holder[topic, index] = max(holder.get((topic, index), (-2, NO_ID)), claim)
        shares: dict[MemberId, dict[str, list[int]]] = {member_id: {} for member_id in read}
        turn = 0
        for name, count in self._counts.items():
            readers = sorted(member_id for member_id, each in read.items() if name in each.topics)
            for index in range(count if readers else 0):
                member_id = readers[turn % len(readers)]
                turn += 1
                if holder.get((name, index), (0, member_id))[1] == member_id:
                    shares[member_id].setdefault(name, []).append(index)
        return {
            member_id: encode_assignment(
                Assignment(3, tuple(TopicPartition(topic, tuple(indexes)) for topic, indexes in share.items()))
            )
            for member_id, share in shares.items()
        }

    def _synced(self, reply: SyncReply) -> None:
        if reply.error is not ErrorCode.NONE:
            self._start_over(reply.error)
            return
        require(reply.protocol_name == self._protocol_name, "{} synced by {}", self.name, reply.protocol_name)
        topics = self._topics_then
        given = decode_assignment(reply.assignment).assigned_partitions if reply.assignment else ()
        assigned = partitions_of((topics[name].topic_id, indexes) for name, indexes in given if name in topics)
        revokes = self.cooperative and not contains(assigned, self.owned)
        if revokes and self.world.chance(0.3):
            # The rebalance callback takes some time.
            kept = intersection(self.owned, assigned)
            self._plan(self.world.random.randint(0, 3_000), lambda: self._settle(assigned, kept))
        else:
            self._settle(assigned, intersection(self.owned, assigned) if revokes else None)

    def _settle(self, assigned: Partitions, kept: Partitions | None) -> None:
        self.owned = assigned
        self._owned_generation_id = self.generation_id
        self._server.check_clients()
        self.reading = True
        if kept is not None:
            self.join()
        else:
            self._plan(HEARTBEAT_MS, self._heartbeat)

    def _beaten(self, reply: Any) -> None:
        told = reply.error is ErrorCode.REBALANCE_IN_PROGRESS
        if reply.error is ErrorCode.NONE and (self.names != self.announced or self._sees_news()):
            self.join()
        elif reply.error is ErrorCode.NONE or (told and self.stubborn):
            self._plan(HEARTBEAT_MS, self._heartbeat)
        elif told:
            # The client polls later, and reads until then.
            self._plan(self.world.random.choice((0, 50, 2_000)), self.join)
        else:
            self._start_over(reply.error)

    def _start_over(self, error: ErrorCode) -> None:
        # All members of a run can speak one protocol.
        require(error is not ErrorCode.INCONSISTENT_GROUP_PROTOCOL, "{} was refused by its protocol", self.name)
        if error in FATAL:
            self.world.tell(f"{self.name} gives up: {error.name}")
            self.die()
            return
        if error in LOST:
            self.owned = NOTHING
            self.generation_id = self._owned_generation_id = -1
            self.reading = False
            self.is_member = self.stubborn = False
            if error is ErrorCode.UNKNOWN_MEMBER_ID:
                self.member_id = NO_ID
        self._plan(self.world.random.randint(10, 300), self._go_on)
