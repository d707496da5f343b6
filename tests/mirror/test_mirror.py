"""A cluster is mirrored into a gateway. Every record keeps its offset, and a killed mirror continues."""

from __future__ import annotations

import json
import random
import signal
import socket
import time
import uuid

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic  # pyright: ignore[reportPrivateImportUsage]

from gateway.commands.topic_changes import DYNAMIC_TOPIC_CONFIG, settings
from tests.clients.topics import create_topic
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.mirror.mirrors import (
    CODECS,
    Seen,
    cluster,
    commit,
    commits_of,
    committed,
    fill,
    mirror_once,
    read_partition,
    start,
    transact,
    try_once,
    watermarks,
    words,
)
from tests.steps.command import interpreted, output_of
from tests.steps.waiting import wait_for


def test_records_keep_offsets_timestamps_keys_headers_and_compression(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 3)
    for codec in CODECS:
        fill(source, topic, CODECS.index(codec) % 3, 200, **{"compression.type": codec})
    (report,) = json.loads(output_of(*words(source, target, "--once", "--json", "--topics", topic), run=interpreted))
    assert {row["partition"]: row["to"] for row in report["partitions"]} == {0: 400, 1: 400, 2: 200}
    for partition in range(3):
        original = read_partition(source, topic, partition)
        assert len(original) == (200 if partition == 2 else 400)
        assert read_partition(target.bootstrap, topic, partition) == original
        assert watermarks(target.bootstrap, topic, partition) == watermarks(source, topic, partition)


def test_a_second_run_copies_only_what_is_new(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 100)
    mirror_once(source, target, "--topics", topic)
    assert len(read_partition(target.bootstrap, topic)) == 100  # by now the target's node knows the end of a log
    fill(source, topic, 0, 50)
    report = mirror_once(source, target, "--topics", topic)
    assert (report["partitions"][0]["from"], report["partitions"][0]["to"]) == (100, 150)
    assert read_partition(target.bootstrap, topic) == read_partition(source, topic)


def test_aborted_records_and_markers_leave_their_offsets_empty(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 5)
    transact(source, topic, [b"committed-1", b"committed-2"], commits=True)
    transact(source, topic, [b"aborted-1", b"aborted-2"], commits=False)
    transact(source, topic, [b"committed-3"], commits=True)
    transact(source, topic, [b"aborted-3"], commits=False)
    mirror_once(source, target, "--topics", topic)
    original = read_partition(source, topic)
    assert [record.value for record in original[5:]] == [b"committed-1", b"committed-2", b"committed-3"]
    assert read_partition(target.bootstrap, topic) == original
    everything = read_partition(target.bootstrap, topic, 0, **{"isolation.level": "read_uncommitted"})
    assert everything == original, "aborted records are not copied"
    assert watermarks(target.bootstrap, topic) == watermarks(source, topic)


def test_a_log_that_begins_late_begins_late_in_the_target(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 2)
    fill(source, topic, 0, 100)
    fill(source, topic, 1, 10)
    admin = AdminClient({"bootstrap.servers": source})
    places = [confluent_kafka.TopicPartition(topic, 0, 37), confluent_kafka.TopicPartition(topic, 1, 10)]
    for deleted in admin.delete_records(places).values():
        deleted.result(30)
    mirror_once(source, target, "--topics", topic)
    for partition, bounds in ((0, (37, 100)), (1, (10, 10))):
        assert watermarks(target.bootstrap, topic, partition) == bounds
        assert read_partition(target.bootstrap, topic, partition) == read_partition(source, topic, partition)


def test_producers_of_the_target_start_anew_behind_the_mirrored_records(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 20, **{"enable.idempotence": True})
    mirror_once(source, target, "--topics", topic)
    fill(target.bootstrap, topic, 0, 20, **{"enable.idempotence": True})
    transact(target.bootstrap, topic, [b"own"], commits=True)
    assert [record.offset for record in read_partition(target.bootstrap, topic)] == list(range(41))


def test_a_topic_that_a_client_wrote_to_is_refused(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 10)
    mirror_once(source, target, "--topics", topic)
    fill(target.bootstrap, topic, 0, 1)
    fill(source, topic, 0, 10)
    code, _, said = try_once(source, target, "--topics", topic)
    assert code == 1
    assert f"{topic}[0] was written to in the target" in said
    assert watermarks(target.bootstrap, topic) == (0, 11)


def test_a_topic_with_records_of_its_own_is_refused(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 1)
    create_topic(target.bootstrap, 1, topic)
    fill(target.bootstrap, topic, 0, 1)
    code, _, said = try_once(source, target, "--topics", topic)
    assert code == 1
    assert f"{topic}[0] has records in the target that no mirror wrote" in said


def test_a_topic_that_was_made_anew_in_the_source_is_refused(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 10)
    mirror_once(source, target, "--topics", topic)
    admin = AdminClient({"bootstrap.servers": source})
    admin.delete_topics([topic])[topic].result(30)
    create_topic(source, 1, topic)
    code, _, said = try_once(source, target, "--topics", topic)
    assert code == 1
    assert "the source's topic was made anew" in said


def test_a_topic_that_is_made_anew_or_deleted_while_the_mirror_follows_ends_it(
    source: str, target: GatewayProcess
) -> None:
    """One topic is made anew in the source, and another is deleted in the target: an empty topic in its place would
    look like a copy. Both mirrors run concurrently, because a mirror looks at its topics every ten seconds.
    """
    anew, deleted = topics = create_topic(source, 1), create_topic(source, 1)
    for topic in topics:
        fill(source, topic, 0, 10)
    processes = [start(source, target, "--topics", topic) for topic in topics]
    try:
        for topic in topics:
            _wait_for_end(target, topic, 10)
        admin = AdminClient({"bootstrap.servers": source})
        admin.delete_topics([anew])[anew].result(30)
        create_topic(source, 1, anew)
        fill(source, anew, 0, 20)
        admin = AdminClient({"bootstrap.servers": target.bootstrap})
        admin.delete_topics([deleted])[deleted].result(30)
        said = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [1, 1], said
    assert "the source's topic was made anew" in said[0]
    assert watermarks(target.bootstrap, anew)[1] == 10
    assert f"topic {deleted} was deleted in the target" in said[1]
    assert deleted not in admin.list_topics(timeout=30).topics


def test_settings_and_partitions_are_copied(source: str, target: GatewayProcess) -> None:
    topic = f"t-{uuid.uuid4().hex[:12]}"
    admin = AdminClient({"bootstrap.servers": source})
    config = {"retention.ms": "123456789", "cleanup.policy": "compact", "max.message.bytes": "2000000"}
    admin.create_topics([NewTopic(topic, 5, 1, config=config)])[topic].result(30)
    mirror_once(source, target, "--topics", topic)

    with cluster(target.bootstrap) as broker:
        own = {each.name: each.value for each in settings(broker, topic) if each.config_source == DYNAMIC_TOPIC_CONFIG}
        assert own == config
        assert len(broker.topics([topic])[0].partitions) == 5


def test_retention_that_the_brokers_of_the_source_set_is_copied(
    gateway_factory: GatewayFactory, target: GatewayProcess
) -> None:
    """The target's own default would remove records that the source keeps."""
    keeper = gateway_factory({"log.retention.ms": "-1"})
    topic = create_topic(keeper.bootstrap, 1)
    mirror_once(keeper.bootstrap, target, "--topics", topic)
    with cluster(target.bootstrap) as broker:
        assert {each.name: each.value for each in settings(broker, topic)}["retention.ms"] == "-1"


def test_a_partition_that_was_added_to_the_source_is_copied(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 1)
    mirror_once(source, target, "--topics", topic)
    admin = AdminClient({"bootstrap.servers": source})
    admin.create_partitions([NewPartitions(topic, 2)])[topic].result(30)
    fill(source, topic, 1, 10)
    mirror_once(source, target, "--topics", topic)
    assert read_partition(target.bootstrap, topic, 1) == read_partition(source, topic, 1)


def test_groups_move_forward_and_never_beyond_the_copied_records(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 2)
    group = f"g-{uuid.uuid4().hex[:8]}"
    fill(source, topic, 0, 100)
    fill(source, topic, 1, 100)
    commit(source, group, {(topic, 0): 40, (topic, 1): 100})
    more = ("--topics", topic, "--groups", group)
    assert mirror_once(source, target, *more)["groups"][0]["moved"] == 2
    assert committed(target.bootstrap, group, (topic, 0), (topic, 1)) == [40, 100]
    assert commits_of(target.bootstrap, group)[topic, 0].metadata == "from the source"
    commit(target.bootstrap, group, {(topic, 0): 90})  # the group's consumers have moved to the target
    commit(source, group, {(topic, 0): 60})
    assert mirror_once(source, target, *more)["groups"][0]["result"] == "current"
    assert committed(target.bootstrap, group, (topic, 0)) == [90]


def test_a_name_that_no_copied_group_has_is_reported(source: str, target: GatewayProcess) -> None:
    topic, group = create_topic(source, 1), f"g-{uuid.uuid4().hex[:8]}"
    fill(source, topic, 0, 10)
    commit(source, group, {(topic, 0): 4})
    code, report, said = try_once(source, target, "--topics", topic, "--groups", group, f"{group}-mistyped")
    assert (code, [row["group"] for row in json.loads(report)[0]["groups"]]) == (0, [group])
    assert said.count("no group") == 1
    assert f"no group with offsets in these topics matches {group}-mistyped" in said


def test_a_pattern_of_topics_that_matches_nothing_ends_a_copy(source: str, target: GatewayProcess) -> None:
    """A mistyped name must not look like a copied topic."""
    topic = create_topic(source, 1)
    code, _, said = try_once(source, target, "--topics", topic, f"{topic}-mistyped")
    assert (code, said) == (1, f"sluice: no topic of the source matches {topic}-mistyped\n")


def test_an_interrupted_copy_ends_by_its_signal(target: GatewayProcess) -> None:
    """An exit code of 0 would tell a script that the copy is complete."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        process = start(address, target, "--once", "--topics", "*", "--timeout", "1")
        with silent.accept()[0]:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT


def test_a_group_whose_commit_the_target_refuses_makes_the_copy_incomplete(source: str, target: GatewayProcess) -> None:
    topic, group = create_topic(source, 1), f"g-{uuid.uuid4().hex[:8]}"
    fill(source, topic, 0, 10)
    commit(source, group, {(topic, 0): 4})
    mirror_once(source, target, "--topics", topic)
    member = confluent_kafka.Consumer(
        {"bootstrap.servers": target.bootstrap, "group.id": group, "enable.auto.commit": False}
        | {"auto.offset.reset": "earliest"}
    )
    try:
        member.subscribe([topic])
        assert len(member.consume(1, 60)) == 1
        code, report, said = try_once(source, target, "--topics", topic, "--groups", group)
    finally:
        member.close()
    assert (code, json.loads(report)[0]["groups"][0]["result"]) == (1, "skipped"), said
    assert f"group {group} has members" in said


def test_an_offset_of_an_open_transaction_is_named_and_follows_later(source: str, target: GatewayProcess) -> None:
    """The offset that the transaction replaces would make a consumer in the target read records again."""
    topic, group = create_topic(source, 1), f"g-{uuid.uuid4().hex[:8]}"
    fill(source, topic, 0, 10)
    commit(source, group, {(topic, 0): 4})
    more = ("--topics", topic, "--groups", group)
    consumer = confluent_kafka.Consumer({"bootstrap.servers": source, "group.id": group})
    producer = confluent_kafka.Producer({"bootstrap.servers": source, "transactional.id": uuid.uuid4().hex})
    try:
        producer.init_transactions(30)
        producer.begin_transaction()
        offsets = [confluent_kafka.TopicPartition(topic, 0, 7)]
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), 30)
        code, report, said = try_once(source, target, *more)
        producer.commit_transaction(30)
    finally:
        consumer.close()
    assert (code, json.loads(report)[0]["groups"][0]["result"]) == (1, "waits"), said
    assert f"group {group} of the source commits offsets in an open transaction" in said
    assert mirror_once(source, target, *more)["groups"][0]["result"] == "moved"
    assert committed(target.bootstrap, group, (topic, 0)) == [7]


def test_verify_finds_no_difference_in_a_copy(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 2)
    fill(source, topic, 0, 500)
    transact(source, topic, [b"aborted"], commits=False)
    report = mirror_once(source, target, "--topics", topic, "--verify")
    assert [(row["start"], row["end"], row["records"], row["first_difference"]) for row in report["compared"]] == [
        (0, 502, 500, None),
        (0, 0, 0, None),
    ]


def test_records_behind_an_open_transaction_are_named_and_follow_later(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 10)
    producer = confluent_kafka.Producer({"bootstrap.servers": source, "transactional.id": uuid.uuid4().hex})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    assert producer.flush(30) == 0
    fill(source, topic, 0, 5)
    code, _, said = try_once(source, target, "--topics", topic)
    assert (code, f"{topic}[0]: records from offset 10 on wait for an open transaction" in said) == (1, True), said
    producer.commit_transaction(30)
    mirror_once(source, target, "--topics", topic)
    assert read_partition(target.bootstrap, topic) == read_partition(source, topic)


def test_a_killed_mirror_goes_on_without_a_duplicate_or_a_gap(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 4)
    seed = random.randrange(2**32)
    pauses = random.Random(seed)
    for partition in range(4):
        fill(source, topic, partition, 5000, **{"batch.num.messages": 20})
    kills = 0
    for _ in range(12):
        process = start(source, target, "--topics", topic)
        deadline = time.monotonic() + 20
        before = _copied(target, topic)
        while _copied(target, topic) == before and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        time.sleep(pauses.random() * 0.05)
        process.kill()
        process.communicate()
        kills += 1
        if _copied(target, topic) == 20_000:
            break
    assert kills >= 1
    mirror_once(source, target, "--topics", topic)
    for partition in range(4):
        original = read_partition(source, topic, partition)
        copy: list[Seen] = read_partition(target.bootstrap, topic, partition)
        assert copy == original, f"seed {seed}"


def _copied(target: GatewayProcess, topic: str) -> int:
    return sum(_end(target, topic, partition) for partition in range(4))


def _end(target: GatewayProcess, topic: str, partition: int = 0) -> int:
    try:
        return watermarks(target.bootstrap, topic, partition)[1]
    except confluent_kafka.KafkaException:
        return 0  # the topic does not exist yet


def test_a_following_mirror_copies_what_arrives(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 10)
    process = start(source, target, "--topics", topic)
    try:
        _wait_for_end(target, topic, 10)
        fill(source, topic, 0, 10)
        _wait_for_end(target, topic, 20)
        assert read_partition(target.bootstrap, topic) == read_partition(source, topic)
    finally:
        process.kill()
        process.communicate()


def test_a_following_mirror_outlives_restarts_of_both_clusters(
    clusters: tuple[GatewayProcess, GatewayProcess], source: str, target: GatewayProcess
) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 10)
    process = start(source, target, "--topics", topic, "--timeout", "5")
    try:
        _wait_for_end(target, topic, 10)
        for number, cluster in enumerate(clusters, 1):
            cluster.stop()
            cluster.restart()
            fill(source, topic, 0, 10)
            _wait_for_end(target, topic, 10 + 10 * number)
        assert read_partition(target.bootstrap, topic) == read_partition(source, topic)
    finally:
        process.kill()
        _, said = process.communicate()
    assert "trying again" in said


def test_a_waiting_consumer_receives_mirrored_records(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 10)
    mirror_once(source, target, "--topics", topic)
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": target.bootstrap, "group.id": uuid.uuid4().hex, "fetch.wait.max.ms": 60_000}
        | {"socket.timeout.ms": 70_000, "enable.auto.commit": False}
    )
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
        assert len(consumer.consume(10, 30)) == 10
        fill(source, topic, 0, 1)
        mirror_once(source, target, "--topics", topic)  # by now the consumer's fetch waits at the end of the log
        assert len(consumer.consume(1, 10)) == 1
    finally:
        consumer.close()


def _wait_for_end(target: GatewayProcess, topic: str, end: int) -> None:
    wait_for(lambda: _end(target, topic), f"{topic} reaches {end}", holds=lambda found: found >= end)
