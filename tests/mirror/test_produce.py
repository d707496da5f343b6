"""A mirror that appends by Produce requests, as to any broker."""

from __future__ import annotations

import time
import uuid
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # pyright: ignore[reportPrivateImportUsage]

from gateway.cli import main
from gateway.commands import groups
from gateway.commands.client import Cluster
from gateway.commands.errors import PassingError
from gateway.commands.groups import Commit, commit_offsets
from gateway.commands.produce import append
from gateway.mirror.groups import GROUP_PREFIX
from protocol.errors import ErrorCode
from protocol.messages.produce import PartitionProduceResponse, ProduceRequest, ProduceResponse, TopicProduceResponse
from protocol.records import Record, build_batch
from tests.clients.topics import create_topic
from tests.gateway_process import GatewayProcess
from tests.mirror.mirrors import (
    Seen,
    cluster,
    commit,
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


def without_offsets(records: list[Seen]) -> list[tuple[object, ...]]:
    return [record[1:] for record in records]


def test_a_log_without_gaps_keeps_its_offsets(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 2)
    fill(source, topic, 0, 300, **{"compression.type": "zstd"})
    fill(source, topic, 1, 20)
    report = mirror_once(source, target, "--produce", "--topics", topic, "--verify")
    assert [row["result"] for row in report["compared"]] == ["same", "same"]
    fill(source, topic, 0, 30)
    assert mirror_once(source, target, "--produce", "--topics", topic)["partitions"][0]["from"] == 300
    for partition in range(2):
        assert read_partition(target.bootstrap, topic, partition) == read_partition(source, topic, partition)


def test_offsets_of_groups_are_translated_behind_gaps(source: str, target: GatewayProcess) -> None:
    topic, groups = create_topic(source, 1), [f"g-{uuid.uuid4().hex[:8]}" for _ in range(4)]
    fill(source, topic, 0, 10)
    transact(source, topic, [b"aborted"] * 3, commits=False)  # 10 to 13
    transact(source, topic, [b"committed"] * 2, commits=True)  # 14 to 16
    fill(source, topic, 0, 10)  # 17 to 26
    for group, offset in zip(groups, (10, 15, 20, 27), strict=True):
        commit(source, group, {(topic, 0): offset})
    more = ("--produce", "--topics", topic, "--groups", *groups)
    mirror_once(source, target, *more)
    original = read_partition(source, topic)
    copy = read_partition(target.bootstrap, topic)
    assert without_offsets(copy) == without_offsets(original)
    assert [record.offset for record in copy] == list(range(22))
    for group, offset in zip(groups, (10, 15, 20, 27), strict=True):
        (translated,) = committed(target.bootstrap, group, (topic, 0))
        rest = [record for record in original if record.offset >= offset]
        assert without_offsets(copy[translated:]) == without_offsets(rest)
    code, report, _ = try_once(source, target, *more, "--verify")
    assert code == 1
    assert "not compared: offsets changed" in report


def test_a_log_goes_back_to_the_cluster_that_it_came_from(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 50)
    mirror_once(source, target, "--topics", topic)
    fill(target.bootstrap, topic, 0, 25)  # by now producers write to the target
    _mirror_back(source, target, topic)
    assert read_partition(source, topic) == read_partition(target.bootstrap, topic)
    assert watermarks(source, topic) == (0, 75)


def _mirror_back(source: str, target: GatewayProcess, topic: str) -> None:
    """Mirror from the target to the source."""
    process = start(target.bootstrap, target, "--to", source, "--produce", "--once", "--topics", topic)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said


def test_a_log_goes_back_again_after_its_topic_was_mirrored_anew(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 10)
    admin = AdminClient({"bootstrap.servers": target.bootstrap})
    for _ in range(2):
        mirror_once(source, target, "--topics", topic)
        fill(target.bootstrap, topic, 0, 5)
        _mirror_back(source, target, topic)
        records = read_partition(target.bootstrap, topic)
        # A second move to the target begins with a new topic there.
        admin.delete_topics([topic])[topic].result(30)
    assert read_partition(source, topic) == records
    assert watermarks(source, topic) == (0, 20)


def test_a_topic_with_records_of_its_own_is_refused(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 1)
    create_topic(target.bootstrap, 1, topic)
    fill(source, topic, 0, 10)
    fill(target.bootstrap, topic, 0, 1, **{"compression.type": "none"})
    transact(target.bootstrap, topic, [b"own"], commits=True)
    code, _, said = try_once(source, target, "--produce", "--topics", topic)
    assert code == 1
    assert "has records in the target that are not those of the source" in said


def test_a_topic_whose_records_were_all_removed_receives_the_log(source: str, target: GatewayProcess) -> None:
    topic, group = create_topic(source, 1), f"g-{uuid.uuid4().hex[:8]}"
    create_topic(target.bootstrap, 1, topic)
    fill(source, topic, 0, 10)
    commit(source, group, {(topic, 0): 4})
    fill(target.bootstrap, topic, 0, 7)
    admin = AdminClient({"bootstrap.servers": target.bootstrap})
    end = confluent_kafka.TopicPartition(topic, 0, 7)
    admin.delete_records([end])[end].result(30)  # as retention does when all records are old
    mirror_once(source, target, "--produce", "--topics", topic, "--groups", group)
    copy = read_partition(target.bootstrap, topic)
    assert [record.offset for record in copy] == list(range(7, 17))
    assert without_offsets(copy) == without_offsets(read_partition(source, topic))
    assert committed(target.bootstrap, group, (topic, 0)) == [11]


def test_records_that_a_client_added_are_found(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 10)
    mirror_once(source, target, "--produce", "--topics", topic)
    transact(target.bootstrap, topic, [b"own"], commits=True)
    fill(source, topic, 0, 10)
    code, _, said = try_once(source, target, "--produce", "--topics", topic)
    assert code == 1
    assert "was written to in the target" in said


def test_records_that_a_killed_mirror_left_uncommitted_are_not_appended_again(
    source: str, target: GatewayProcess
) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 10)
    transact(source, topic, [b"aborted"], commits=False)
    fill(source, topic, 0, 10)
    mirror_once(source, target, "--produce", "--topics", topic)
    # This state is the same as if the mirror had been killed before the commits that follow its first append.
    topic_id, whole = _position(source, target, topic)
    assert whole == "22 0:0:10 12:10:10"
    _position(source, target, topic, Commit(5, f"{topic_id} 5 0:0:5"))
    fill(source, topic, 0, 5)
    mirror_once(source, target, "--produce", "--topics", topic)
    assert without_offsets(read_partition(target.bootstrap, topic)) == without_offsets(read_partition(source, topic))
    assert _position(source, target, topic) == (topic_id, "27 0:0:10 12:10:15")


def _position(source: str, target: GatewayProcess, topic: str, commit: Commit | None = None) -> tuple[str, str]:
    """Return the topic id and the offset ranges in the mirror's commit. Wait for a commit after `commit`, if that is
    given.
    """
    with cluster(source) as one, cluster(target.bootstrap) as other:
        group = f"{GROUP_PREFIX}{one.metadata(()).cluster_id}"
        if commit is not None:
            commit_offsets(other, group, {(topic, 0): commit})
        topic_id, _, runs = groups.committed(other, group)[topic, 0].metadata.partition(" ")
        return topic_id, runs


def test_records_that_a_leader_appended_and_refused_are_not_appended_again(
    source: str, target: GatewayProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 10)
    ask = Cluster.ask

    def moving(self: Cluster, response_type: type[Any], request: object, **more: Any) -> Any:
        """Answer the first Produce as a leader does that loses the partition after it has appended the records."""
        response = ask(self, response_type, request, **more)
        if not isinstance(request, ProduceRequest) or response.responses[0].partition_responses[0].base_offset > 0:
            return response
        partition = PartitionProduceResponse(index=0, error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER, base_offset=-1)
        return ProduceResponse(responses=(TopicProduceResponse(name=topic, partition_responses=(partition,)),))

    with monkeypatch.context() as patched:
        patched.setattr(Cluster, "ask", moving)
        code = main(words(source, target, "--once", "--json", "--produce", "--topics", topic))
    printed = capsys.readouterr()
    assert (code, "NOT_LEADER_OR_FOLLOWER" in printed.err) == (1, True), printed
    mirror_once(source, target, "--produce", "--topics", topic)
    assert read_partition(target.bootstrap, topic) == read_partition(source, topic)


def test_append_to_a_partition_without_a_leader_may_be_tried_again(target: GatewayProcess) -> None:
    host, _, port = target.bootstrap.partition(":")
    with Cluster([(host, int(port))], timeout_s=0.3) as broker, pytest.raises(PassingError, match="has no leader"):
        append(broker, f"t-{uuid.uuid4().hex[:12]}", 0, build_batch([Record(0, 1, None, b"")]), acks=-1)


def test_records_with_the_time_of_their_append_are_copied(source: str, target: GatewayProcess) -> None:
    topic = f"t-{uuid.uuid4().hex[:12]}"
    wanted = NewTopic(topic, 1, 1, config={"message.timestamp.type": "LogAppendTime"})
    admin = AdminClient({"bootstrap.servers": source})
    admin.create_topics([wanted])[topic].result(30)
    fill(source, topic, 0, 10)
    mirror_once(source, target, "--produce", "--topics", topic)
    topic_id, _ = _position(source, target, topic)
    _position(source, target, topic, Commit(5, f"{topic_id} 5 0:0:5"))  # as a mirror that was killed after an append
    fill(source, topic, 0, 5)
    mirror_once(source, target, "--produce", "--topics", topic)
    copy, original = read_partition(target.bootstrap, topic), read_partition(source, topic)
    assert [record._replace(timestamp=(0, 0)) for record in copy] == [
        record._replace(timestamp=(0, 0)) for record in original
    ]


def test_a_killed_mirror_goes_on_without_a_duplicate_or_a_gap(source: str, target: GatewayProcess) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 6000, **{"batch.num.messages": 10})
    for _ in range(3):
        process = start(source, target, "--produce", "--topics", topic)
        before, deadline = _end(target, topic), time.monotonic() + 30
        while _end(target, topic) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        process.communicate()
    mirror_once(source, target, "--produce", "--topics", topic)
    assert read_partition(target.bootstrap, topic) == read_partition(source, topic)


def _end(target: GatewayProcess, topic: str) -> int:
    try:
        return watermarks(target.bootstrap, topic)[1]
    except confluent_kafka.KafkaException:
        return 0  # the topic does not exist yet
