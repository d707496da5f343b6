"""`sluice groups`, `topics` and `transactions`, used as a person does, against a gateway with stock clients."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import urllib.request
import uuid
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition

from gateway.cli import main
from gateway.commands.client import Cluster
from protocol.errors import ErrorCode
from protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from protocol.messages.list_offsets import (
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from tests.commands.terminal import Prompt, consume, consumer, produce
from tests.commands.terminal import sluice as sluice
from tests.commands.terminal import topic as topic
from tests.frames.handoff import configure
from tests.frames.members import topic_id_of
from tests.frames.share import ACCEPT, Reader
from tests.frames.streams import Instance, reading
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.steps.moved import without_leader
from tests.wire import WireClient


def test_a_topic_is_created_shown_and_deleted(sluice: Prompt, topic: str) -> None:
    listed = {row["topic"]: row for row in sluice.json("topics", "list")}
    assert listed[topic]["partitions"] == 2
    (described,) = sluice.json("topics", "describe", topic)
    assert described["configs"] == {"retention.ms": "3600000"}
    assert [(row["partition"], row["log_start"], row["log_end"]) for row in described["partitions"]] == [
        (0, 0, 0),
        (1, 0, 0),
    ]
    table = sluice("topics", "list").splitlines()
    assert table[0].split() == ["TOPIC", "PARTITIONS", "REPLICAS", "INTERNAL", "ID"]
    assert any(line.split()[:2] == [topic, "2"] for line in table)
    assert "already exists" in sluice("topics", "create", topic, code=1)
    refused = sluice("topics", "create", f"{topic}-x", "--set", "retention.ms=soon", code=1)
    assert "retention.ms" in refused
    deleted = sluice("topics", "delete", topic, "no-such-topic", code=1)
    assert [line.split()[1] for line in deleted.splitlines() if line.startswith(topic)] == ["deleted"]
    assert "there is no topic no-such-topic" in deleted
    assert f"there is no topic {topic}" in sluice("topics", "describe", topic, code=1)


def test_a_mistyped_topic_is_answered_with_the_nearest_names(sluice: Prompt, topic: str) -> None:
    mistyped = topic.replace("orders", "order")
    for words in (("topics", "describe", mistyped), ("topics", "tail", mistyped), ("topics", "delete", mistyped)):
        said = sluice(*words, code=1)
        assert f"there is no topic {mistyped}; did you mean " in said
        assert topic in said


def test_a_replication_factor_above_the_number_of_nodes_is_refused(
    gateway: GatewayProcess, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    create = ["topics", "create", "-b", gateway.bootstrap]
    assert main([*create, f"{topic}-3", "--replication-factor", "3"]) == 0
    assert capsys.readouterr().err == "sluice: made with replication factor 3; one node serves it now\n"
    assert main([*create, f"{topic}-1", "--replication-factor", "1"]) == 0
    assert capsys.readouterr().err == ""


def test_lag_of_an_unknown_group_exits_with_1(
    sluice: Prompt, gateway: GatewayProcess, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    group = f"g-{uuid.uuid4().hex[:8]}"
    sluice("groups", "reset-offsets", group, "--topic", topic, "--to-latest", "--execute")
    mistyped = f"{group}s"
    for words in (
        ("lag", mistyped),
        ("lag", mistyped, "--by-partition"),
        ("describe", mistyped),
        ("delete", mistyped),
        ("reset-offsets", mistyped, "--to-earliest", "--all-topics"),
    ):
        said = sluice("groups", *words, code=1)
        assert f"there is no group {mistyped}; did you mean " in said
        assert group in said
    assert main(["groups", "lag", group, mistyped, "-b", gateway.bootstrap]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].split() == [group, "2", "0", "0", "-"]
    assert captured.err.startswith(f"sluice: there is no group {mistyped}")


def test_a_reset_of_an_unknown_group_says_that_the_group_is_new(
    gateway: GatewayProcess, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    group = f"g-{uuid.uuid4().hex[:8]}"
    words = ["groups", "reset-offsets", group, "--topic", topic, "--to-latest", "-b", gateway.bootstrap]
    for more, said in (([], f"sluice: group {group} is new"), (["--execute"], "is new"), (["--execute"], "")):
        capsys.readouterr()
        assert main([*words, *more]) == 0
        assert said in capsys.readouterr().err
    assert main(words) == 0
    assert capsys.readouterr().err == ""


def test_a_topic_shows_its_last_records(sluice: Prompt, gateway: GatewayProcess, topic: str) -> None:
    produce(gateway, topic, 0, ["one", "two", "three"], headers=[("h", b"\xff")])
    produce(gateway, topic, 1, ["else"])
    lines = [json.loads(line) for line in sluice("topics", "tail", topic, "-n", "2", "--json").splitlines()]
    assert sorted((line["partition"], line["offset"], line["key"], line["value"]) for line in lines) == [
        (0, 1, "k1", "two"),
        (0, 2, "k2", "three"),
        (1, 0, "k0", "else"),
    ]
    assert lines[-1]["timestamp_ms"] in (1000, 3000)
    assert next(line["headers"] for line in lines if line["partition"] == 0) == [["h", "\\xff"]]
    shown = sluice("topics", "tail", topic, "--partition", "0", "--from-beginning").splitlines()
    assert shown == [
        "0:0  1970-01-01T00:00:01.000Z  k0  one",
        "0:1  1970-01-01T00:00:02.000Z  k1  two",
        "0:2  1970-01-01T00:00:03.000Z  k2  three",
    ]
    assert "partitions 0 to 1" in sluice("topics", "tail", topic, "--partition", "2", code=1)


def test_control_characters_of_a_record_are_escaped(sluice: Prompt, gateway: GatewayProcess, topic: str) -> None:
    produce(gateway, topic, 0, ["\x1b[2Jgone\nand more"])
    (line,) = sluice("topics", "tail", topic).splitlines()
    assert line.endswith("\\x1b[2Jgone\\nand more")


def test_a_group_with_a_member_is_listed_and_described(sluice: Prompt, gateway: GatewayProcess, topic: str) -> None:
    group = f"g-{uuid.uuid4().hex[:8]}"
    produce(gateway, topic, 0, ["a", "b", "c"])
    with consumer(gateway, group, topic) as member:
        assert consume(member, 3) == ["a", "b", "c"]
        member.commit(asynchronous=False)
        produce(gateway, topic, 0, ["d"])
        row = next(row for row in sluice.json("groups", "list") if row["group"] == group)
        assert (row["state"], row["type"], row["protocol_type"]) == ("Stable", "classic", "consumer")
        (described,) = sluice.json("groups", "describe", group)
        assert (described["state"], described["lag"]) == ("Stable", 1)
        (shown,) = described["members"]
        assert (shown["client"], shown["host"]) == ("tester", "127.0.0.1")
        assert shown["assigned"] == [f"{topic}[0-1]"]
        first = described["partitions"][0]
        assert (first["committed"], first["log_end"], first["lag"]) == (3, 4, 1)
        assert first["owner"] == shown["member"]
        text = sluice("groups", "describe", group)
        assert f"{topic}[0-1]" in text
        refused = sluice("groups", "reset-offsets", group, "--all-topics", "--to-earliest", "--execute", code=1)
        assert "stop its consumers" in refused
        assert "has members" in sluice("groups", "delete", group, code=1)
    (lag,) = sluice.json("groups", "lag", group)
    assert (lag["partitions"], lag["lag"], lag["most_of_one"], lag["never_committed"]) == (2, 1, 1, 0)


def test_lag_without_a_commit_is_unknown_and_not_zero(sluice: Prompt, gateway: GatewayProcess, topic: str) -> None:
    group = f"g-{uuid.uuid4().hex[:8]}"
    produce(gateway, topic, 0, ["a", "b", "c"])
    produce(gateway, topic, 1, ["d"])
    with consumer(gateway, group, topic) as member:
        assert sorted(consume(member, 4)) == ["a", "b", "c", "d"]
        (described,) = sluice.json("groups", "describe", group)
        (lag,) = sluice.json("groups", "lag", group)
        for row in (described, lag):
            assert (row["lag"], row["never_committed"]) == (None, 4)
        assert lag["most_of_one"] is None
        assert [(each["lag"], each["never_committed"]) for each in described["partitions"]] == [(None, 3), (None, 1)]
        head, values = (line.split() for line in sluice("groups", "lag", group).splitlines())
        assert dict(zip(head, values, strict=True))["LAG"] == "-"


def test_lag_counts_partitions_of_a_read_topic_that_have_no_commit(
    sluice: Prompt, gateway: GatewayProcess, topic: str
) -> None:
    """This is the state after a restore: the group has no members, and one partition has no committed offset."""
    group = f"g-{uuid.uuid4().hex[:8]}"
    produce(gateway, topic, 0, ["a", "b", "c"])
    produce(gateway, topic, 1, ["d", "e"])
    sluice("groups", "reset-offsets", group, "--topic", f"{topic}:1", "--to-offset", "1", "--execute")
    (lag,) = sluice.json("groups", "lag", group)
    assert (lag["partitions"], lag["lag"], lag["most_of_one"], lag["never_committed"]) == (2, 1, 1, 3)
    rows = sluice.json("groups", "lag", group, "--by-partition")
    assert [(row["committed"], row["lag"], row["never_committed"]) for row in rows] == [(None, None, 3), (1, 1, None)]


@pytest.mark.parametrize(
    ("arguments", "new"),
    [
        (["--to-earliest"], 0),
        (["--to-latest"], 4),
        (["--to-offset", "1"], 1),
        (["--to-offset", "99"], 4),
        (["--to-time", "1970-01-01T00:00:03"], 2),
        (["--to-time", "2100-01-01T00:00:00"], 4),
        (["--shift-by", "-2"], 1),
        (["--shift-by", "-9"], 0),
    ],
)
def test_a_reset_changes_committed_offsets(
    sluice: Prompt, gateway: GatewayProcess, topic: str, arguments: list[str], new: int
) -> None:
    group = f"g-{uuid.uuid4().hex[:8]}"
    produce(gateway, topic, 0, ["a", "b", "c", "d"])
    sluice("groups", "reset-offsets", group, "--topic", f"{topic}:0", "--to-offset", "3", "--execute")
    reset = ("groups", "reset-offsets", group, "--all-topics", *arguments)
    assert sluice.json(*reset) == [{"topic": topic, "partition": 0, "committed": 3, "new": new, "moved": new - 3}]
    row, _ = sluice.json("groups", "lag", group, "--by-partition")
    assert row["committed"] == 3, "without --execute nothing moves"
    sluice(*reset, "--execute")
    row, _ = sluice.json("groups", "lag", group, "--by-partition")
    assert (row["committed"], row["lag"]) == (new, 4 - new)
    if new < 4:
        with consumer(gateway, group, topic) as member:
            assert consume(member, 4 - new) == ["a", "b", "c", "d"][new:]


def test_a_reset_counts_the_records_of_open_transactions(
    sluice: Prompt, gateway: GatewayProcess, topic: str, name: str
) -> None:
    """Kafka's own tool counts them, too. Otherwise the group would read them after a reset to the latest offset."""
    produce(gateway, topic, 0, ["a", "b"])
    producer = transactional(gateway, name)
    producer.begin_transaction()
    send(producer, topic, 0, "open", "open, too")
    for arguments, new in (
        (["--to-latest"], 4),
        (["--to-offset", "3"], 3),
        (["--to-time", "1970-01-01T00:00:03"], 2),
        (["--to-time", "2100-01-01T00:00:00"], 4),
    ):
        (row,) = sluice.json("groups", "reset-offsets", name, "--topic", f"{topic}:0", *arguments)
        assert row["new"] == new, arguments
    producer.abort_transaction(30)


@pytest.mark.parametrize("verb", ["lag", "describe"])
def test_lag_names_the_partitions_that_do_not_answer_and_exits_with_1(
    sluice: Prompt,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gateway: GatewayProcess,
    verb: str,
) -> None:
    group = f"g-{uuid.uuid4().hex[:8]}"
    produce(gateway, topic, 0, ["a", "b", "c", "d"])
    sluice("groups", "reset-offsets", group, "--topic", topic, "--to-earliest", "--execute")
    ask = Cluster.ask

    def moving(self: Cluster, response_type: type[Any], request: object, **more: Any) -> Any:
        response = ask(self, response_type, request, **more)
        return without_leader(response) if isinstance(request, ListOffsetsRequest) else response

    monkeypatch.setattr(Cluster, "ask", moving)
    assert main(["groups", verb, group, "-b", gateway.bootstrap]) == 1
    said = capsys.readouterr().err
    assert said == f"sluice: the log of {topic}[0] does not answer now, and the lag leaves it out: run this again\n"


def test_top_shows_no_lag_of_a_group_of_which_a_partition_does_not_answer(
    sluice: Prompt, gateway: GatewayProcess, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = f"g-{uuid.uuid4().hex[:8]}"
    produce(gateway, topic, 0, ["a", "b", "c", "d"])
    sluice("groups", "reset-offsets", group, "--topic", topic, "--to-earliest", "--execute")
    top = ("top", group, "--once", "--interval", "0.1", "--json")
    assert json.loads(sluice(*top))["groups"][0]["lag"] == 4
    ask = Cluster.ask

    def moving(self: Cluster, response_type: type[Any], request: object, **more: Any) -> Any:
        response = ask(self, response_type, request, **more)
        if not isinstance(request, ListOffsetsRequest):
            return response
        answered = [
            dataclasses.replace(each, partitions=tuple(part for part in each.partitions if part.partition_index))
            for each in response.topics
        ]
        return dataclasses.replace(response, topics=tuple(answered))

    monkeypatch.setattr(Cluster, "ask", moving)
    assert json.loads(sluice(*top))["groups"][0]["lag"] is None


def test_a_reset_to_a_time_begins_at_that_millisecond(sluice: Prompt, gateway: GatewayProcess, topic: str) -> None:
    produce(gateway, topic, 0, ["a", "b"])
    reset = ("groups", "reset-offsets", f"g-{topic}", "--topic", f"{topic}:0")
    (row,) = sluice.json(*reset, "--to-time", "1970-01-01T00:00:01.001")
    assert row["new"] == 1
    (row,) = sluice.json(*reset, "--to-time", "1969-12-31T23:59:59.999")
    assert row["new"] == 0


def test_a_reset_to_a_time_changes_nothing_if_a_partition_does_not_answer(
    sluice: Prompt, gateway: GatewayProcess, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = f"g-{uuid.uuid4().hex[:8]}"
    produce(gateway, topic, 0, ["a", "b", "c", "d"])
    reset = ("groups", "reset-offsets", group, "--topic", f"{topic}:0")
    sluice(*reset, "--to-offset", "1", "--execute")
    ask = Cluster.ask

    def without_times(self: Cluster, response_type: type[Any], request: object, **more: Any) -> Any:
        response = ask(self, response_type, request, **more)
        if not isinstance(request, ListOffsetsRequest) or request.topics[0].partitions[0].timestamp < 0:
            return response
        # The broker cannot read the records in which the time lies.
        unread = ListOffsetsPartitionResponse(partition_index=0, error_code=ErrorCode.KAFKA_STORAGE_ERROR)
        return ListOffsetsResponse(topics=(ListOffsetsTopicResponse(name=topic, partitions=(unread,)),))

    monkeypatch.setattr(Cluster, "ask", without_times)
    said = sluice(*reset, "--to-time", "1970-01-01T00:00:03", "--execute", code=1)
    assert f"{topic}[0] does not answer now" in said
    row, _ = sluice.json("groups", "lag", group, "--by-partition")
    assert row["committed"] == 1


async def test_groups_of_every_type_are_described(sluice: Prompt, gateway: GatewayProcess, topic: str) -> None:
    produce(gateway, topic, 0, ["a", "b", "c"])
    async with await WireClient.connect(gateway.bootstrap) as client:
        topic_id = await topic_id_of(client, topic)

        async def shown(group: str) -> dict[str, Any]:
            (row,) = await asyncio.to_thread(sluice.json, "groups", "describe", group)
            return row

        joining = ConsumerGroupHeartbeatRequest(
            group_id=f"consumer of {topic}",
            member_id="m",
            member_epoch=0,
            rebalance_timeout_ms=5_000,
            subscribed_topic_names=(topic,),
            topic_partitions=(),
        )
        assert (await client.send(joining, 1)).error_code == 0
        consumer_group = await shown(joining.group_id)
        assert (consumer_group["type"], consumer_group["state"], consumer_group["assignor"]) == (
            "consumer",
            "Stable",
            "uniform",
        )
        assert [row["assigned"] for row in consumer_group["members"]] == [[f"{topic}[0-1]"]]
        assert {row["owner"] for row in consumer_group["partitions"]} == {"m"}

        streams_id = f"streams of {topic}"
        assert await configure(client, streams_id, streams_initial_rebalance_delay_ms="0") == [0]
        await Instance(client, streams_id, reading(topic), "s").join()
        streams_group = await shown(streams_id)
        assert (streams_group["type"], streams_group["state"]) == ("streams", "Stable")
        assert [row["assigned"] for row in streams_group["members"]] == [["0[0-1]"]]
        assert {row["owner"] for row in streams_group["partitions"]} == {"s"}

        share_id = f"share of {topic}"
        assert await configure(client, share_id, share_auto_offset_reset="earliest") == [0]
        reader = Reader(client, share_id, topic, topic_id)
        await reader.join()
        assert await reader.fetch() == [(0, 2, 1)]
        assert await reader.acknowledge((0, 0, ACCEPT), (2, 2, ACCEPT)) == 0
        share_group = await shown(share_id)
        assert (share_group["type"], share_group["state"], share_group["assignor"]) == ("share", "Stable", "simple")
        assert [row["assigned"] for row in share_group["members"]] == [[f"{topic}[0-1]"]]
        (stands,) = [row for row in share_group["partitions"] if row["partition"] == 0]
        assert (stands["committed"], stands["log_end"], stands["lag"], stands["owner"]) == (1, 3, 1, None)
        (lag,) = await asyncio.to_thread(sluice.json, "groups", "lag", share_id)
        assert (lag["lag"], lag["most_of_one"]) == (1, 1)
        text = await asyncio.to_thread(sluice, "groups", "describe", share_id)
        assert f"{topic}[0-1]" in text


def test_deleting_groups_prints_each_result(sluice: Prompt, topic: str) -> None:
    group = f"g-{uuid.uuid4().hex[:8]}"
    sluice("groups", "reset-offsets", group, "--topic", topic, "--to-latest", "--execute")
    lines = sluice("groups", "delete", group, "no-such-group", code=1).splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines[1:]] == ["deleted", "there is no group no-such-group"]
    assert "there is no group" in sluice("groups", "describe", group, code=1)


# --- transactions -----------------------------------------------------------------------------------------------------


@pytest.fixture
def name() -> str:
    return f"app-{uuid.uuid4().hex[:8]}"


def transactional(gateway: GatewayProcess, name: str) -> Producer:
    producer = Producer({"bootstrap.servers": gateway.bootstrap, "transactional.id": name})
    producer.init_transactions(30)
    return producer


def send(producer: Producer, topic: str, partition: int, *values: str) -> None:
    for value in values:
        producer.produce(topic, value, partition=partition)
    assert producer.flush(30) == 0


def listed(sluice: Prompt, name: str, *words: str) -> dict[str, Any]:
    (row,) = [row for row in sluice.json("transactions", "list", *words) if row["id"] == name]
    return row


def test_a_transaction_is_shown_while_it_is_open(
    sluice: Prompt, gateway: GatewayProcess, topic: str, name: str
) -> None:
    producer = transactional(gateway, name)
    row = listed(sluice, name)
    assert (row["state"], row["epoch"], row["open_s"], row["started"], row["broker"]) == ("Empty", 0, None, None, 1)
    produce(gateway, topic, 1, ["before"])
    producer.begin_transaction()
    send(producer, topic, 1, "one", "two")
    row = listed(sluice, name, "--open", "--state", "ongoing")
    assert (row["state"], row["timeout_s"]) == ("Ongoing", 60.0)
    assert 0 <= row["open_s"] < 30
    (described,) = sluice.json("transactions", "describe", name)
    partition = {"topic": topic, "partition": 1, "since": 1, "stable_end": 1}
    assert described["partitions"] == [partition]
    table = sluice("transactions", "list").splitlines()
    assert table[0].split() == ["ID", "STATE", "PRODUCER-ID", "EPOCH", "OPEN-S", "BROKER"]
    assert any(line.split()[:2] == [name, "Ongoing"] for line in table)
    assert [line.split() for line in sluice("transactions", "describe", name).splitlines()[-2:]] == [
        ["TOPIC", "PARTITION", "SINCE", "STABLE-END"],
        [topic, "1", "1", "1"],
    ]
    producer.commit_transaction(30)
    row = listed(sluice, name)
    assert (row["state"], row["open_s"]) == ("CompleteCommit", None)
    assert sluice("transactions", "describe", name).splitlines()[-1] == "none"
    assert name not in sluice("transactions", "list", "--open")


def test_an_abort_fences_the_producer(sluice: Prompt, gateway: GatewayProcess, topic: str, name: str) -> None:
    producer = transactional(gateway, name)
    producer.begin_transaction()
    send(producer, topic, 0, "never")
    assert sluice.json("transactions", "abort", name) == [
        {"id": name, "result": "aborted", "fenced_epoch": 0, "epoch": 1}
    ]
    with pytest.raises(KafkaException) as fenced:
        producer.commit_transaction(30)
    assert fenced.value.args[0].fatal()
    assert "has no transaction open that can be aborted: it is Empty" in sluice("transactions", "abort", name, code=1)
    assert listed(sluice, name)["epoch"] == 1
    with urllib.request.urlopen(f"{gateway.metrics_url}/metrics", timeout=30) as answer:
        assert 'sluice_transactions_ended_total{outcome="fenced"}' in answer.read().decode()


def test_an_abort_ends_a_transaction_whose_timeout_is_no_longer_permitted(
    gateway_factory: GatewayFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator lowers the limit because of such a transaction."""
    before = gateway_factory()
    assert main(["topics", "create", "t", "-b", before.bootstrap]) == 0
    producer = transactional(before, "slow")
    producer.begin_transaction()
    send(producer, "t", 0, "never")
    before.stop()
    after = gateway_factory({"transaction.max.timeout.ms": "10000"}, database_url=before.database_url)
    capsys.readouterr()
    assert main(["transactions", "abort", "slow", "-b", after.bootstrap]) == 0, capsys.readouterr().err


def test_aborted_records_are_not_shown_with_the_topic(
    sluice: Prompt, gateway: GatewayProcess, topic: str, name: str
) -> None:
    producer = transactional(gateway, name)
    for value, committed in (("a", True), ("b", False), ("c", True), ("d", False)):
        producer.begin_transaction()
        send(producer, topic, 0, value)
        produce(gateway, topic, 0, [f"between-{value}"])
        if committed:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)
    lines = sluice("topics", "tail", topic, "--from-beginning", "--json").splitlines()
    values = ["a", "between-a", "between-b", "c", "between-c", "between-d"]
    assert [json.loads(line)["value"] for line in lines] == values


def test_offsets_of_a_transaction_are_shown_as_upstream_shows_them(
    sluice: Prompt, gateway: GatewayProcess, topic: str, name: str
) -> None:
    producer = transactional(gateway, name)
    with consumer(gateway, f"g-{name}", topic) as member:
        producer.begin_transaction()
        producer.send_offsets_to_transaction([TopicPartition(topic, 0, 5)], member.consumer_group_metadata(), 30)
        (described,) = sluice.json("transactions", "describe", name)
        (partition,) = described["partitions"]
        assert (partition["topic"], partition["since"], partition["stable_end"]) == ("__consumer_offsets", None, None)
        producer.abort_transaction(30)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("groups", "describe", "no-such-group"), "there is no group no-such-group"),
        (
            ("groups", "reset-offsets", "g", "--topic", "no-such-topic", "--to-latest"),
            "there is no topic no-such-topic",
        ),
        (("transactions", "describe", "no-such-id"), "there is no transactional id no-such-id"),
        (("transactions", "abort", "no-such-id"), "there is no transactional id no-such-id"),
        (("groups", "reset-offsets", "g", "--all-topics", "--to-latest"), "there is no group g"),
        (("topics", "create", "a b"), "Topic name is invalid"),
    ],
)
def test_a_refusal_is_printed_in_one_line(sluice: Prompt, words: tuple[str, ...], said: str) -> None:
    answer = sluice(*words, code=1)
    assert said in answer
    assert answer.startswith("sluice: ")
    assert answer.count("\n") == 1


def test_an_unreachable_broker_is_named_with_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main(["groups", "list", "-b", f"127.0.0.1:{port}"]) == 1
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port} cannot be reached" in said
    assert said.endswith("; name a broker that runs with --bootstrap HOST:PORT\n")


def test_an_unreachable_advertised_address_names_the_listener_to_correct(
    gateway_factory: GatewayFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    gateway = gateway_factory({"advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}"})
    assert main(["groups", "list", "-b", gateway.bootstrap]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sluice: 127.0.0.1:{port} cannot be reached: ")
    assert line.endswith(
        "; broker 1 advertises this address: set advertised.listeners of that broker to an address that this machine "
        "reaches"
    )


def test_a_port_of_another_protocol_is_named_as_such(
    gateway: GatewayProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    port = gateway.metrics_url.rpartition(":")[2]
    assert main(["groups", "list", "-b", f"127.0.0.1:{port}"]) == 1
    assert f"127.0.0.1:{port} does not speak Kafka's protocol: name a broker with" in capsys.readouterr().err


def test_a_broker_that_never_answers_times_out(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert main(["topics", "list", "-b", address, "--timeout", "0.2"]) == 1
    assert "did not answer" in capsys.readouterr().err


def test_the_second_address_is_used_if_the_first_is_unreachable(gateway: GatewayProcess, capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main(["topics", "list", "-b", f"127.0.0.1:{port},{gateway.bootstrap}"]) == 0
    assert "TOPIC" in capsys.readouterr().out
