"""Answers that a moving broker gives to a mirror: what is missing must not look complete."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from gateway.cli import main
from gateway.commands.client import Cluster
from gateway.commands.errors import PassingError
from gateway.mirror.copier import Copier
from gateway.mirror.produce_target import ProduceTarget
from gateway.mirror.source import Source
from gateway.mirror.verify import records_between
from protocol.errors import ErrorCode
from protocol.messages.fetch import FetchableTopicResponse, FetchRequest, FetchResponse, PartitionData
from protocol.messages.list_groups import ListGroupsRequest
from protocol.messages.list_offsets import ListOffsetsRequest
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from tests.clients.topics import create_topic
from tests.gateway_process import GatewayProcess
from tests.mirror.mirrors import cluster, commit, committed, fill, words
from tests.steps.moved import without_leader


def mirror_here(source: str, target: GatewayProcess, *more: str) -> int:
    """Run the mirror in this process, so that a test can change the answers that the mirror gets."""
    return main(words(source, target, "--once", "--json", *more))


def test_a_mirror_whose_source_does_not_say_where_a_log_ends_does_not_report_a_copy(
    source: str, target: GatewayProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = create_topic(source, 2)
    for partition in range(2):
        fill(source, topic, partition, 10)
    ask, asked = Cluster.ask, 0

    def moving(self: Cluster, response_type: type[Any], request: object, **more: Any) -> Any:
        """Answer as a broker does that loses partition 0 once the mirror has begun."""
        nonlocal asked
        response = ask(self, response_type, request, **more)
        if not isinstance(request, ListOffsetsRequest):
            return response
        asked += 1
        if asked <= 2:  # where each log begins and ends
            return response
        return without_leader(response)

    monkeypatch.setattr(Cluster, "ask", moving)
    code = mirror_here(source, target, "--topics", topic)
    printed = capsys.readouterr()
    assert (code, f"{topic}[0] does not answer now" in printed.err) == (1, True), printed


def test_a_partition_without_a_leader_does_not_keep_a_following_mirror_from_the_others(
    source: str, target: GatewayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = create_topic(source, 2)
    create_topic(target.bootstrap, 2, topic)
    for partition in range(2):
        fill(source, topic, partition, 10)
    ask, said = Cluster.ask, list[str]()

    def offline(self: Cluster, response_type: type[Any], request: object, **more: Any) -> Any:
        """Answer as a cluster in which partition 0 has no leader."""
        response = ask(self, response_type, request, **more)
        is_source = self is one and isinstance(request, ListOffsetsRequest)
        return without_leader(response) if is_source and len(response.topics[0].partitions) == 2 else response

    with cluster(source) as one, cluster(target.bootstrap) as other:
        read = Source(one)
        topics = read.topics([topic])
        copier = Copier(read, ProduceTarget(one, other, "source"), said.append)
        with monkeypatch.context() as patched:
            patched.setattr(Cluster, "ask", offline)
            asyncio.run(copier.begin(topics, demands_all=False))
        assert (list(copier.progress), len(said)) == ([(topic, 1)], 1)
        asyncio.run(copier.begin(topics, demands_all=False))
        assert sorted(copier.progress) == [(topic, 0), (topic, 1)]


def test_a_mirror_waits_until_the_brokers_of_the_target_know_a_new_topic(
    source: str, target: GatewayProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 10)
    ask, early = Cluster.ask, True

    def late(self: Cluster, response_type: type[Any], request: object, **more: Any) -> Any:
        """Answer as a leader does that has not heard of its new partition when the first request arrives."""
        nonlocal early
        response = ask(self, response_type, request, **more)
        if not early or not isinstance(request, ListOffsetsRequest) or self.bootstrap == one:
            return response
        early = False
        return without_leader(response)

    host, _, port = source.partition(":")
    one = ((host, int(port)),)
    monkeypatch.setattr(Cluster, "ask", late)
    code = mirror_here(source, target, "--produce", "--topics", topic)
    assert (code, early) == (0, False), capsys.readouterr().err


def _no_answer() -> OffsetCommitResponse:
    raise PassingError("the coordinator did not answer")


def _no_coordinator() -> OffsetCommitResponse:
    code = ErrorCode.COORDINATOR_NOT_AVAILABLE
    partition = OffsetCommitResponsePartition(partition_index=0, error_code=code)
    return OffsetCommitResponse(topics=(OffsetCommitResponseTopic(name="t", partitions=(partition,)),))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(_no_answer, "the coordinator did not answer"), (_no_coordinator, "COORDINATOR_NOT_AVAILABLE")],
)
def test_a_mirror_that_cannot_reach_the_coordinator_of_a_group_does_not_report_a_copy(
    source: str,
    target: GatewayProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: Callable[[], OffsetCommitResponse],
    reason: str,
) -> None:
    topic, group = create_topic(source, 1), f"g-{uuid.uuid4().hex[:8]}"
    fill(source, topic, 0, 10)
    commit(source, group, {(topic, 0): 7})
    ask = Cluster.ask

    def restarting(self: Cluster, response_type: type[Any], request: object, **more: Any) -> Any:
        if isinstance(request, OffsetCommitRequest):
            return answer()
        return ask(self, response_type, request, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Cluster, "ask", restarting)
        code = mirror_here(source, target, "--topics", topic, "--groups", group, "--timeout", "3")
    printed = capsys.readouterr()
    assert (code, reason in printed.err) == (1, True), printed
    assert mirror_here(source, target, "--topics", topic, "--groups", group) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["groups"][0]["result"] == "moved"
    assert committed(target.bootstrap, group, (topic, 0)) == [7]


def test_a_group_that_moves_while_groups_are_listed_is_copied(
    source: str, target: GatewayProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    topic, group = create_topic(source, 1), f"g-{uuid.uuid4().hex[:8]}"
    fill(source, topic, 0, 10)
    commit(source, group, {(topic, 0): 7})
    ask, asked = Cluster.ask, 0

    def moving(self: Cluster, response_type: type[Any], request: object, **more: Any) -> Any:
        """Answer the first ListGroups as brokers do if the group moves to a broker that has just answered."""
        nonlocal asked
        response = ask(self, response_type, request, **more)
        if not isinstance(request, ListGroupsRequest):
            return response
        asked += 1
        return dataclasses.replace(response, groups=()) if asked == 1 else response

    monkeypatch.setattr(Cluster, "ask", moving)
    assert mirror_here(source, target, "--topics", topic, "--groups", group) == 0
    assert committed(target.bootstrap, group, (topic, 0)) == [7], capsys.readouterr().err


def test_a_copy_from_a_source_that_has_lost_copied_records_is_refused(
    source: str, target: GatewayProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = create_topic(source, 1)
    fill(source, topic, 0, 10)
    assert mirror_here(source, target, "--topics", topic) == 0
    capsys.readouterr()
    ask = Cluster.ask

    def restored(self: Cluster, response_type: type[Any], request: object, **more: Any) -> Any:
        """Answer as a source that was restored to an earlier moment, when the log ended at 5."""
        response = ask(self, response_type, request, **more)
        if not isinstance(request, ListOffsetsRequest):
            return response
        (found,) = response.topics
        (partition,) = found.partitions
        earlier = dataclasses.replace(partition, offset=min(partition.offset, 5))
        return dataclasses.replace(response, topics=(dataclasses.replace(found, partitions=(earlier,)),))

    monkeypatch.setattr(Cluster, "ask", restored)
    code = mirror_here(source, target, "--topics", topic)
    printed = capsys.readouterr()
    said = f"{topic}[0] of the source ends at 5, before offset 10 that was copied: the source has lost records"
    assert (code, said in printed.err) == (1, True), printed


def test_a_leader_that_moves_while_two_logs_are_compared_is_worth_another_try(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A following mirror compares logs when it begins, and tries again after such an error."""
    topic = create_topic(source, 1)
    ask = Cluster.ask

    def moving(self: Cluster, response_type: type[Any], request: object, **more: Any) -> Any:
        if not isinstance(request, FetchRequest):
            return ask(self, response_type, request, **more)
        partition = PartitionData(partition_index=0, error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER)
        return FetchResponse(responses=(FetchableTopicResponse(topic=topic, partitions=(partition,)),))

    monkeypatch.setattr(Cluster, "ask", moving)
    with cluster(source) as broker, pytest.raises(PassingError, match="NOT_LEADER_OR_FOLLOWER"):
        next(records_between(broker, (topic, 0), 0, 1))
