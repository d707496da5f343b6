"""Stock clients over TLS: correct and wrong certificates, on either side, with and without passwords."""

# The type stubs of these clients declare only a part of their API.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kafka import KafkaConsumer, KafkaProducer
from kafka.errors import KafkaError as PythonKafkaError

from gateway.cli import main
from tests.clients.workers import counted
from tests.conftest import gateways
from tests.frames.members import fresh
from tests.gateway_process import GatewayProcess, free_ports
from tests.postgres import Databases
from tests.secured import USERS, Authority, Certificate, jaas
from tests.steps.waiting import wait_for

DN = "/O=Sluice, Inc./OU=a+OU=b/CN=alice"


@dataclass(frozen=True)
class Nodes:
    """Two nodes on one database, each with four listeners: OPEN, TLS (certificates requested), MUTUAL (certificates
    required) and BOTH (SASL_SSL)."""

    gateways: tuple[GatewayProcess, GatewayProcess]
    ports: tuple[list[int], list[int]]
    authority: Authority
    client: Certificate
    stranger: Certificate
    expired: Certificate
    other: Authority

    def address(self, listener: str, node: int = 0) -> str:
        return f"localhost:{self.ports[node][('OPEN', 'TLS', 'MUTUAL', 'BOTH').index(listener)]}"


@pytest.fixture(scope="module")
def nodes(postgres: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    directory = tmp_path_factory.mktemp("certificates")
    authority, other = Authority(directory, "authority"), Authority(directory, "other")
    server = authority.issue("/CN=localhost", password="key's password")
    plain = authority.issue("/CN=localhost")
    one_line = {
        "key": " ".join(plain.key.read_text().split("\n")),
        "chain": " ".join(plain.certificate.read_text().split("\n")),
    }
    with gateways(postgres) as factory:
        started: list[GatewayProcess] = []
        ports = (free_ports(4), free_ports(4))
        for taken in ports:
            names = ("OPEN", "TLS", "MUTUAL", "BOTH")
            url = started[0].database_url if started else None
            settings = {
                "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in zip(names, taken, strict=True)),
                "advertised.listeners": ",".join(
                    f"{name}://localhost:{port}" for name, port in zip(names, taken, strict=True)
                ),
                "listener.security.protocol.map": "OPEN:PLAINTEXT,TLS:SSL,MUTUAL:SSL,BOTH:SASL_SSL",
                "ssl.keystore.type": "PEM",
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(authority.certificate),
                "listener.name.tls.ssl.keystore.location": str(server.whole),
                "listener.name.tls.ssl.key.password": "key's password",
                "listener.name.tls.ssl.client.auth": "requested",
                "listener.name.mutual.ssl.keystore.key": one_line["key"],
                "listener.name.mutual.ssl.keystore.certificate.chain": one_line["chain"],
                "listener.name.mutual.ssl.client.auth": "required",
                "listener.name.mutual.ssl.principal.mapping.rules": r"RULE:^CN=([^,]+),.*$/$1/U,DEFAULT",
                "listener.name.mutual.ssl.enabled.protocols": "TLSv1.3",
                "listener.name.both.ssl.keystore.location": str(plain.whole),
                "listener.name.both.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
                "listener.name.both.plain.sasl.jaas.config": jaas(),
                "group.initial.rebalance.delay.ms": "0",
            }
            started.append(factory(settings=settings, database_url=url))
        yield Nodes(
            (started[0], started[1]),
            ports,
            authority,
            authority.issue(DN),
            other.issue(DN),
            authority.issue(DN, days=-1),
            other,
        )


HELLO = bytes.fromhex("0000000d 0012 0000 00000007 0003") + b"tls"
"""An ApiVersions request in version 0."""


class Visitor:
    """A connection to a TLS listener that does not verify the server."""

    def __init__(self, port: int) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._socket = context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=30))
        self.seen = self._socket.getpeercert(binary_form=True)

    def is_answered(self) -> bool:
        self._socket.sendall(HELLO)
        return self._socket.recv(8)[4:] == b"\x00\x00\x00\x07"

    def close(self) -> None:
        self._socket.close()


def test_certificates_change_while_a_node_serves(postgres: Databases, tmp_path: Path) -> None:
    """Open connections continue. Later connections see the new certificate, also after a restart (KIP-226)."""
    authority = Authority(tmp_path, "authority")
    first, second = (authority.issue("/CN=localhost") for _ in range(2))
    name = "listener.name.tls.ssl.keystore.location"

    def der(certificate: Certificate) -> bytes:
        return ssl.PEM_cert_to_DER_cert(certificate.certificate.read_text())

    def alter(operation: AlterConfigOpType, value: str | None, of: str = name) -> None:
        entry = ConfigEntry(of, value, incremental_operation=operation)
        resource = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=[entry])
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{open_port}"})
        for future in admin.incremental_alter_configs([resource]).values():
            future.result(30)

    def shown_to_a_visitor() -> bytes | None:
        visitor = Visitor(tls_port)
        assert visitor.is_answered()
        visitor.close()
        return visitor.seen

    with gateways(postgres) as factory:
        open_port, tls_port = free_ports(2)
        settings = {
            "listeners": f"OPEN://127.0.0.1:{open_port},TLS://127.0.0.1:{tls_port}",
            "listener.security.protocol.map": "OPEN:PLAINTEXT,TLS:SSL",
            name: str(first.whole),
        }
        node = factory(settings=settings)
        guest = Visitor(tls_port)
        assert guest.seen == der(first)
        with pytest.raises(KafkaException, match="No such file"):
            alter(AlterConfigOpType.SET, str(tmp_path / "absent.pem"))
        assert shown_to_a_visitor() == der(first)
        alter(AlterConfigOpType.SET, str(second.whole))
        assert shown_to_a_visitor() == der(second)
        assert guest.is_answered()
        guest.close()
        node.kill()
        node.start()
        assert shown_to_a_visitor() == der(second)
        # The node reads the file again if the file's content changes, although its name does not.
        second.whole.write_text(first.whole.read_text())
        alter(AlterConfigOpType.SET, str(second.whole))
        assert shown_to_a_visitor() == der(first)
        # A change of another setting succeeds, although the files of the certificates no longer exist.
        second.whole.unlink()
        alter(AlterConfigOpType.SET, "2000000", of="message.max.bytes")
        alter(AlterConfigOpType.DELETE, None)
        assert shown_to_a_visitor() == der(first)


@pytest.fixture(scope="module", autouse=True)
def silence_s(nodes: Nodes) -> Iterator[Future[float]]:
    """After how many seconds a node closes a connection whose TLS handshake never begins. The other tests run in the
    meantime.
    """
    began_s = time.monotonic()
    with ThreadPoolExecutor(1) as pool, raw(nodes, "TLS", 1) as silent:

        def closed_after() -> float:
            assert silent.recv(1) == b""
            return time.monotonic() - began_s

        yield pool.submit(closed_after)
        with contextlib.suppress(OSError):
            silent.shutdown(socket.SHUT_RDWR)


def librdkafka(nodes: Nodes, listener: str, node: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap.servers": nodes.address(listener, node),
        "security.protocol": "SSL",
        "ssl.ca.location": str(nodes.authority.certificate),
        **{name.replace("_", "."): value for name, value in more.items()},
    }


def shown(certificate: Certificate) -> dict[str, str]:
    return {"ssl.certificate.location": str(certificate.certificate), "ssl.key.location": str(certificate.key)}


def as_alice() -> dict[str, str]:
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "alice",
        "sasl.password": USERS["alice"],
    }


def round_trip(producing: dict[str, Any], consuming: dict[str, Any]) -> None:
    topic = fresh("tls")
    # Several megabytes, so that an answer is longer than one TLS record.
    values = [os.urandom(900_000) for _ in range(12)]
    producer = Producer(producing)
    for value in values:
        producer.produce(topic, value)
        producer.poll(0)
    assert producer.flush(30) == 0
    consumer = Consumer({**consuming, "group.id": fresh("group"), "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    got: list[bytes | None] = []
    deadline_s = time.monotonic() + 60
    while len(got) < len(values):
        message = consumer.poll(1)
        if message is not None:
            assert message.error() is None, message.error()
            got.append(message.value())
        assert time.monotonic() < deadline_s
    assert got == values
    consumer.close()


@pytest.mark.parametrize("listener", ["TLS", "MUTUAL", "BOTH"])
def test_confluent_kafka_over_tls_reads_what_it_produced(nodes: Nodes, listener: str) -> None:
    more = {"TLS": {}, "MUTUAL": shown(nodes.client), "BOTH": as_alice()}[listener]
    round_trip({**librdkafka(nodes, listener), **more}, {**librdkafka(nodes, listener, 1), **more})


def refused(config: dict[str, Any], names: tuple[str, ...]) -> str:
    errors: list[KafkaError] = []
    producer = Producer({**config, "error_cb": errors.append})
    deadline_s = time.monotonic() + 30
    while not any(error.name() in names for error in errors):
        producer.poll(0.1)
        assert time.monotonic() < deadline_s, errors
    return " ".join(str(error) for error in errors)


def failed(nodes: Nodes) -> float:
    return counted(nodes.gateways[0], "protocol_errors_total").get("tls_handshake", 0)


def test_confluent_kafka_with_wrong_certificates_is_refused(nodes: Nodes) -> None:
    tls_errors = ("_SSL", "_TRANSPORT", "_ALL_BROKERS_DOWN")
    stranger = {"ssl.ca.location": str(nodes.other.certificate)}
    assert "verify" in refused({**librdkafka(nodes, "TLS"), **stranger}, ("_SSL",))
    before = failed(nodes)
    refused({**librdkafka(nodes, "MUTUAL"), **shown(nodes.stranger)}, tls_errors)
    wait_for(lambda: failed(nodes) > before, "a certificate of another authority is counted")
    before = failed(nodes)
    refused(librdkafka(nodes, "MUTUAL"), tls_errors)
    wait_for(lambda: failed(nodes) > before, "none is counted where one is demanded")
    refused({**librdkafka(nodes, "BOTH"), **as_alice(), "sasl.password": "wrong"}, ("_AUTHENTICATION",))


def test_kafka_python_over_tls_produces_and_refuses_a_wrong_authority(nodes: Nodes) -> None:
    topic = fresh("tls")
    config: dict[str, Any] = {
        "bootstrap_servers": nodes.address("MUTUAL"),
        "security_protocol": "SSL",
        "ssl_cafile": str(nodes.authority.certificate),
        "ssl_certfile": str(nodes.client.certificate),
        "ssl_keyfile": str(nodes.client.key),
    }
    producer = KafkaProducer(**config)
    producer.send(topic, b"from kafka-python").get(30)
    producer.close()
    consumer = KafkaConsumer(topic, auto_offset_reset="earliest", **config)
    assert next(consumer).value == b"from kafka-python"
    consumer.close()
    wrong = {**config, "ssl_cafile": str(nodes.other.certificate)}
    before = failed(nodes)
    with pytest.raises(PythonKafkaError):
        KafkaProducer(**wrong, bootstrap_timeout_ms=1_000).partitions_for(topic)
    wait_for(lambda: failed(nodes) > before, "a failed handshake is counted")


async def test_aiokafka_over_tls_reads_what_it_produced(nodes: Nodes) -> None:
    topic = fresh("tls")
    config: dict[str, Any] = {
        "security_protocol": "SASL_SSL",
        "ssl_context": ssl.create_default_context(cafile=str(nodes.authority.certificate)),
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "alice",
        "sasl_plain_password": USERS["alice"],
    }
    async with AIOKafkaProducer(bootstrap_servers=nodes.address("BOTH"), **config) as producer:
        await producer.send_and_wait(topic, b"from aiokafka")
    consumer = AIOKafkaConsumer(
        topic, auto_offset_reset="earliest", bootstrap_servers=nodes.address("BOTH", 1), **config
    )
    async with consumer:
        assert (await consumer.getone()).value == b"from aiokafka"


def raw(nodes: Nodes, listener: str, node: int = 0) -> socket.socket:
    host, _, port = nodes.address(listener, node).rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_a_client_that_does_not_speak_tls_is_counted_and_logged(nodes: Nodes) -> None:
    before = failed(nodes)
    with raw(nodes, "TLS") as plain:
        plain.sendall(bytes.fromhex("0000000f001200000000000100057072") + b"obe")
        while plain.recv(1024):  # The gateway sends an alert, then closes.
            pass
    wait_for(lambda: failed(nodes) == before + 1, "counted")
    assert "a TLS handshake failed" in nodes.gateways[0].log_text()
    frames = counted(nodes.gateways[0], "protocol_errors_total").get("frame_size", 0)
    context = ssl.create_default_context(cafile=str(nodes.authority.certificate))
    with raw(nodes, "OPEN") as plain, pytest.raises(OSError):  # noqa: PT011
        context.wrap_socket(plain, server_hostname="localhost")
    assert counted(nodes.gateways[0], "protocol_errors_total")["frame_size"] == frames + 1
    assert "the client speaks TLS" in nodes.gateways[0].log_text()


def test_only_enabled_versions_are_spoken(nodes: Nodes) -> None:
    context = ssl.create_default_context(cafile=str(nodes.authority.certificate))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with raw(nodes, "TLS") as plain, context.wrap_socket(plain, server_hostname="localhost") as connected:
        assert connected.version() == "TLSv1.2"
    context.load_cert_chain(nodes.client.whole)
    with raw(nodes, "MUTUAL") as plain, pytest.raises(OSError):  # noqa: PT011
        context.wrap_socket(plain, server_hostname="localhost")
    with pytest.deprecated_call():
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with raw(nodes, "TLS") as plain, pytest.raises(OSError):  # noqa: PT011
        context.wrap_socket(plain, server_hostname="localhost")


@pytest.mark.parametrize(
    ("listener", "certificate", "principal"),
    [
        ("TLS", False, "User:ANONYMOUS"),
        ("TLS", True, "User:CN=alice,OU=a+OU=b,O=Sluice\\, Inc."),
        ("MUTUAL", True, "User:ALICE"),
        ("BOTH", True, "User:alice"),
    ],
)
def test_a_clients_principal_comes_from_its_certificate_or_its_password(
    nodes: Nodes, listener: str, certificate: bool, principal: str
) -> None:
    """The test reads the principal from the log line about a change that the client makes."""
    more = {**(shown(nodes.client) if certificate else {}), **(as_alice() if listener == "BOTH" else {})}
    admin = AdminClient({**librdkafka(nodes, listener), **more})
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    (made,) = admin.alter_user_scram_credentials([UserScramCredentialUpsertion(fresh("user"), info, b"x")]).values()
    made.result(30)
    said = [json.loads(line) for line in nodes.gateways[0].log_text().splitlines() if "credentials changed" in line]
    assert said[-1]["by"] == principal


def properties(nodes: Nodes, directory: Path, **more: str) -> str:
    given = {
        "ssl.truststore.location": str(nodes.authority.certificate),
        **{k.replace("_", "."): v for k, v in more.items()},
    }
    path = directory / "client.properties"
    path.write_text("".join(f"{name}={value}\n" for name, value in given.items()))
    return str(path)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_commands_read_kafkas_client_properties(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], mechanism: str
) -> None:
    admin = AdminClient({"bootstrap.servers": nodes.address("OPEN")})
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    (made,) = admin.alter_user_scram_credentials([UserScramCredentialUpsertion("alice", info, b"x,y")]).values()
    made.result(30)
    module, password = (
        ("plain.PlainLoginModule", USERS["alice"]) if mechanism == "PLAIN" else ("scram.ScramLoginModule", "x,y")
    )
    topic = fresh("commanded")
    for said, code in ((password, 0), ("wrong", 1)):
        path = properties(
            nodes,
            tmp_path,
            security_protocol="SASL_SSL",
            sasl_mechanism=mechanism,
            sasl_jaas_config=f"org.apache.kafka.common.security.{module} required \\\n"
            f'  username="alice" password="{said}";',
        )
        words = ["topics", "create", topic, "-b", nodes.address("BOTH"), "--command-config", path]
        assert main(words) == code
        captured = capsys.readouterr()
        assert said not in captured.out + captured.err
    assert "Authentication failed" in captured.err
    path = properties(nodes, tmp_path, security_protocol="SSL", ssl_keystore_location=str(nodes.client.whole))
    assert main(["topics", "describe", topic, "-b", nodes.address("MUTUAL", 1), "--command-config", path]) == 0


def login(user: str, password: str) -> str:
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    return f'{module} required username="{user}" password="{password}";'


@pytest.mark.parametrize(
    ("listener", "given", "said"),
    [
        ("TLS", None, "the listener may want TLS or SASL: set security.protocol to SSL, SASL_PLAINTEXT or SASL_SSL in "
         "--command-config FILE"),
        ("TLS", {"security.protocol": "PLAINTEXT"}, "may want TLS or SASL: set security.protocol to SSL, "
         "SASL_PLAINTEXT or SASL_SSL in FILE"),
        ("TLS", {"security.protocol": "SSL", "ssl.truststore.location": "OTHER"},
         "the TLS handshake failed: .*; name the CA of its certificate in FILE: ssl.truststore.location \\(PEM\\)"),
        ("OPEN", {"security.protocol": "SSL"}, "the listener may speak no TLS: check security.protocol in FILE"),
        ("MUTUAL", {"security.protocol": "SSL"}, "the listener may want a client certificate "
         "\\(ssl.keystore.location\\) or SASL \\(security.protocol=SASL_SSL\\): see FILE"),
        ("MUTUAL", {"security.protocol": "SSL", "ssl.keystore.location": "EXPIRED"},
         "the client certificate expired at 2.*Z: renew ssl.keystore.location of FILE"),
        ("BOTH", {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.jaas.config": login("alice", "x")},
         "Invalid username or password; check username and password in FILE"),
        ("BOTH", {"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512",
                  "sasl.jaas.config": login("alice", "x").replace("plain.Plain", "scram.Scram")},
         "UNSUPPORTED_SASL_MECHANISM; set sasl.mechanism to PLAIN or SCRAM-SHA-256 in FILE"),
        ("TLS", {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.jaas.config": login("alice", "x")},
         "the listener has no SASL: check security.protocol in FILE"),
        ("BOTH", {"security.protocol": "SSL"}, "or SASL \\(security.protocol=SASL_SSL\\): see FILE"),
    ],
)  # fmt: skip
def test_a_command_that_is_refused_says_what_to_change(
    nodes: Nodes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    listener: str,
    given: dict[str, str] | None,
    said: str,
) -> None:
    words = ["topics", "list", "-b", nodes.address(listener)]
    path = ""
    if given is not None:
        files = {"OTHER": nodes.other.certificate, "EXPIRED": nodes.expired.whole}
        path = properties(nodes, tmp_path, **{k: str(files.get(v, v)) for k, v in given.items()})
        words += ["--command-config", path]
    assert main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"(?:{said})$", line.replace(path, "FILE") if path else line), line
    assert "--bootstrap" not in line


def test_a_health_check_needs_no_certificate(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    for listener, protocol in (("TLS", "SSL"), ("MUTUAL", "SSL"), ("BOTH", "SASL_SSL")):
        port = nodes.address(listener).rpartition(":")[2]
        given = [f"listeners={listener}://127.0.0.1:{port}", f"listener.security.protocol.map={listener}:{protocol}"]
        given += [f"ssl.keystore.location={nodes.client.whole}", "sasl.enabled.mechanisms=SCRAM-SHA-256"]
        if listener == "MUTUAL":
            given += ["ssl.client.auth=required", f"ssl.truststore.location={nodes.authority.certificate}"]
        monkeypatch.setenv("SLUICE_SET", "\n".join(given))
        assert main(["healthcheck"]) == 0


def test_no_key_is_logged(nodes: Nodes) -> None:
    said = "".join(node.log_text() for node in nodes.gateways)
    assert "key's password" not in said
    assert not re.search("PRIVATE KEY", said)


def test_a_handshake_that_does_not_finish_is_closed(silence_s: Future[float]) -> None:
    assert silence_s.result(60) > 5
