"""Stock clients that must authenticate: correct and wrong passwords, every mechanism, two nodes."""

# The type stubs of these clients declare only a part of their API.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError as AioKafkaError
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from kafka import KafkaProducer
from kafka.errors import KafkaError as PythonKafkaError

from tests.clients.workers import counted
from tests.conftest import gateways
from tests.frames.members import fresh
from tests.postgres import Databases
from tests.secured import MECHANISMS, USERS, Secured, start_secured
from tests.steps.command import sluice
from tests.steps.waiting import wait_for

DAVE, PASSWORD = "dave,=", "päss word"
DAN = "dan"
"""A user with the same password as DAVE. Her name lacks the characters that SCRAM must escape, because kafka-python
does not escape them.
"""
Nodes = tuple[Secured, Secured]


@pytest.fixture(scope="module")
def nodes(postgres: Databases) -> Iterator[Nodes]:
    """Two nodes on one database. The command line created the user `dave` on the second node before any client could
    authenticate.
    """
    with gateways(postgres) as factory:
        first = start_secured(factory)
        second = start_secured(factory, database_url=first.gateway.database_url)
        for user in (DAVE, DAN):
            assert users(second, "add", user, "--password-stdin", said=PASSWORD + "\n").returncode == 0
        yield first, second


def users(node: Secured, *words: str, said: str = "") -> subprocess.CompletedProcess[str]:
    assert node.gateway.database_url is not None
    return sluice("users", *words, "--database-url", node.gateway.database_url, said=said)


def identity(mechanism: str) -> tuple[str, str]:
    return ("bob", USERS["bob"]) if mechanism == "PLAIN" else (DAVE, PASSWORD)


def librdkafka(node: Secured, mechanism: str, user: str, password: str, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap.servers": node.sasl,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": password,
        **more,
    }


def authenticate_with_a_wrong_password(node: Secured, mechanism: str, user: str, password: str) -> None:
    errors: list[KafkaError] = []
    producer = Producer(librdkafka(node, mechanism, user, password, error_cb=errors.append))
    deadline_s = time.monotonic() + 30
    while not any(error.name() == "_AUTHENTICATION" for error in errors):
        producer.poll(0.1)
        assert time.monotonic() < deadline_s, errors


def refused_logins(node: Secured) -> float:
    return sum(counted(node.gateway, "failed_authentication_total").values())


def python(node: Secured, mechanism: str, user: str, password: str) -> dict[str, Any]:
    return {
        "bootstrap_servers": node.sasl,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": mechanism,
        "sasl_plain_username": user,
        "sasl_plain_password": password,
    }


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_confluent_kafka_authenticates_by_each_mechanism(nodes: Nodes, mechanism: str) -> None:
    topic = fresh("secured")
    user, password = identity(mechanism)
    producer = Producer(librdkafka(nodes[0], mechanism, user, password))
    producer.produce(topic, b"from librdkafka")
    assert producer.flush(30) == 0
    more = {"group.id": fresh("group"), "auto.offset.reset": "earliest"}
    consumer = Consumer(librdkafka(nodes[1], mechanism, user, password, **more))
    consumer.subscribe([topic])
    message = consumer.poll(30)
    assert message is not None
    assert message.value() == b"from librdkafka"
    consumer.close()


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("user", [None, "nobody"])
def test_confluent_kafka_with_a_wrong_password_is_refused(nodes: Nodes, mechanism: str, user: str | None) -> None:
    authenticate_with_a_wrong_password(nodes[0], mechanism, user or identity(mechanism)[0], "wrong")


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_kafka_python_authenticates_by_each_mechanism(nodes: Nodes, mechanism: str) -> None:
    user, password = identity(mechanism)
    user = user.replace(DAVE, DAN)
    producer = KafkaProducer(**python(nodes[0], mechanism, user, password))
    assert producer.send(fresh("secured"), b"from kafka-python").get(30).offset == 0
    producer.close()
    before = refused_logins(nodes[1])
    with pytest.raises(PythonKafkaError):
        KafkaProducer(**python(nodes[1], mechanism, user, "wrong"), bootstrap_timeout_ms=1_000).partitions_for("t")
    wait_for(lambda: refused_logins(nodes[1]) > before, "a refused login is counted")


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_aiokafka_authenticates_by_each_mechanism(nodes: Nodes, mechanism: str) -> None:
    topic = fresh("secured")
    user, password = identity(mechanism)
    async with AIOKafkaProducer(**python(nodes[0], mechanism, user, password)) as producer:
        await producer.send_and_wait(topic, b"from aiokafka")
    consumer = AIOKafkaConsumer(topic, auto_offset_reset="earliest", **python(nodes[1], mechanism, user, password))
    async with consumer:
        assert (await consumer.getone()).value == b"from aiokafka"
    with pytest.raises(AioKafkaError):
        await AIOKafkaProducer(**python(nodes[0], mechanism, user, "wrong")).start()


def test_users_are_created_and_deleted_by_an_admin_client(nodes: Nodes) -> None:
    """librdkafka's admin client creates and deletes users, as Kafka's AdminClient does."""
    admin = AdminClient(librdkafka(nodes[0], "PLAIN", "alice", USERS["alice"]))
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 5_000)
    (made,) = admin.alter_user_scram_credentials([UserScramCredentialUpsertion("erin", info, b"erin's")]).values()
    made.result(30)
    described = admin.describe_user_scram_credentials(["erin"])["erin"].result(30)
    (told,) = described.scram_credential_infos
    assert (told.mechanism, told.iterations) == (ScramMechanism.SCRAM_SHA_512, 5_000)
    producer = Producer(librdkafka(nodes[1], "SCRAM-SHA-512", "erin", "erin's"))
    producer.produce(fresh("secured"), b"")
    assert producer.flush(30) == 0
    deletion = UserScramCredentialDeletion("erin", ScramMechanism.SCRAM_SHA_512)
    (gone,) = admin.alter_user_scram_credentials([deletion]).values()
    gone.result(30)
    with pytest.raises(KafkaException, match="does not exist"):
        admin.describe_user_scram_credentials(["erin"])["erin"].result(30)


def test_a_client_reauthenticates_when_its_session_ends(postgres: Databases) -> None:
    with gateways(postgres) as factory:
        node = start_secured(factory, {"connections.max.reauth.ms": "2500"})
        topic = fresh("secured")
        errors: list[KafkaError] = []
        producer = Producer(librdkafka(node, "PLAIN", "alice", USERS["alice"], error_cb=errors.append))

        def again() -> bool:
            producer.produce(topic, b"")
            assert producer.flush(10) == 0
            return bool(counted(node.gateway, "successful_reauthentication_total"))

        wait_for(again, "librdkafka authenticates again")
        assert not errors


def test_the_command_line_creates_lists_and_deletes_users(nodes: Nodes) -> None:
    added = users(nodes[0], "add", "frank", "--mechanism", "SCRAM-SHA-256", "--password-stdin", said="frank's\n")
    assert (added.returncode, added.stdout) == (0, "frank authenticates by SCRAM-SHA-256\n")
    assert "frank's" not in added.stdout + added.stderr
    listed = users(nodes[0], "list")
    assert "frank" in listed.stdout
    assert "SCRAM-SHA-256" in listed.stdout
    other = users(nodes[0], "delete", "frank", "--mechanism", "SCRAM-SHA-512")
    assert other.stderr == "sluice: user frank does not authenticate by SCRAM-SHA-512\n"
    assert users(nodes[0], "delete", "frank").returncode == 0
    assert users(nodes[0], "delete", "frank").stderr == "sluice: there is no user frank\n"
    assert "frank" not in users(nodes[0], "list").stdout
    assert users(nodes[0], "add", "frank", "--password-stdin").stderr == "sluice: the password is empty\n"


def test_no_password_is_returned_or_logged(nodes: Nodes) -> None:
    for mechanism in MECHANISMS:
        user, password = identity(mechanism)
        producer = Producer(librdkafka(nodes[0], mechanism, user, password))
        producer.produce(fresh("secured"), b"")
        assert producer.flush(30) == 0
        authenticate_with_a_wrong_password(nodes[0], mechanism, user, "mistyped secret")
    said = "".join(node.gateway.log_text() for node in nodes)
    assert "a client failed to authenticate" in said
    for secret in (*USERS.values(), PASSWORD, "erin's", "mistyped secret"):
        assert secret not in said
    admin = AdminClient({"bootstrap.servers": nodes[0].open})
    node_id = next(iter(admin.list_topics(timeout=10).brokers))
    (described,) = admin.describe_configs([ConfigResource(ResourceType.BROKER, str(node_id))]).values()
    configs = described.result(10)
    jaas = configs["listener.name.asking.plain.sasl.jaas.config"]
    assert (jaas.value, jaas.is_sensitive, jaas.is_read_only) == (None, True, True)
    assert not any("secret" in (config.value or "") for config in configs.values())
