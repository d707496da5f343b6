"""One run: start the world, the workloads and the faults of a seed; then let everything settle, and judge.

The order at the end matters. Faults end, then the world heals, then workloads finish (each must), then the log is read
whole from every partition, then all nodes describe the cluster, restart, and describe it again.
"""

# The type stubs of these clients declare only a part of their API.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import confluent_kafka
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from protocol.errors import ProtocolError
from tests.gateway_process import ROOT
from tests.objects.s3_server import missing as no_server
from tests.trust import checks
from tests.trust.assigned import AssignedTransfers
from tests.trust.checks import Entry, Part, Place
from tests.trust.direct import read_node
from tests.trust.door import SqlDoor
from tests.trust.franz import FranzGo
from tests.trust.franz import missing as franz_go_missing
from tests.trust.history import (
    Change,
    Consumed,
    Delivered,
    Faulted,
    History,
    Observed,
    OffsetCommitted,
    Outcome,
    OwnerChanged,
    Produced,
    Quantity,
    Settled,
    Transferred,
    number_in,
)
from tests.trust.java import Java
from tests.trust.java import missing as java_missing
from tests.trust.members import AIOKAFKA, ALL_KINDS, FRANZ_GO, JAVA, LIBRDKAFKA, SIMPLE
from tests.trust.nemeses import NEMESES, missing
from tests.trust.patience import CALL_S, PATIENT, ClientError, WorkloadError
from tests.trust.share import DELIVERY_LIMIT, ShareGroup
from tests.trust.workloads import (
    Clients,
    Group,
    Observer,
    Producing,
    TopicChurn,
    Transfers,
    Workload,
    asking,
    committed,
    create_topics,
    insist,
)
from tests.trust.world import Store, World, world

READ_S = 120.0
NODES = 3
OFTEN = 50
"""Number of assigned partitions after which some member of a kind must have consumed a record."""

PLAIN, IDEMPOTENT, KEYED, SOURCE, TARGET, DOOR = "plain", "idempotent", "keyed", "source", "target", "door"
ASSIGNED = "assigned"
"""The topic for the results of workers that assign themselves their partitions."""
TOPICS: Mapping[str, int] = {PLAIN: 3, IDEMPOTENT: 6, KEYED: 2, SOURCE: 4, TARGET: 4, ASSIGNED: 2, DOOR: 3}
CONFIGS: Mapping[str, Mapping[str, str]] = {
    KEYED: {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", "segment.ms": "1000"}
}
GROUPS = ("eager", "cooperative", "static", "consumer")

EVERY_NODE_ANSWERS = "every node starts again and answers"
EVERY_WORKLOAD_FINISHES = "every workload finishes"
NO_CLIENT_FAILS = "no client meets an error that no fault explains"

_Violations = dict[str, list[str]]


@dataclass(frozen=True)
class Verdict:
    """The findings of a run. `violations` holds sentences by the check's name, and an empty list for a promise that was
    kept.
    """

    seed: int
    seconds: float
    violations: Mapping[str, Sequence[str]]
    counts: Mapping[str, int]
    history: History = field(repr=False)
    logs: Mapping[str, str] = field(repr=False)

    @property
    def only_unfinished(self) -> bool:
        """True if the only violation is that a workload did not finish, as happens on an overloaded machine. If a node
        does not start again, this is a violation of its own, because the node may have lost data.
        """
        broken = [name for name, found in self.violations.items() if found]
        return broken == [EVERY_WORKLOAD_FINISHES]

    @property
    def passed(self) -> bool:
        return not any(self.violations.values())

    @property
    def faults(self) -> int:
        """Return the number of faults."""
        return len(self.history.of(Faulted))

    @property
    def operations(self) -> int:
        """Return the number of events that are not faults."""
        return sum(1 for _ in self.history) - self.faults


@dataclass(frozen=True)
class _Work:
    producers: Sequence[Producing]
    groups: Sequence[Group]
    transfers: Transfers
    assigned: AssignedTransfers | None
    """None if aiokafka is not used."""
    churn: TopicChurn
    door: SqlDoor
    share: ShareGroup | None
    """None if Java is not used."""
    observer: Observer

    def all(self) -> list[Workload]:
        some = [each for each in (self.assigned, self.share) if each is not None]
        return [*self.producers, self.transfers, self.churn, self.door, *self.groups, *some, self.observer]


def run(
    seed: int,
    seconds: float,
    *,
    root: Path = ROOT,
    faults: Collection[str] = NEMESES,
    read_s: float = READ_S,
    store: Store | None = None,
    standby: bool | None = None,
    postgres: Mapping[str, str] | None = None,
    kinds: Sequence[str] | None = None,
    say: Callable[[str], None] = print,
) -> Verdict:
    """Attack a cluster for `seconds` and judge it.

    `root`: sources of the nodes. `faults`: names in NEMESES from which the seed chooses. `read_s`: how long groups may
    go on without progress after the faults. `store`: where records are; None leaves it to the seed, which gives one run
    of four a synchronous standby unless `standby` decides. `postgres`: settings of the server. `kinds`: clients, in the
    words of ALL_KINDS; None leaves them to the seed. `say` receives a line for each fault.
    """
    chance = random.Random(seed)
    history = History()
    began_s = time.monotonic()
    by_seed = _store(seed, chance)
    store = by_seed if store is None else store
    by_seed = random.Random(f"standby {seed}").random() < 0.25
    standby = by_seed if standby is None else standby
    say(f"Records are in {store.value}. Postgres has {'a synchronous' if standby else 'no'} standby.")
    left_out = missing(standby=standby, store=store)
    for name, reason in left_out.items():
        say(f"{name} is left out: {reason}.")
    names = sorted(set(faults) - left_out.keys())
    kinds = _kinds(seed) if kinds is None else kinds
    say(f"Clients are {', '.join(kinds)}.")
    for client in ("kafka", "aiokafka"):
        # These clients log each lost connection, several times a second while a node is down.
        logging.getLogger(client).setLevel(logging.CRITICAL)
    with (
        world(NODES, root, store=store, standby=standby, postgres=postgres) as attacked,
        contextlib.ExitStack() as stack,
    ):
        create_topics(attacked.bootstrap, TOPICS, CONFIGS)
        java = stack.enter_context(contextlib.closing(Java(attacked.bootstrap))) if JAVA in kinds else None
        go = stack.enter_context(contextlib.closing(FranzGo(attacked.bootstrap))) if FRANZ_GO in kinds else None
        work = _work(history, Clients(attacked.bootstrap, kinds, java, go), lambda: attacked.database_url, chance)
        for workload in work.all():
            workload.start()
        violations: _Violations = {EVERY_NODE_ANSWERS: []}
        states: dict[str, str] = {}
        try:
            _attack(attacked, history, chance, names, time.monotonic() + seconds, say)
            attacked.heal()
            say("All faults have ended; workloads finish.")
            violations |= _finish(attacked, work, history, read_s, states)
            say("Reading the log, and judging.")
            violations |= _judge(attacked, history, work, read_s)
        except (WorkloadError, AssertionError, confluent_kafka.KafkaException) as error:
            violations[EVERY_NODE_ANSWERS].append(str(error))
            for workload in work.all():
                workload.stop()
        logs = {**attacked.logs(), **states}
    counts = (
        {
            "records acknowledged": sum(1 for each in history.of(Produced) if each.outcome is Outcome.OK),
            "records consumed": len(history.of(Consumed)),
            "commits acknowledged": sum(1 for each in history.of(OffsetCommitted) if each.outcome is Outcome.OK),
            "partitions assigned": len(history.of(OwnerChanged)),
            "observations": len(history.of(Observed)),
            "faults": len(history.of(Faulted)),
            "topics created and deleted": work.churn.rounds,
            "SQL transactions acknowledged": work.door.committed,
            "deliveries of the share group": len(history.of(Delivered)),
            "records transferred by Java": work.transfers.transferred[JAVA],
            "records transferred by franz-go": work.transfers.transferred[FRANZ_GO],
            "records transferred by aiokafka": 0 if work.assigned is None else work.assigned.transferred,
        }
        | {
            f"records acknowledged by {kind}": sum(
                1 for each in history.of(Produced) if each.outcome is Outcome.OK and f"-{kind}-" in each.client
            )
            for kind in kinds
        }
        | {
            f"records consumed by {kind}": sum(1 for each in history.of(Consumed) if each.member.endswith(f"-{kind}"))
            for kind in kinds
        }
    )
    return Verdict(seed, time.monotonic() - began_s, violations, counts, history, logs)


def _store(seed: int, chance: random.Random) -> Store:
    """Return the place of records that the seed chooses. Mostly this is Postgres or a directory; else it is a bucket or
    a small disk, if this machine can have one.
    """
    drawn = random.Random(f"store {seed}").random()
    chosen = Store.SEGMENTS if chance.random() < 0.5 else Store.POSTGRES
    if drawn < 0.25 and no_server() is None:
        return Store.BUCKET
    return Store.SMALL_DISK if 0.25 <= drawn < 0.4 and os.geteuid() == 0 else chosen


def _kinds(seed: int) -> Sequence[str]:
    """Return librdkafka, and those of the other kinds of clients that can run here and that the seed chooses."""
    chance = random.Random(f"clients {seed}")
    chosen = [kind for kind in ALL_KINDS if kind == LIBRDKAFKA or chance.random() < 0.6]
    absent = {JAVA: java_missing(), FRANZ_GO: franz_go_missing()}
    return [kind for kind in chosen if absent.get(kind) is None]


def _work(history: History, clients: Clients, database_url: Callable[[], str], chance: random.Random) -> _Work:
    bootstrap = clients.bootstrap

    def producing(topic: str, *, idempotent: bool = True, keys: int = 0, rate: float = 100.0) -> Producing:
        return Producing(
            *(history, clients, topic, TOPICS[topic]),
            idempotent=idempotent,
            keys=keys,
            rate=rate,
            seed=chance.randrange(2**31),
        )

    # One producer for each topic, because values are unique within a topic and rise.
    producers = [
        producing(PLAIN, idempotent=False),
        producing(IDEMPOTENT, rate=200.0),
        producing(KEYED, keys=20),
        producing(SOURCE, rate=60.0),
    ]
    groups = [
        Group(history, clients, IDEMPOTENT, protocol=protocol, members=3, seed=chance.randrange(2**31))
        for protocol in GROUPS
    ]
    groups.append(Group(history, clients, IDEMPOTENT, protocol=SIMPLE, members=1, seed=chance.randrange(2**31)))
    groups.append(
        Group(
            *(history, clients, TARGET),
            protocol="cooperative",
            members=2,
            seed=chance.randrange(2**31),
            isolation="read_committed",
        )
    )
    transfers = Transfers(
        *(history, clients, SOURCE, TARGET), workers=2, partitions=TOPICS[TARGET], seed=chance.randrange(2**31)
    )
    watched = {group.group: group.topic for group in groups}
    observer = Observer(history, bootstrap, {topic: TOPICS[topic] for topic in (PLAIN, IDEMPOTENT, TARGET)}, watched)
    churn = TopicChurn(bootstrap, seed=chance.randrange(2**31))
    door = SqlDoor(bootstrap, database_url, DOOR, partitions=TOPICS[DOOR], seed=chance.randrange(2**31))
    share = None
    if clients.java is not None:
        share = ShareGroup(*(history, clients.java, bootstrap, SOURCE), members=2, seed=chance.randrange(2**31))
    assigned = None
    if AIOKAFKA in clients.kinds:
        assigned = AssignedTransfers(
            *(bootstrap, SOURCE, ASSIGNED),
            workers=2,
            source_partitions=TOPICS[SOURCE],
            target_partitions=TOPICS[ASSIGNED],
            seed=chance.randrange(2**31),
        )
    return _Work(producers, groups, transfers, assigned, churn, door, share, observer)


def _attack(
    attacked: World,
    history: History,
    chance: random.Random,
    names: Sequence[str],
    until_s: float,
    say: Callable[[str], None],
) -> None:
    while time.monotonic() < until_s:
        time.sleep(chance.uniform(0.5, 5.0))  # a pause between two faults, in which the cluster may or may not settle
        name = chance.choice(names)
        began_s = time.monotonic()
        detail = NEMESES[name](attacked, chance)
        history.add(Faulted(name, detail, began_s, time.monotonic()))
        say(detail)


def _finish(attacked: World, work: _Work, history: History, read_s: float, states: dict[str, str]) -> _Violations:
    """Let every workload finish. Return a sentence for each that does not, or whose client met an error.

    Store the state of each group that did not receive every record in `states`, while its members still exist.

    This function does not report a group or a transfer that makes no progress: checks judge what is missing.
    """
    found: _Violations = {EVERY_WORKLOAD_FINISHES: [], NO_CLIENT_FAILS: []}

    def finish(workloads: Sequence[Workload]) -> None:
        for workload in workloads:
            workload.stop()
        for workload in workloads:
            try:
                workload.finish()
            except WorkloadError as error:
                found[EVERY_WORKLOAD_FINISHES].append(str(error))
            except ClientError as error:
                found[NO_CLIENT_FAILS].append(str(error))

    def read(groups: Sequence[Group], produced: Sequence[Produced]) -> None:
        topics = {group.group: group.topic for group in groups}
        _until_read(history, Consumed, produced, topics, read_s)
        for group in {group for group, _ in checks.unread(produced, history.of(Consumed), topics)}:
            states[f"group-{group}"] = attacked.group_state(group)

    finish([*work.producers, work.churn, work.door])
    for group in work.groups:
        group.drain()
    read(work.groups, history.of(Produced))
    if work.share is not None:
        work.share.drain()
        _until_read(history, Delivered, history.of(Produced), {work.share.group: work.share.topic}, read_s)
        finish([work.share])
    all_transfers = [work.transfers, *([] if work.assigned is None else [work.assigned])]
    for transfers in all_transfers:
        _until_transferred(transfers, read_s)
    finish([work.observer])
    finish(all_transfers)
    results = _results(read_log(attacked.bootstrap, {TARGET: TOPICS[TARGET]}, read_s)[0])
    read(work.groups, results)
    readers = {group.group: group.topic for group in work.groups if group.topic == TARGET}
    found["groups read every result"] = checks.groups_read_everything(results, history.of(Consumed), readers)
    finish(work.groups)
    return found


def _results(log: Mapping[Place, Entry]) -> list[Produced]:
    """Return the records of TARGET as if they had been acknowledged: only their transactions were."""
    return [
        Produced(*("transfers", *place[:2], entry.key, entry.value, 0.0, 0.0, Outcome.OK), place.offset)
        for place, entry in log.items()
        if place.topic == TARGET
    ]


def _until_read(
    history: History,
    kind: type[Consumed] | type[Delivered],
    produced: Sequence[Produced],
    groups: Mapping[str, str],
    read_s: float,
) -> None:
    """Wait until each group has received every acknowledged record, or until no group receives one for `read_s`."""
    left, since_s = -1, time.monotonic()
    while missing := len(checks.unread(produced, history.of(kind), groups)):
        if missing != left:
            left, since_s = missing, time.monotonic()
        if time.monotonic() > since_s + read_s:
            return
        time.sleep(1)


def _until_transferred(transfers: Transfers | AssignedTransfers, read_s: float) -> None:
    """Wait until the transfer group has committed the end of its source, or until it commits nothing for `read_s`."""
    count = TOPICS[transfers.source]
    ends = log_ends(transfers.bootstrap, {transfers.source: count})
    consumer = asking(transfers.bootstrap, transfers.group)
    last: dict[int, int] = {}
    since_s = time.monotonic()
    try:
        while not transfers.failed:
            found = committed(consumer, transfers.source, count) or {}
            if all(found.get(part.partition, 0) >= end for part, end in ends.items()):
                return
            if found != last:
                last, since_s = found, time.monotonic()
            if time.monotonic() > since_s + read_s:
                return
            time.sleep(0.5)
    finally:
        consumer.close()


def _judge(attacked: World, history: History, work: _Work, read_s: float) -> _Violations:
    produced, consumed = history.of(Produced), history.of(Consumed)
    changes, commits, observed = history.of(OwnerChanged), history.of(OffsetCommitted), history.of(Observed)
    log, unread = read_log(attacked.bootstrap, TOPICS, read_s)
    kept = {place: entry for place, entry in log.items() if place.topic != KEYED}
    ends = log_ends(attacked.bootstrap, TOPICS)
    groups = {group.group: group.topic for group in work.groups}
    careful = {group.group for group in work.groups if group.protocol in ("cooperative", "static", "consumer")}
    sources = [entry.value for place, entry in log.items() if place.topic == SOURCE]
    results = {
        topic: [entry.value for place, entry in log.items() if place.topic == topic] for topic in (TARGET, ASSIGNED)
    }
    described = [describe(node.link.address, groups) for node in attacked.nodes]
    found = {
        "every partition can be read to its end": unread,
        "nothing acknowledged is lost": checks.nothing_acknowledged_is_lost(
            (record for record in produced if record.topic != KEYED), log
        ),
        "nothing is there twice": checks.nothing_is_there_twice([IDEMPOTENT, SOURCE, TARGET, ASSIGNED, DOOR], log),
        "nothing was invented": checks.nothing_was_invented(
            produced, {place: entry for place, entry in log.items() if place.topic not in (TARGET, ASSIGNED, DOOR)}
        ),
        "offsets are dense": checks.offsets_are_dense(ends, [PLAIN, IDEMPOTENT, SOURCE, DOOR], log),
        "producers keep their order": checks.producers_keep_their_order(
            (record for record in produced if record.topic != PLAIN), log
        ),
        "groups read everything": checks.groups_read_everything(produced, consumed, groups),
        "groups read what the log holds": checks.groups_read_what_the_log_holds(consumed, log),
        "members read forward": checks.members_read_forward(changes, consumed),
        "owners never overlap": checks.owners_never_overlap(changes, careful, attacked.removed_members()),
        "old owners cannot commit": checks.old_owners_cannot_commit(changes, commits),
        "numbers never fall": checks.numbers_never_fall(observed, commits, produced),
        "compaction keeps the last": checks.compaction_keeps_the_last(produced, [KEYED], log),
        "transfers happen once": [
            *checks.transfers_happen_once(sources, results[TARGET], history.of(Transferred)),
            *([] if work.assigned is None else checks.transfers_happen_once(sources, results[ASSIGNED])),
        ],
        "records of SQL are the committed rows": checks.records_are_the_committed_rows(work.door.rows(), DOOR, log),
        "SQL consumers process once": checks.records_are_processed_once(work.door.results(), DOOR, log),
        "topics that are created again keep their records": work.churn.violations,
        "every node returns the whole log": _read_each_node(attacked, kept, ends),
        "every node gives the same answer": [
            sentence
            for node, other in zip(attacked.nodes[1:], described[1:], strict=True)
            for sentence in checks.states_are_equal(described[0], other, f"{attacked.nodes[0].name} and {node.name}")
        ],
    }
    for node in attacked.nodes:
        node.process.restart()
    after = describe(attacked.bootstrap, groups)
    found["a restart changes nothing"] = checks.states_are_equal(described[0], after, "restart of all nodes")
    read_again, _ = read_log(attacked.bootstrap, TOPICS, read_s)
    found["every node returns the whole log"] += _read_each_node(attacked, kept, ends)
    found["compaction keeps the last"] += checks.compaction_keeps_the_last(produced, [KEYED], read_again)
    log_after = {str(place): entry for place, entry in read_again.items() if place.topic != KEYED}
    found["a restart keeps the log"] = checks.states_are_equal(
        {str(place): entry for place, entry in kept.items()}, log_after, "log after the restart"
    )
    if work.share is not None:
        work.share.look_again(TOPICS[SOURCE])
        found |= _judge_share(history, work.share, read_log(attacked.bootstrap, {SOURCE: TOPICS[SOURCE]}, read_s)[0])
    found["every client worked"] = checks.every_client_worked(_done(history, work))
    return found


def _read_each_node(attacked: World, log: Mapping[Place, Entry], ends: Mapping[Part, int]) -> list[str]:
    """Compare `log`, which leaders served, with the log of each node. The log has no KEYED records, because compaction
    may remove records in the meantime.
    """
    found: list[str] = []
    for node in attacked.nodes:
        try:
            read, unread = asyncio.run(read_node(node.process.bootstrap, ends))
        except (OSError, ProtocolError) as error:
            found.append(f"{node.name} gives no answer that can be read: {error!r}")
            continue
        found += [f"{node.name}: {sentence}" for sentence in unread]
        of_node = {str(place): entry for place, entry in read.items() if place.topic != KEYED}
        served = {str(place): entry for place, entry in log.items()}
        found += checks.states_are_equal(served, of_node, f"log of leaders and of {node.name}")
    return found


def _done(history: History, work: _Work) -> dict[str, int]:
    """Return how often each client succeeded at what the checks judge."""
    produced = Counter(
        record.client.rpartition(".")[0] for record in history.of(Produced) if record.outcome is Outcome.OK
    )
    consumed = Counter(delivery.group for delivery in history.of(Consumed))
    commits = Counter(commit.group for commit in history.of(OffsetCommitted) if commit.outcome is Outcome.OK)
    owned = Counter(change.group for change in history.of(OwnerChanged))
    observed = Counter(seen.quantity for seen in history.of(Observed))
    done = {
        f"records acknowledged by {producer.name} ({producer.topic})": produced[producer.name]
        for producer in work.producers
    }
    for group in work.groups:
        done[f"records consumed by {group.group} ({group.topic})"] = consumed[group.group]
        done[f"commits of {group.group} ({group.topic})"] = commits[group.group]
        if group.protocol != SIMPLE:
            done[f"partitions assigned in {group.group}"] = owned[group.group]
    done |= {f"observations of a {quantity}": observed[quantity] for quantity in Quantity}
    done["records transferred"] = sum(each.outcome is Outcome.OK for each in history.of(Transferred))
    done["records transferred"] += sum(work.transfers.transferred.values())
    gained = [change.member for change in history.of(OwnerChanged) if change.change is Change.ASSIGNED]
    readers = {delivery.member for delivery in history.of(Consumed)}
    for kind in ALL_KINDS:
        if sum(member.endswith(f"-{kind}") for member in gained) >= OFTEN:
            done[f"members of {kind} that consumed"] = sum(member.endswith(f"-{kind}") for member in readers)
    done |= {"topics created and deleted": work.churn.rounds, "SQL transactions acknowledged": work.door.committed}
    if work.assigned is not None:
        done["records transferred by aiokafka"] = work.assigned.transferred
    if work.share is not None:
        done["deliveries of the share group"] = len(history.of(Delivered))
        done["acknowledgements of the share group"] = sum(
            1 for each in history.of(Settled) if each.outcome is Outcome.OK
        )
    return done


def _judge_share(history: History, share: ShareGroup, log: Mapping[Place, Entry]) -> _Violations:
    """Judge the share group, including the records that a member received after the restart."""
    delivered = history.of(Delivered)
    return {
        "share groups read everything": checks.groups_read_everything(
            history.of(Produced), delivered, {share.group: share.topic}
        ),
        "share groups read what the log holds": checks.groups_read_what_the_log_holds(delivered, log),
        "settled records stay settled": checks.settled_records_stay_settled(delivered, history.of(Settled)),
        "deliveries keep their limit": checks.deliveries_keep_their_limit(
            delivered, history.of(Settled), DELIVERY_LIMIT
        ),
    }


def read_log(bootstrap: str, topics: Mapping[str, int], read_s: float) -> tuple[dict[Place, Entry], list[str]]:
    """Read every record of `topics` with read_committed, from the first to the end at the time of the call.

    Also return a sentence for each partition that was not read to its end, which includes a last stable offset that
    stays below the end: after `read_s` without a record the reader gives up.
    """
    log: dict[Place, Entry] = {}
    ends = log_ends(bootstrap, topics)
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"judge-{time.monotonic_ns()}",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "check.crcs": True,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 100,
            "auto.offset.reset": "earliest",
            **PATIENT,
        }
    )
    parts = [Part(topic, index) for topic, count in topics.items() for index in range(count)]
    reached: dict[Part, int] = {}
    """The offset at which the reader found the end of a partition: with read_committed the last stable offset."""

    def unread() -> list[Part]:
        return [part for part in parts if part not in ends or reached.get(part, -1) < ends[part]]

    try:
        consumer.assign([TopicPartition(*part, 0) for part in parts])
        came_s = time.monotonic()
        while unread() and time.monotonic() < came_s + read_s:
            for message in consumer.consume(5_000, 0.1):
                topic, partition, offset = message.topic(), message.partition(), message.offset()
                error = message.error()
                if error is not None and error.code() != confluent_kafka.KafkaError._PARTITION_EOF:  # noqa: SLF001
                    continue
                assert topic is not None
                assert partition is not None
                assert offset is not None
                if error is not None:
                    reached[Part(topic, partition)] = offset
                    continue
                came_s = time.monotonic()
                key = message.key()
                entry = Entry(None if key is None else key.decode(errors="replace"), number_in(message.value()))
                log[Place(topic, partition, offset)] = entry
    finally:
        consumer.close()
    return log, [
        f"{part.topic}-{part.partition} cannot be read to its end: {reached.get(part, 'no offset')} of "
        f"{ends.get(part, 'unknown')} was reached"
        for part in unread()
    ]


def log_ends(bootstrap: str, topics: Mapping[str, int]) -> dict[Part, int]:
    """Return where each partition's log ends, without partitions that no longer exist. Raise WorkloadError if no node
    answers within FINISH_S.
    """
    admin = AdminClient({"bootstrap.servers": bootstrap, **PATIENT})
    parts = [TopicPartition(topic, index) for topic, count in topics.items() for index in range(count)]
    latest = OffsetSpec.latest()
    assert latest is not None
    ends: dict[Part, int] = {}

    def ask() -> None:
        for part, answer in admin.list_offsets(dict.fromkeys(parts, latest), request_timeout=CALL_S).items():
            try:
                end = answer.result(CALL_S * 2).offset
            except confluent_kafka.KafkaException as error:
                if error.args[0].code() != confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise
                continue
            if end < 0:  # librdkafka reports this for a partition if one of its requests got no answer
                raise TimeoutError(f"no node tells the end of {part.topic}-{part.partition}")
            ends[Part(part.topic, part.partition)] = end

    insist(ask)
    return ends


def describe(bootstrap: str, groups: Mapping[str, str]) -> dict[str, object]:
    """Describe topics, log ends and committed offsets as the nodes of `bootstrap` see them."""
    admin = AdminClient({"bootstrap.servers": bootstrap, **PATIENT})
    state: dict[str, object] = {}
    for topic in admin.list_topics(timeout=CALL_S).topics.values():
        if topic.topic in TOPICS:
            state[f"partitions of {topic.topic}"] = len(topic.partitions)
    for part, end in log_ends(bootstrap, TOPICS).items():
        state[f"end of {part.topic}-{part.partition}"] = end
    for group, topic in groups.items():
        consumer = asking(bootstrap, group)
        deadline_s = time.monotonic() + READ_S
        while (found := committed(consumer, topic, TOPICS[topic])) is None:
            if time.monotonic() > deadline_s:
                raise WorkloadError(f"no node of {bootstrap} tells the committed offsets of {group}")
        for partition, offset in found.items():
            state[f"committed offset of {group} in {topic}-{partition}"] = offset
        consumer.close()
    return state
