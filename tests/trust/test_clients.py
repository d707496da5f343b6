"""Each kind of client as producer, member and transactional worker, without faults, against one gateway."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

import confluent_kafka
import pytest

from tests.closing import responds
from tests.gateway_process import GatewayProcess, free_ports
from tests.steps.waiting import wait_for
from tests.trust import checks, franz, java
from tests.trust.assigned import AssignedTransfers
from tests.trust.history import (
    Change,
    Consumed,
    Delivered,
    History,
    OffsetCommitted,
    Outcome,
    OwnerChanged,
    Produced,
    Settled,
    Settlement,
)
from tests.trust.members import AIOKAFKA, ALL_KINDS, FRANZ_GO, JAVA, LIBRDKAFKA, SIMPLE, SPOKEN
from tests.trust.run import read_log
from tests.trust.share import DELIVERY_LIMIT, ShareGroup
from tests.trust.workloads import Clients, Group, Producing, Transfers, create_topics

PARTITIONS = 3
WAIT_S = 120.0
RECORDS = 150
JOINABLE = [
    pytest.param(kind, protocol, marks=() if protocol == "cooperative" or kind == LIBRDKAFKA else pytest.mark.long)
    for protocol, kinds in SPOKEN.items()
    for kind in kinds
]


@pytest.fixture
def topic(gateway: GatewayProcess) -> str:
    name = f"topic-{uuid.uuid4().hex[:6]}"
    create_topics(gateway.bootstrap, {name: PARTITIONS}, {})
    return name


def test_consumer_without_an_answer_is_not_asked_to_leave(gateway: GatewayProcess, topic: str) -> None:
    """To librdkafka it makes no difference for a call whether its own thread or every broker stands still."""
    partition = confluent_kafka.TopicPartition(topic, 0)
    for bootstrap, answers in ((gateway.bootstrap, True), (f"127.0.0.1:{free_ports(1)[0]}", False)):
        settings = {"bootstrap.servers": bootstrap, "group.id": f"group-{topic}", "log_level": 0}
        with contextlib.closing(confluent_kafka.Consumer(settings)) as consumer:
            assert responds(consumer, partition, 30.0 if answers else 0.5) is answers


@contextlib.contextmanager
def clients(gateway: GatewayProcess, kind: str) -> Iterator[Clients]:
    reason = {JAVA: java.missing(), FRANZ_GO: franz.missing()}.get(kind)
    if reason is not None:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(contextlib.closing(java.Java(gateway.bootstrap))) if kind == JAVA else None
        go = stack.enter_context(contextlib.closing(franz.FranzGo(gateway.bootstrap))) if kind == FRANZ_GO else None
        yield Clients(gateway.bootstrap, (kind,), machine, go)


def produced(history: History, gateway: GatewayProcess, topic: str, kind: str = LIBRDKAFKA) -> list[Produced]:
    """Produce at least RECORDS records, and return all of them."""
    with clients(gateway, kind) as chosen:
        producing = Producing(history, chosen, topic, PARTITIONS, rate=500.0)
        producing.start()
        wait_for(lambda: len(history.of(Produced)) >= RECORDS, "records", seconds=WAIT_S)
        producing.stop()
        producing.finish()
    return history.of(Produced)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_producer_of_each_kind_notes_each_record_at_its_offset(
    gateway: GatewayProcess, topic: str, kind: str
) -> None:
    records = produced(History(), gateway, topic, kind)
    log, unread = read_log(gateway.bootstrap, {topic: PARTITIONS}, WAIT_S)
    assert unread == []
    assert {record.outcome for record in records} == {Outcome.OK}
    assert len(log) == len(records)
    assert checks.nothing_acknowledged_is_lost(records, log) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "protocol"), JOINABLE)
def test_members_of_each_kind_note_what_they_own_read_and_commit(
    gateway: GatewayProcess, topic: str, kind: str, protocol: str
) -> None:
    history = History()
    records = produced(history, gateway, topic)
    with clients(gateway, kind) as chosen:
        group = Group(history, chosen, topic, protocol=protocol, members=1 if protocol == SIMPLE else 2, seed=1)
        group.start()
        missing = {group.group: topic}
        wait_for(
            lambda: len(checks.unread(records, history.of(Consumed), missing)),
            "records to be consumed",
            holds=lambda left: left == 0,
            seconds=WAIT_S,
        )
        group.stop()
        group.finish()
    changes, commits = history.of(OwnerChanged), history.of(OffsetCommitted)
    owned = {change.partition for change in changes if change.change is Change.ASSIGNED}
    assert owned == (set() if protocol == SIMPLE else set(range(PARTITIONS)))
    assert sum(1 if change.change is Change.ASSIGNED else -1 for change in changes) == 0
    ends = {
        part: max(record.offset + 1 for record in records if record.partition == part) for part in range(PARTITIONS)
    }
    committed = [commit for commit in commits if commit.outcome is Outcome.OK]
    assert {part: max(each.offset for each in committed if each.partition == part) for part in ends} == ends


@pytest.mark.timeout(300)
def test_share_group_settles_each_record_within_its_limit(gateway: GatewayProcess, topic: str) -> None:
    history = History()
    records = produced(history, gateway, topic)
    with clients(gateway, JAVA) as chosen:
        assert chosen.java is not None
        share = ShareGroup(history, chosen.java, gateway.bootstrap, topic, members=2, seed=1)
        share.start()
        settled = {record.value for record in records if record.value % 40 != 7}
        wait_for(
            lambda: settled - {each.value for each in history.of(Delivered)},
            "records to be delivered",
            holds=lambda left: not left,
            seconds=WAIT_S,
        )
        share.stop()
        share.finish()
        share.look_again(PARTITIONS)
    deliveries, settlements = history.of(Delivered), history.of(Settled)
    assert {each.partition for each in deliveries if each.member == "last"} == set(range(PARTITIONS))
    assert {each.settlement for each in settlements} == set(Settlement)
    assert max(each.count for each in deliveries) == DELIVERY_LIMIT
    assert checks.settled_records_stay_settled(deliveries, settlements) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [LIBRDKAFKA, AIOKAFKA, JAVA, FRANZ_GO])
def test_transfers_of_each_kind_give_each_record_one_result(gateway: GatewayProcess, topic: str, kind: str) -> None:
    target = f"{topic}-results"
    create_topics(gateway.bootstrap, {target: PARTITIONS}, {})
    history = History()
    records = produced(history, gateway, topic)
    topics = {topic: PARTITIONS, target: PARTITIONS}

    def results() -> list[int]:
        log, _ = read_log(gateway.bootstrap, topics, WAIT_S)
        return [entry.value for place, entry in log.items() if place.topic == target]

    with clients(gateway, kind) as chosen:
        if kind == AIOKAFKA:
            transfers = AssignedTransfers(
                *(gateway.bootstrap, topic, target),
                workers=2,
                source_partitions=PARTITIONS,
                target_partitions=PARTITIONS,
                seed=1,
            )
        else:
            transfers = Transfers(history, chosen, topic, target, workers=2, partitions=PARTITIONS, seed=1)
        transfers.start()
        wait_for(results, "results", holds=lambda found: len(found) >= len(records), seconds=WAIT_S)
        transfers.stop()
        transfers.finish()
    assert checks.transfers_happen_once([record.value for record in records], results()) == []
    if isinstance(transfers, AssignedTransfers):
        assert transfers.transferred > 0
    else:
        assert transfers.transferred[kind] > 0 or kind == LIBRDKAFKA


@pytest.mark.timeout(300)
def test_static_member_that_is_fenced_is_followed_by_another_life(gateway: GatewayProcess, topic: str) -> None:
    history = History()
    group = Group(history, Clients(gateway.bootstrap), topic, protocol="static", members=1, seed=1)
    group.start()
    wait_for(lambda: history.of(OwnerChanged), "an assignment", seconds=WAIT_S)
    rival = confluent_kafka.Consumer(
        {
            "bootstrap.servers": gateway.bootstrap,
            "group.id": group.group,
            "group.instance.id": "instance-0",
            "partition.assignment.strategy": "cooperative-sticky",
        }
    )
    rival.subscribe([topic])

    def second_life_owns() -> bool:
        rival.poll(0.2)
        return any(each.member == "m0.1-librdkafka" for each in history.of(OwnerChanged))

    wait_for(second_life_owns, "the next life", seconds=WAIT_S)
    rival.close()
    group.stop()
    group.finish()
    assert Change.LOST in {each.change for each in history.of(OwnerChanged) if each.member == "m0.0-librdkafka"}
