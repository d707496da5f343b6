"""If the gateway refuses aiokafka's token, aiokafka mistakes the reason of the refusal for a success. It does the same
with Kafka. So this test cannot check a refusal.
"""

# The type stubs of these clients declare only a part of their API.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportCallIssue=false

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.abc import AbstractTokenProvider
from confluent_kafka import KafkaError, Producer
from kafka import KafkaProducer
from kafka.errors import KafkaError as PythonKafkaError
from kafka.net.sasl.oauth import AbstractTokenProvider as PythonTokenProvider

from tests.clients.workers import counted
from tests.conftest import gateways
from tests.frames.members import fresh
from tests.postgres import Databases
from tests.secured import Secured, start_secured
from tests.steps.waiting import wait_for
from tests.tokens import Issuer, key_set, oauth_settings, published


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("issuer"))


@pytest.fixture(scope="module")
def node(postgres: Databases, issuer: Issuer) -> Iterator[Secured]:
    with published() as place, gateways(postgres) as factory:
        place.answers["/keys"] = key_set(issuer.jwk())
        yield start_secured(factory, oauth_settings(f"{place.url}/keys"))


def librdkafka(node: Secured, token: Callable[[], str], lifetime_s: float, errors: list[KafkaError]) -> Producer:
    return Producer(
        {
            "bootstrap.servers": node.sasl,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "OAUTHBEARER",
            "oauth_cb": lambda _: (token(), time.time() + lifetime_s),
            "error_cb": errors.append,
        }
    )


def test_confluent_kafka_continues_with_new_tokens(node: Secured, issuer: Issuer) -> None:
    topic = fresh("oauth")
    errors: list[KafkaError] = []
    producer = librdkafka(node, lambda: issuer.token(exp=int(time.time()) + 5), 5, errors)

    def again() -> bool:
        producer.produce(topic, b"")
        assert producer.flush(10) == 0
        return bool(counted(node.gateway, "successful_reauthentication_total"))

    wait_for(again, "librdkafka authenticates again")
    assert not errors


def test_confluent_kafka_with_a_token_for_another_audience_is_refused(node: Secured, issuer: Issuer) -> None:
    errors: list[KafkaError] = []
    producer = librdkafka(node, lambda: issuer.token(aud="another"), 300, errors)
    deadline_s = time.monotonic() + 30
    while not any(error.name() == "_AUTHENTICATION" for error in errors):
        producer.poll(0.1)
        assert time.monotonic() < deadline_s, errors


def refused_logins(node: Secured) -> float:
    return sum(counted(node.gateway, "failed_authentication_total").values())


def python(node: Secured, provider: Any) -> dict[str, Any]:
    return {
        "bootstrap_servers": node.sasl,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauth_token_provider": provider,
    }


def test_kafka_python_authenticates_by_token_and_an_expired_one_is_refused(node: Secured, issuer: Issuer) -> None:
    class Provider(PythonTokenProvider):
        def __init__(self, **changed: Any) -> None:
            self._changed = changed

        def token(self) -> str:
            return issuer.token(**self._changed)

    producer = KafkaProducer(**python(node, Provider()))
    assert producer.send(fresh("oauth"), b"from kafka-python").get(30).offset == 0
    producer.close()
    before = refused_logins(node)
    with pytest.raises(PythonKafkaError):
        KafkaProducer(**python(node, Provider(exp=1, iat=0)), bootstrap_timeout_ms=1_000).partitions_for("t")
    wait_for(lambda: refused_logins(node) > before, "a refused login is counted")


async def test_aiokafka_authenticates_by_token(node: Secured, issuer: Issuer) -> None:
    """If the gateway refuses aiokafka's token, aiokafka mistakes the reason of the refusal for a success. It does the
    same with Kafka. So this test cannot check a refusal.
    """

    class Provider(AbstractTokenProvider):
        async def token(self) -> str:
            return issuer.token()

    async with AIOKafkaProducer(**python(node, Provider())) as producer:
        assert (await producer.send_and_wait(fresh("oauth"), b"from aiokafka")).offset == 0
