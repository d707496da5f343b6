"""One run: clients are created, then a phase with faults and disturbances ("foul weather"), then a calm phase in which
the group must settle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

from gateway.coordinator.classic import machine as classic
from gateway.coordinator.classic.model import Event, GroupState
from gateway.coordinator.facts import MemberId
from gateway.coordinator.handoff import Drained, HandoffMode, HandoffSettings
from gateway.coordinator.machine import Reply
from gateway.coordinator.requests import (
    DeleteGroup,
    HandoffProgress,
    JoinGroup,
    LeaveGroup,
    LeavingMember,
    OffsetCommit,
    TxnOffsetCommit,
)
from gateway.coordinator.settings import Settings

from .assignor import CONSUMER, PARTITIONS
from .clients import Character, Client, Phase
from .referee import FoulError
from .server import Server
from .world import CALM, Connection, Weather, World, member_id, request_id

FOUL_MS = 30_000
SETTLE_MS = 240_000
SETTLE_CHECK_MS = 1_000
MAX_CLIENTS = 6
COOPERATIVE = "cooperative-sticky"
COMPATIBLE = (("range",), ("range", "roundrobin"), ("roundrobin", "range"), ("sticky", "range"))


@dataclass(frozen=True)
class Outcome:
    seed: int
    foul: str | None
    told: list[str]
    seen: set[tuple[str, GroupState, GroupState]]


def run(seed: int, coordinator: ModuleType = classic) -> Outcome:
    """Run one seed. `coordinator` is the module under test, in place of `gateway.coordinator.classic.machine`."""
    play = Play(seed, coordinator)
    foul: str | None = None
    try:
        play.run()
    except Exception as error:
        foul = str(error) if isinstance(error, FoulError) else repr(error)
    return Outcome(seed, foul, play.world.told, play.server.referee.seen)


class Play:
    def __init__(self, seed: int, coordinator: ModuleType) -> None:
        self.world = world = World(seed)
        chance = world.random
        guarded = seed % 4 == 3
        """True if all clients follow KIP-429 but leaders do not: they assign partitions that other members claim. The
        guard must prevent harm.
        """
        handed = seed % 4 == 2
        """True if leaders do the same and the guard is off. A member that is assigned another member's partition must
        then wait.
        """
        self._handed = handed
        self._rude = guarded or handed
        modes = (HandoffMode.ACK, HandoffMode.DRAIN) if handed else tuple(HandoffMode)
        handoff = HandoffSettings(chance.choice(modes), chance.choice((6_000, 30_000)))
        self.settings = Settings(
            group_initial_rebalance_delay_ms=chance.choice((0, 0, 50, 3_000)),
            group_max_size=chance.choice((2**31 - 1,) * 6 + (3,)),
            new_member_join_timeout_ms=chance.choice((20_000, 300_000)),
            group_connection_grace_ms=chance.choice((-1, 0, 1_000, 10_000)),
            group_cooperative_guard=guarded,
            handoff=handoff,
        )
        self.server = world.server = Server(world, coordinator, self.settings)
        self.clients: list[Client] = []
        self._calm = False
        self._protocol_type = chance.choice((CONSUMER, CONSUMER, CONSUMER, "connect"))
        if self._rude:
            self._protocol_type = CONSUMER
            world.owns = self._check_sole_owner
        world.weather = chance.choice(
            (
                CALM,
                Weather(late=0.05, dawdle=0.05, late_tick=0.1),
                Weather(break_on_send=0.03, break_on_reply=0.03, late=0.02, half_open=0.3),
                Weather(0.02, 0.02, 0.03, 0.03, store_failure=0.1, late_tick=0.1, half_open=0.2),
            )
        )

    def run(self) -> None:
        world = self.world
        started_ms = world.now_ms
        for _ in range(world.random.randint(1, 4)):
            world.after(world.random.choice((0, 0, world.random.randint(0, 8_000))), self.add_client)
        self._disturb()
        world.run_until(started_ms + FOUL_MS)
        self._settle()

    # --- foul weather -------------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        """Perform a disturbance at random intervals while the weather is foul (faults happen)."""
        deeds: list[tuple[int, Callable[[], None]]] = [
            (4, self.add_client),
            (2, self._to_one(Client.leave)),
            (2, self._to_one(Client.die)),
            (3, self._to_one(Client.reconnect)),
            (3, self._to_one(Client.ask_twice)),
            (3, self._to_one(Client.change_topics)),
            (2, self._to_one(Client.join)),
            (2, self._to_one(Client.join_with_foreign_protocols)),
            (4, self._to_one(Client.commit)),
            (3, self._restart_static),
            # By then, a repeated request would misreport the partitions that its member claims.
            *(() if self._rude else ((4, self._repeat_something_old),)),
            (4, self._look_how_far_sources_are),
            (2, self._administer),
            (2, self.server.tick),
            (1, self.server.crash),
            (1, self.server.evict),
            # If the timers of a group are late, the gateway postpones the group's deadlines. So two deadlines are not
            # due at once.
            *(() if self._handed else ((2, self.server.oversleep),)),
        ]
        weights, acts = zip(*deeds, strict=True)

        def act() -> None:
            if not self._calm:
                self.world.random.choices(acts, weights)[0]()
                self.world.after(self.world.random.randint(1, 2_500), act)

        self.world.after(self.world.random.randint(1, 5_000), act)

    def _to_one(self, deed: Callable[[Client], None]) -> Callable[[], None]:
        def act() -> None:
            living = self.living()
            if living:
                client = self.world.random.choice(living)
                self.world.tell(f"{client.name}: {deed.__name__}")
                deed(client)

        return act

    def living(self) -> list[Client]:
        return [client for client in self.clients if client.alive]

    def add_client(self) -> None:
        if len(self.living()) < MAX_CLIENTS:
            number = len(self.clients)
            chance = self.world.random
            static = chance.random() < 0.3
            foreign = chance.random() < 0.03
            rude = self._rude
            self._start(
                f"c{number}",
                Character(
                    instance_id=f"i{number}" if static else None,
                    join_version=chance.choice((5, 8, 9)) if static else chance.choice((2, 4, 4, 9)),
                    protocol_type=self._protocol_type,
                    protocol_names=("foreign",) if foreign else (COOPERATIVE,) if rude else chance.choice(COMPATIBLE),
                    session_timeout_ms=chance.choice((6_000, 10_000)),
                    rebalance_timeout_ms=chance.choice((5_000, 15_000)),
                    cooperative=chance.random() < 0.3 and not rude,
                    claims=rude and not foreign,
                    claims_last_generation=rude and chance.random() < 0.5,
                ),
            )

    def _start(self, name: str, character: Character) -> None:
        self.world.tell(f"{name} starts: {character}")
        client = Client(self.world, name, character)
        self.clients.append(client)
        client.join()

    def _restart_static(self) -> None:
        """Replace a process by a new process with the same instance id. The new process may not know that the old one
        is dead.
        """
        static = [client for client in self.living() if client.character.instance_id is not None]
        if not static:
            return
        old = self.world.random.choice(static)
        if self.world.chance(0.7):
            old.die()
        versions = (5, 8, 9)
        self._start(
            f"{old.name}r{self.world.number()}",
            replace(old.character, join_version=self.world.random.choice(versions)),
        )

    def _repeat_something_old(self) -> None:
        """Repeat an earlier request on a connection that soon closes without reading the answer."""
        sent = [event for client in self.clients for event in client.sent]
        if not sent:
            return
        event = self.world.random.choice(sent)
        ghost = self._connection("ghost")
        fresh: dict[str, object] = {"request_id": request_id(self.world), "connection_id": ghost.connection_id}
        if isinstance(event, JoinGroup):
            fresh["new_member_id"] = member_id(self.world, "ghost")
        ghost.send(replace(event, **fresh))
        self.world.after(self.world.random.randint(1, 5_000), ghost.close)

    def _administer(self) -> None:
        admin = self._connection("admin")
        requested = request_id(self.world)
        instances = [client.character.instance_id for client in self.clients if client.character.instance_id]
        nobody = MemberId("")
        commit: Event = OffsetCommit(requested, admin.connection_id, 8, nobody, None, -1)
        if self.world.now_ms % 2:
            commit = TxnOffsetCommit(requested, admin.connection_id, nobody, None, -1)
        events: list[Event] = [DeleteGroup(requested), commit]
        if instances:
            leaving = tuple(LeavingMember(nobody, each) for each in (*instances[:2], "nobody's"))
            events.append(LeaveGroup(requested, admin.connection_id, leaving))
        admin.send(self.world.random.choice(events))
        self.world.after(1_000, admin.close)

    def _look_how_far_sources_are(self) -> None:
        """Report how far members have committed in partitions that are or were pending. The report may come late, or
        concern another source.
        """
        chance = self.world.random
        awaited = self.server.group.handoffs
        found = [
            Drained(each.topic, each.partition, each.source, chance.choice((None, 5, 9)), chance.choice((-1, 7, 9)))
            for each in awaited
        ]
        found += [Drained("t", chance.randrange(PARTITIONS), key, 1, 1) for key in self.server.group.members]
        passed = tuple((each.target, each.topic, each.partition) for each in awaited if each.target is not None)
        passed = passed if not self._rude and self.world.chance(0.2) else ()
        event = HandoffProgress(tuple(found), passed)
        self.world.after(chance.choice((0, 5, 3_000)), lambda: self.server.hear(event))

    def _connection(self, name: str) -> Connection:
        def ignore(connection: Connection, event: Event, reply: Reply) -> None:
            pass

        return Connection(self.world, name, ignore, lambda: None)

    def _check_sole_owner(self, client: Client) -> None:
        """Check that no partition has two readers. A client that has been removed but does not know that is not a
        member.
        """
        members = self.server.group.members
        if not self.server.up or client.member_id not in members:
            return
        for other in self.living():
            both = client.reading & other.reading
            both -= self.server.referee.excused
            if both and other is not client and other.member_id in members:
                raise FoulError(f"{sorted(both)} are read by {client.name} and {other.name}")

    # --- calm ---------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        world = self.world
        world.tell("--- the weather is calm")
        world.weather = CALM
        self._calm = True
        until_ms = world.now_ms + SETTLE_MS
        while world.now_ms < until_ms:
            world.run_until(world.now_ms + SETTLE_CHECK_MS)
            if not self._unsettled():
                break
        unsettled = self._unsettled()
        self.server.referee.require(not unsettled, f"never settled: {unsettled}")
        if self.server.group.members:
            self.server.referee.check_ownership(self.server.group)

    def _unsettled(self) -> str:
        """Return why the group has not settled. The result is empty once every live client is a Stable member and no
        other member exists.
        """
        group, living = self.server.group, self.living()
        if not self.server.up:
            return "the node is down"
        if {client.member_id for client in living} != set(group.members):
            return f"live: {[client.member_id for client in living]}, members: {list(group.members)}"
        if not living:
            return "" if group.state is GroupState.EMPTY else f"an abandoned group is {group.state}"
        if group.state is not GroupState.STABLE or group.pending_sync:
            return f"{group.state}, awaiting {set(group.pending_sync)}"
        if any(each.is_pending for each in group.handoffs):
            return f"awaited: {group.handoffs}"
        if group.watch.follow_up_ms is not None:
            return "partitions are withheld"
        behind = [
            client.name
            for client in living
            if client.phase is not Phase.STABLE or client.generation_id != group.generation_id
        ]
        return f"behind: {behind}" if behind else ""
