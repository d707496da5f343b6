"""`sluice produce` and `sluice consume` with a gateway, each against a stock client on the other side."""

from __future__ import annotations

import dataclasses
import io
import json
import time
from typing import Any

import pytest
from confluent_kafka import Producer

from gateway.commands.arguments import addresses
from gateway.commands.client import Cluster
from gateway.commands.reader import Reader
from tests.commands.terminal import Prompt, consume, consumer, produce
from tests.commands.terminal import sluice as sluice
from tests.commands.terminal import topic as topic
from tests.gateway_process import GatewayProcess


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    given = io.BytesIO()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(given))
    return given


def write(stdin: io.BytesIO, text: bytes) -> None:
    stdin.seek(0)
    stdin.truncate()
    stdin.write(text)
    stdin.seek(0)


def test_lines_of_stdin_become_records_for_a_stock_consumer(
    sluice: Prompt, gateway: GatewayProcess, topic: str, stdin: io.BytesIO
) -> None:
    write(stdin, b"one\n\nthree")
    assert sluice("produce", topic, "--partition", "1", "-v").splitlines() == ["1@0", "1@1", "1@2"]
    with consumer(gateway, f"g-{topic}", topic) as member:
        assert consume(member, 3) == ["one", "", "three"]
    write(stdin, b"four\n")
    assert json.loads(sluice("produce", topic, "-p", "1", "--acks", "1", "--json")) == {
        "topic": topic,
        "partition": 1,
        "offset": 3,
    }


def test_keys_go_to_the_partition_of_the_java_client(
    sluice: Prompt, gateway: GatewayProcess, topic: str, stdin: io.BytesIO
) -> None:
    keys = [f"key-{number}" for number in range(20)]
    write(stdin, "".join(f"{key}\ta:b\n" for key in keys).encode())
    sluice("produce", topic, "--key-separator", "\\t", "-H", "source=test")
    producer = Producer({"bootstrap.servers": gateway.bootstrap, "partitioner": "murmur2_random"})
    for key in keys:
        producer.produce(topic, "stock", key=key)
    assert producer.flush(30) == 0
    placed: dict[str, set[int]] = {}
    ours: list[str] = []
    for line in sluice("consume", topic, "-e", "-f", "%p\\t%k\\t%s\\t%h\\n").splitlines():
        partition, key, value, headers = line.split("\t")
        placed.setdefault(key, set()).add(int(partition))
        if value != "stock":
            ours.append(f"{value} {headers}")
    assert ours == ["a:b source=test"] * 20
    assert set(placed) == set(keys)
    assert {len(partitions) for partitions in placed.values()} == {1}
    assert set().union(*placed.values()) == {0, 1}
    write(stdin, b"k:v\nno separator\n")
    said = sluice("produce", topic, "--key-separator", ":", code=1)
    assert said == ("sluice: line 2 has no key separator between a key and a value; 0 records were appended before\n")


@pytest.mark.parametrize("more", [(), ("-H", f"source={'s' * 40}")])
def test_a_file_of_short_lines_is_appended_in_batches_that_the_topic_accepts(
    sluice: Prompt, topic: str, stdin: io.BytesIO, more: tuple[str, ...]
) -> None:
    sluice("topics", "alter", topic, "--set", "max.message.bytes=100000")
    write(stdin, b"1\n" * 20_000 + b"2" * 90_000 + b"\n" + b"3\n" * 10_000)
    sluice("produce", topic, "-p", "0", *more)
    found = sluice("consume", topic, "-e", "-p", "0").splitlines()
    assert found == ["1"] * 20_000 + ["2" * 90_000] + ["3"] * 10_000


def test_consume_starts_where_it_is_told_and_stops_after_n_records(
    sluice: Prompt, gateway: GatewayProcess, topic: str
) -> None:
    produce(gateway, topic, 0, ["a", "b", "c", "d"])
    one = ("consume", topic, "-p", "0", "-f", "%t %p %o %k %s %T%%\\n")
    assert sluice(*one, "-n", "1") == f"{topic} 0 0 k0 a 1000%\n"
    assert sluice(*one, "-n", "1", "--from", "2") == f"{topic} 0 2 k2 c 3000%\n"
    assert sluice(*one, "-n", "1", "--from", "1970-01-01T00:00:01.500Z") == f"{topic} 0 1 k1 b 2000%\n"
    assert sluice(*one, "-n", "1", "--from", "1970-01-01T00:00:01.001Z") == f"{topic} 0 1 k1 b 2000%\n"
    assert sluice("consume", topic, "-e") == "a\nb\nc\nd\n"
    assert sluice("consume", topic, "-e", "--from", "end") == ""
    (line,) = sluice("consume", topic, "-n", "1", "--from", "3", "-p", "0", "--json").splitlines()
    assert (json.loads(line)["offset"], json.loads(line)["value"]) == (3, "d")
    assert "give beginning, end, an offset" in sluice("consume", topic, "--from", "soon", code=1)
    assert "--format has no %x" in sluice("consume", topic, "-f", "%x", code=1)
    assert "partitions 0 to 1" in sluice("consume", topic, "-p", "2", code=1)


def test_consume_escapes_control_characters_for_a_terminal_only(
    sluice: Prompt, gateway: GatewayProcess, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(gateway, topic, 0, ["\x1b[2Jgone"])
    assert sluice("consume", topic, "-e") == "\x1b[2Jgone\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert sluice("consume", topic, "-e") == "\\x1b[2Jgone\n"


@pytest.mark.parametrize("verb", ["produce", "consume"])
def test_a_mistyped_topic_of_a_record_command_is_answered_with_the_nearest_names(
    sluice: Prompt, topic: str, verb: str
) -> None:
    mistyped = topic.replace("orders", "order")
    said = sluice(verb, mistyped, code=1)
    assert said.startswith(f"sluice: there is no topic {mistyped}; did you mean ")
    assert topic in said


def test_consume_waits_between_its_questions_for_a_leader(
    gateway: GatewayProcess, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Cluster.ask

    def without_leaders(self: Cluster, response_type: type[Any], request: object, **more: Any) -> Any:
        response = ask(self, response_type, request, **more)
        (found,) = response.topics
        partitions = tuple(dataclasses.replace(each, leader_id=-1) for each in found.partitions)
        return dataclasses.replace(response, topics=(dataclasses.replace(found, partitions=partitions),))

    monkeypatch.setattr(Cluster, "ask", without_leaders)
    with Cluster(addresses(gateway.bootstrap), timeout_s=10) as cluster:
        began_at_s = time.monotonic()
        assert list(Reader(cluster, topic, {0: 0}).read([0], max_wait_ms=200)) == []
        assert time.monotonic() - began_at_s >= 0.2
