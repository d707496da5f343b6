"""The usual commands against a gateway and against Apache Kafka. Both must yield the same JSON."""

from __future__ import annotations

import io
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gateway.cli import main
from tests.gateway_process import GatewayFactory
from tests.kafka.process import KafkaProcess, assemble

pytestmark = pytest.mark.long

AUTHORIZER = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
}
DAILY: list[tuple[tuple[str, ...], str]] = [
    (("topics", "create", "orders", "--partitions", "2", "--set", "retention.ms=3600000"), ""),
    (("topics", "create", "orders"), ""),
    (("topics", "list"), ""),
    (("produce", "orders", "-k", ":"), "a:one\nb:two\nc:three\nd:four\n"),
    (("produce", "orders", "-p", "0", "-H", "source=test", "--acks", "1"), "five\n"),
    (("consume", "orders", "-e", "-p", "0"), ""),
    (("consume", "orders", "-e", "-p", "1", "--from", "1"), ""),
    (("topics", "describe", "orders"), ""),
    (("topics", "alter", "orders", "--set", "cleanup.policy=compact", "--delete", "retention.ms"), ""),
    (("topics", "alter", "orders", "--set", "retention.mss=1"), ""),
    (("topics", "add-partitions", "orders", "--to", "3"), ""),
    (("topics", "delete-records", "orders", "--partition", "0", "--before", "1"), ""),
    (("topics", "describe", "order"), ""),
    (("consume", "orders", "-g", "readers", "-e"), ""),
    (("produce", "orders", "-p", "1", "-k", ":"), "e:six\n"),
    (("consume", "orders", "-g", "readers", "-e"), ""),
    (("produce", "orders", "-p", "1", "-k", ":"), "f:seven\n"),
    (("groups", "list"), ""),
    (("groups", "lag", "readers", "--by-partition"), ""),
    (("groups", "describe", "readers"), ""),
    (("groups", "describe", "reader"), ""),
    (("groups", "reset-offsets", "readers", "--topic", "orders:0", "--to-earliest", "--execute"), ""),
    (("groups", "lag", "readers"), ""),
    (("top", "readers", "--once", "--interval", "0.2"), ""),
    (("groups", "delete", "readers", "absent"), ""),
    (("acls", "add", "--allow", "User:carol", "--operation", "read", "--topic", "orders", "--prefixed"), ""),
    (("acls", "list", "--topic", "orders"), ""),
    (("acls", "list", "--topic", "orders-new"), ""),
    (("acls", "remove", "--principal", "User:carol", "--execute"), ""),
    (("acls", "remove", "--principal", "User:carol"), ""),
    (("quotas", "set", "producer_byte_rate=1048576", "--user", "carol"), ""),
    (("quotas", "set", "consumer_byte_rate=1000.5", "--default-client-id"), ""),
    (("quotas", "list"), ""),
    (("quotas", "remove", "--user", "carol"), ""),
    (("quotas", "list", "--user", "carol"), ""),
    (("configs", "alter", "broker", "--set", "log.retention.ms=7000000"), ""),
    (("configs", "describe", "broker"), ""),
    (("configs", "alter", "group", "readers", "--set", "consumer.session.timeout.ms=50000"), ""),
    (("configs", "describe", "group", "readers", "--changed"), ""),
    (("transactions", "list"), ""),
    (("cluster", "info"), ""),
    (("topics", "delete", "orders", "absent"), ""),
]
"""The words of a command, and its standard input."""

SHOWN_WITHIN_S = 10.0

_UUID = re.compile(r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
_OWN = frozenset({"id", "broker", "controller", "node", "host", "port", "epoch", "leader", "time", "timestamp_ms"})
"""Fields that differ between any two clusters."""


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaProcess]:
    if shutil.which("java") is None or shutil.which("mvn") is None:
        pytest.skip("Apache Kafka needs java and mvn")
    assemble()
    process = KafkaProcess(tmp_path_factory.mktemp("kafka"), settings=AUTHORIZER)
    process.start()
    yield process
    process.close()


Run = Callable[[str, tuple[str, ...], str], Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def ask(bootstrap: str, words: tuple[str, ...], stdin: str) -> Any:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        code = main([*words, "--json", "-b", bootstrap])
        captured = capsys.readouterr()
        lines = words[0] in ("produce", "consume")
        shown = [json.loads(line) for line in captured.out.splitlines()] if lines else json.loads(captured.out or "[]")
        if lines:
            shown.sort(key=lambda row: (row["partition"], row["offset"]))
        return {"code": code, "out": comparable(shown), "error": captured.err}

    return ask


def is_reading(words: tuple[str, ...]) -> bool:
    return words[1] in ("list", "describe", "lag", "info") or (words[1] == "remove" and "--execute" not in words)


def comparable(value: Any) -> Any:
    """Return the JSON without the fields that differ between any two clusters."""
    if isinstance(value, dict):
        return {key: comparable(each) for key, each in value.items() if key not in _OWN}
    if isinstance(value, list):
        return [comparable(each) for each in value]
    return "UUID" if isinstance(value, str) and _UUID.match(value) else value


def test_daily_commands_yield_the_same_json_from_apache_kafka(
    kafka: KafkaProcess, gateway_factory: GatewayFactory, run: Run
) -> None:
    gateway = gateway_factory(AUTHORIZER)
    differences: list[str] = []
    for words, stdin in DAILY:
        ours, theirs = (run(bootstrap, words, stdin) for bootstrap in (gateway.bootstrap, kafka.bootstrap))
        # Kafka confirms a change a moment before it shows the change, so the test may repeat a command that only reads.
        deadline = time.monotonic() + SHOWN_WITHIN_S
        while ours != theirs and is_reading(words) and time.monotonic() < deadline:
            theirs = run(kafka.bootstrap, words, stdin)
        if ours != theirs:
            differences.append(f"{' '.join(words)}\n  gateway: {ours}\n  kafka:   {theirs}")
    assert not differences, "\n".join(differences)
