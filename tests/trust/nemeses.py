"""Faults that a run injects. Each function causes a failure, and repairs it before it returns.

The one idea: a nemesis (a fault) is a function of the world, which is the cluster under attack, and of a random
generator. `NEMESES` names all of them. A seed chooses the faults, their order and their lengths.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Mapping

from tests.objects.s3_server import Fault
from tests.trust.links import Direction
from tests.trust.powercut import Syncing, compiler
from tests.trust.world import CLOCK_LIBRARY, LOCKED_TABLES, NODE_TTL_MS, Store, World

Nemesis = Callable[[World, random.Random], str]
"""Causes a fault and repairs it. Returns a description of it."""

TTL_S = NODE_TTL_MS / 1_000


def kill_a_node(world: World, chance: random.Random) -> str:
    node = chance.choice(world.nodes)
    away_s = _length(chance, 0.0, 2 * TTL_S)
    node.process.kill()
    _wait(away_s)
    node.process.start()
    return f"{node.name} killed by SIGKILL, away for {away_s:.1f} s"


def kill_all_nodes(world: World, chance: random.Random) -> str:
    for node in world.nodes:
        node.process.kill()
    for node in chance.sample(world.nodes, len(world.nodes)):
        node.process.start()
    return "all nodes killed at once by SIGKILL, and started again"


def stop_a_node(world: World, chance: random.Random) -> str:
    node = chance.choice(world.nodes)
    away_s = _length(chance, 0.0, TTL_S)
    node.process.stop()
    _wait(away_s)
    node.process.start()
    return f"{node.name} stopped by SIGTERM, away for {away_s:.1f} s"


def restart_all_nodes_in_turn(world: World, _: random.Random) -> str:
    for node in world.nodes:
        node.process.stop()
        node.process.start()
    return "all nodes restarted one after the other, as in an upgrade"


def leave_one_node(world: World, chance: random.Random) -> str:
    stopped = chance.sample(world.nodes, len(world.nodes) - 1)
    alone_s = _length(chance, 1.0, 2 * TTL_S)
    for node in stopped:
        node.process.stop()
    _wait(alone_s)
    for node in stopped:
        node.process.start()
    return f"one node alone for {alone_s:.1f} s, then {len(world.nodes)} again"


def freeze_a_node(world: World, chance: random.Random) -> str:
    node = chance.choice(world.nodes)
    asleep_s = _length(chance, 0.5, 3 * TTL_S)
    node.sleep()
    try:
        _wait(asleep_s)
    finally:
        node.wake()
    return f"{node.name} frozen by SIGSTOP for {asleep_s:.1f} s"


def kill_postgres(world: World, _: random.Random) -> str:
    world.kill_postgres()
    return "Postgres killed by SIGKILL"


def freeze_postgres(world: World, chance: random.Random) -> str:
    asleep_s = _length(chance, 0.5, TTL_S)
    with world.sleeping_postgres():
        _wait(asleep_s)
    return f"Postgres frozen by SIGSTOP for {asleep_s:.1f} s"


def cut_clients_off(world: World, chance: random.Random) -> str:
    node = chance.choice(world.nodes)
    directions = chance.choice([(Direction.REQUESTS,), (Direction.ANSWERS,), tuple(Direction)])
    cut_s = _length(chance, 0.5, 2 * TTL_S)
    node.link.cut(*directions)
    _wait(cut_s)
    node.link.heal()
    return f"{' and '.join(each.value for each in directions)} of {node.name} lost for {cut_s:.1f} s"


def delay_clients(world: World, chance: random.Random) -> str:
    node, delay_s, length_s = chance.choice(world.nodes), chance.uniform(0.01, 0.5), _length(chance, 1.0, TTL_S)
    node.link.delay(delay_s)
    _wait(length_s)
    node.link.heal()
    return f"clients of {node.name} {delay_s * 1000:.0f} ms late for {length_s:.1f} s"


def reset_clients(world: World, chance: random.Random) -> str:
    times = chance.randint(1, 5)
    for _ in range(times):
        for node in world.nodes:
            node.link.reset()
        _wait(chance.uniform(0.05, 0.5))
    return f"all connections of clients broken {times} times"


def cut_a_node_off_postgres(world: World, chance: random.Random) -> str:
    node = chance.choice(world.nodes)
    cut_s = _length(chance, 0.5, 2 * TTL_S)
    node.postgres.drop()
    _wait(cut_s)
    node.postgres.heal()
    return f"{node.name} cut off from Postgres for {cut_s:.1f} s, without a word"


def delay_postgres(world: World, chance: random.Random) -> str:
    node, delay_s, length_s = chance.choice(world.nodes), chance.uniform(0.005, 0.1), _length(chance, 1.0, TTL_S)
    node.postgres.delay(delay_s)
    _wait(length_s)
    node.postgres.heal()
    return f"Postgres {delay_s * 1000:.0f} ms late for {node.name}, for {length_s:.1f} s"


def break_postgres_connections(world: World, chance: random.Random) -> str:
    node = chance.choice(world.nodes)
    half = chance.random() < 0.5
    node.postgres.half_close() if half else node.postgres.reset()
    _wait(0.2)
    node.postgres.heal()
    return f"connections of {node.name} to Postgres {'half closed' if half else 'reset'}"


HELD_S = 5.0
"""How long a fault waits for a statement that it could delay."""


def deliver_statements_late(world: World, chance: random.Random) -> str:
    """Deliver statements of lost connections to Postgres after the nodes have repeated them. Do so several times,
    because a late statement does harm only if its repeat does not exclude it.
    """
    node, times = chance.choice(world.nodes), chance.randint(1, 4)
    delays_s = [_length(chance, 1.0, TTL_S) for _ in range(times)]
    for late_s in delays_s:
        node.postgres.hold_open_connections()
        # Let statements gather, but not so long that the node loses its leases, because the leases fence them.
        _wait(chance.uniform(0.1, 0.8))
        # A node that has just lost its connections in another way has no statement to lose.
        asyncio.run(node.postgres.lose_held_statement(HELD_S))
        _wait(late_s)
        node.postgres.heal()
    return (
        f"{node.name} lost its connections to Postgres, which read their last statements "
        + ", ".join(f"{late_s:.1f} s" for late_s in delays_s)
        + " later"
    )


def hold_row_locks(world: World, chance: random.Random) -> str:
    table, held_s = chance.choice(LOCKED_TABLES), _length(chance, 0.5, 2 * TTL_S)
    node = chance.choice(world.nodes) if chance.random() < 0.5 else None
    with world.locked_rows(table):
        _wait(held_s / 2)
        if node is not None:
            node.postgres.reset()
        _wait(held_s / 2)
    lost = "" if node is None else f", while connections of {node.name} to Postgres were reset"
    return f"all rows of {table} locked for {held_s:.1f} s{lost}"


def hold_a_snapshot(world: World, _: random.Random) -> str:
    """Hold a snapshot, as pg_dump does, until this fault is injected again. Vacuum removes no row in that time."""
    released = world.hold_snapshot()
    return "a snapshot is held from now on" + (", and the one before it released" if released else "")


def fail_over(world: World, _: random.Random) -> str:
    world.fail_over()
    return "Postgres frozen for good, its standby promoted and a new one made"


def freeze_the_standby(world: World, chance: random.Random) -> str:
    asleep_s = _length(chance, 0.5, 3 * TTL_S)
    with world.sleeping_standby():
        _wait(asleep_s)
    return f"standby frozen by SIGSTOP for {asleep_s:.1f} s"


def lose_notifications(world: World, chance: random.Random) -> str:
    node, length_s = chance.choice(world.nodes), _length(chance, 1.0, 2 * TTL_S)
    node.postgres.silence()
    _wait(length_s)
    node.postgres.heal()
    return f"{node.name} hears no notification for {length_s:.1f} s"


def cut_power(world: World, chance: random.Random) -> str:
    lost = world.cut_power(None if chance.random() < 0.5 else chance)
    for node in chance.sample(world.nodes, len(world.nodes)):
        node.process.start()
    return f"power cut for all nodes and Postgres, which lost {lost}"


def slow_the_disk(world: World, chance: random.Random) -> str:
    """Let each sync of Postgres, or of segments, take long. In most cases, also cut the power in the middle. If both
    kinds of syncs were slow, a node that does not wait for its own syncs would still wait for those of Postgres.
    """
    assert world.disk is not None
    which, sync_s = chance.choice(list(Syncing)), chance.uniform(0.05, 0.5)
    slow_s = _length(chance, 2.0, 3 * TTL_S)
    world.disk.slow_down(which, sync_s)
    _wait(slow_s)
    cut = f", then {cut_power(world, chance)}" if chance.random() < 0.7 else ""
    world.disk.speed_up()
    return f"each sync of {which.value} took {sync_s * 1000:.0f} ms for {slow_s:.1f} s{cut}"


def move_a_clock(world: World, chance: random.Random) -> str:
    node, times = chance.choice(world.nodes), chance.randint(1, 4)
    offsets = [chance.choice((-1, 1)) * chance.choice((2, 20, 90, 2_700)) for _ in range(times)]
    for offset in offsets:
        node.move_clock(offset)
        _wait(_length(chance, 0.5, TTL_S))
    node.move_clock(0)
    return f"clock of {node.name} wrong by {', '.join(f'{offset:+d} s' for offset in offsets)} in turn"


def fill_the_disk(world: World, chance: random.Random) -> str:
    """Fill the disk of the segments to its last page. Postgres is on another disk."""
    assert world.small_disk is not None
    full_s = _length(chance, 0.5, 3 * TTL_S)
    world.small_disk.fill()
    _wait(full_s)
    world.small_disk.empty()
    return f"disk of the segments full for {full_s:.1f} s"


def disturb_the_bucket(world: World, chance: random.Random) -> str:
    assert world.bucket is not None
    fault = chance.choice([each for each in Fault if each is not Fault.NONE])
    away_s = _length(chance, 0.5, 4 * TTL_S)
    world.bucket.road.set(fault)
    _wait(away_s)
    world.bucket.heal()
    return f"the way to the bucket {fault.value} for {away_s:.1f} s"


def cut_the_bucket(world: World, chance: random.Random) -> str:
    """Break connections to the bucket, most of them in the middle of an upload or a read."""
    assert world.bucket is not None
    times = chance.randint(2, 20)
    for _ in range(times):
        world.bucket.heal()
        _wait(chance.uniform(0.05, 0.5))
    return f"all connections to the bucket broken {times} times"


def kill_the_bucket(world: World, _: random.Random) -> str:
    assert world.bucket is not None
    world.bucket.kill()
    return "S3 server killed by SIGKILL, and started again"


def limit_clients(world: World, chance: random.Random) -> str:
    """Set a quota that no client can keep. Nodes mute the connections above it, so members miss their heartbeats."""
    bytes_per_s, limited_s = chance.choice((1, 1_000, 50_000)), _length(chance, 1.0, 3 * TTL_S)
    world.limit_clients(bytes_per_s)
    _wait(limited_s)
    world.limit_clients(None)
    return f"clients limited to {bytes_per_s} B/s for {limited_s:.1f} s"


SUDDEN: tuple[Nemesis, ...] = (
    kill_a_node,
    kill_all_nodes,
    stop_a_node,
    restart_all_nodes_in_turn,
    freeze_a_node,
    kill_postgres,
    freeze_postgres,
    cut_clients_off,
    reset_clients,
    cut_a_node_off_postgres,
    break_postgres_connections,
    hold_row_locks,
)
"""Faults that every run can have, and that `two_at_once` injects into a cluster with a node that is late already."""


def two_at_once(world: World, chance: random.Random) -> str:
    """Inject a second fault while one node receives notifications, statements or requests late or not at all.

    If the second fault repairs a connection of the same node, it ends the first fault early.
    """
    node, delay_s = chance.choice(world.nodes), chance.uniform(0.02, 0.5)
    first: list[tuple[str, Callable[[], None]]] = [
        ("hears no notification", node.postgres.silence),
        (f"has Postgres {delay_s * 1000:.0f} ms late", lambda: node.postgres.delay(delay_s)),
        (f"has its clients {delay_s * 1000:.0f} ms late", lambda: node.link.delay(delay_s)),
    ]
    description, begin = chance.choice(first)
    begin()
    _wait(_length(chance, 0.0, TTL_S))
    second = chance.choice(SUDDEN)(world, chance)
    node.postgres.heal()
    node.link.heal()
    return f"{second}, while {node.name} {description}"


NEMESES: Mapping[str, Nemesis] = {
    nemesis.__name__: nemesis
    for nemesis in (
        kill_a_node,
        kill_all_nodes,
        stop_a_node,
        restart_all_nodes_in_turn,
        leave_one_node,
        freeze_a_node,
        kill_postgres,
        freeze_postgres,
        cut_clients_off,
        delay_clients,
        reset_clients,
        cut_a_node_off_postgres,
        delay_postgres,
        break_postgres_connections,
        deliver_statements_late,
        hold_row_locks,
        hold_a_snapshot,
        fail_over,
        freeze_the_standby,
        lose_notifications,
        cut_power,
        slow_the_disk,
        move_a_clock,
        fill_the_disk,
        disturb_the_bucket,
        cut_the_bucket,
        kill_the_bucket,
        limit_clients,
        two_at_once,
    )
}


def missing(*, standby: bool, store: Store) -> Mapping[str, str]:
    """Return the faults that are impossible in this run, each with the reason. The machine, the store and the lack of a
    standby decide.
    """
    found: dict[str, str] = {}
    if not standby:
        found |= {each.__name__: "this run has no standby" for each in (fail_over, freeze_the_standby)}
    else:
        found |= {each.__name__: "this run has a standby" for each in (cut_power, slow_the_disk)}
    if store is not Store.BUCKET:
        found |= {
            each.__name__: "records are not in a bucket"
            for each in (disturb_the_bucket, cut_the_bucket, kill_the_bucket)
        }
    if store is Store.SMALL_DISK:
        found |= {each.__name__: "files of this run are on two disks" for each in (cut_power, slow_the_disk)}
    else:
        found[fill_the_disk.__name__] = "this run has no small disk"
    if compiler() is None:
        found |= {each.__name__: "no C compiler is installed" for each in (cut_power, slow_the_disk)}
    if CLOCK_LIBRARY is None:
        found[move_a_clock.__name__] = "libfaketime is not installed"
    return found


def _length(chance: random.Random, least_s: float, most_s: float) -> float:
    """Draw the length of a fault. Short faults are likelier, because they expose more races."""
    return least_s + (most_s - least_s) * chance.random() ** 2


def _wait(seconds: float) -> None:
    """Sleep for the length of a fault. This is not a wait for an event."""
    threading.Event().wait(seconds)
