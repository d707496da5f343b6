"""Answers of brokers that are broken, newer than this program, or impostors: one line, and no traceback."""

from __future__ import annotations

import dataclasses
import io
import uuid
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from gateway.cli import main
from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError
from gateway.commands.render import table
from gateway.commands.security import ClientSecurity
from protocol.errors import ErrorCode
from protocol.messages.delete_topics import DeleteTopicsRequest
from protocol.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    TransactionState,
)
from protocol.messages.list_offsets import ListOffsetsRequest
from tests.commands.terminal import Prompt, produce
from tests.commands.terminal import sluice as sluice
from tests.commands.terminal import topic as topic
from tests.gateway_process import GatewayProcess
from tests.steps.moved import without_leader


@pytest.mark.parametrize(
    "rest",
    [
        # An impostor could guess the password at four thousand times the usual speed.
        b",s=c2FsdA==,i=1",
        b",s=c2FsdA==,i=0",
        b",s=c2Fsd,i=4096",
        b",s=c2FsdA==,i=4096\xff",
    ],
)
def test_a_scram_answer_that_kafkas_clients_refuse_gets_no_proof(rest: bytes) -> None:
    sent: list[bytes] = []

    def send(token: bytes) -> bytes:
        sent.append(token)
        return b"r=" + token.rpartition(b"r=")[2] + b"more" + rest

    with pytest.raises(CommandError, match="does not follow SCRAM"):
        ClientSecurity(mechanism="SCRAM-SHA-256", user="ana", password="secret").authenticate(send)
    assert len(sent) == 1


@pytest.mark.parametrize("host", ["broker..example", f"{'a' * 64}.example"])
def test_a_mistyped_host_is_one_line(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topics", "list", "-b", f"{host}:9092"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sluice: {host}:9092 cannot be reached: ")


@pytest.mark.parametrize(
    "words", [("topics", "create", "t", "--partitions", "9999999999"), ("topics", "describe", "\udcff")]
)
def test_a_value_that_no_request_can_hold_is_one_line(sluice: Prompt, words: tuple[str, ...]) -> None:
    said = sluice(*words, code=1)
    assert said.startswith("sluice: ")
    assert said.count("\n") == 1


def test_the_key_of_a_header_that_is_not_utf_8_is_one_line(sluice: Prompt, topic: str) -> None:
    said = sluice("produce", topic, "-H", "\udcff=value", code=1)
    assert said.startswith("sluice: --header ")
    assert said.endswith(": the key must be UTF-8\n")


def test_a_password_that_is_not_utf_8_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main(["users", "add", "bob", "--password-stdin", "--data-dir", str(tmp_path / "absent")]) == 1
    assert capsys.readouterr().err == "sluice: the password must be UTF-8\n"


def test_an_error_that_only_newer_brokers_know_is_shown_by_its_number(
    sluice: Prompt, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Cluster.ask

    def newer(self: Cluster, response_type: type[Any], request: object, **more: Any) -> Any:
        response = ask(self, response_type, request, **more)
        if not isinstance(request, DeleteTopicsRequest):
            return response
        (result,) = response.responses
        return dataclasses.replace(response, responses=(dataclasses.replace(result, error_code=9_999),))

    monkeypatch.setattr(Cluster, "ask", newer)
    assert "error 9999" in sluice("topics", "delete", topic, code=1)


def test_tail_names_a_partition_that_does_not_answer(
    sluice: Prompt, gateway: GatewayProcess, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for partition in range(2):
        produce(gateway, topic, partition, ["a"])
    ask = Cluster.ask

    def moving(self: Cluster, response_type: type[Any], request: object, **more: Any) -> Any:
        response = ask(self, response_type, request, **more)
        if not isinstance(request, ListOffsetsRequest):
            return response
        return without_leader(response)

    monkeypatch.setattr(Cluster, "ask", moving)
    assert f"{topic}[0] does not answer now" in sluice("topics", "tail", topic, code=1)


def test_a_transaction_that_its_coordinator_cannot_describe_now_is_not_left_out(
    sluice: Prompt, gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"loading-{uuid.uuid4().hex[:8]}"
    Producer({"bootstrap.servers": gateway.bootstrap, "transactional.id": name}).init_transactions(30)
    ask = Cluster.ask

    def loading(self: Cluster, response_type: type[Any], request: object, **more: Any) -> Any:
        if not isinstance(request, DescribeTransactionsRequest):
            return ask(self, response_type, request, **more)
        states = [
            TransactionState(transactional_id=each, error_code=ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
            for each in request.transactional_ids
        ]
        return DescribeTransactionsResponse(transaction_states=tuple(states))

    monkeypatch.setattr(Cluster, "ask", loading)
    assert "COORDINATOR_LOAD_IN_PROGRESS" in sluice("transactions", "list", code=1)


def test_a_name_of_a_setting_moves_no_cursor() -> None:
    assert "\x1b" not in "".join(table([{"configs": {"a\x1b[2J": "1"}}], ("configs",)))
