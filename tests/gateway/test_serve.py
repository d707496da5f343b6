"""The greeting that `sluice serve` prints once it serves."""

from __future__ import annotations

from gateway.config.settings import load
from gateway.serve import greeting

MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
PLAIN_USERS = f'listener.name.{{}}.plain.sasl.jaas.config={MODULE} required user_a="b";'


def greeted(*assignments: str, **addresses: str) -> list[str]:
    settings = load({}, assignments, {}).settings
    return greeting(settings, "127.0.0.1:9092", addresses).splitlines()


def test_the_greeting_of_a_plain_listener_shows_commands_without_options() -> None:
    assert greeted() == [
        "Sluice serves Kafka clients at 127.0.0.1:9092. To try it:",
        "  echo hello | kcat -b 127.0.0.1:9092 -t hello -P",
        "  kcat -b 127.0.0.1:9092 -t hello -C -e",
        "  python3 -m kafka.admin -b 127.0.0.1:9092 topics list   (pip install kafka-python)",
    ]


def test_the_greeting_has_a_line_for_each_listener_with_the_options_it_needs() -> None:
    lines = greeted(
        "listeners=A://h:9092,B://h:0,C://h:3,D://h:4",
        "advertised.listeners=A://h:9092,B://h:0,C://h:3,D://h:4",
        "listener.security.protocol.map=A:PLAINTEXT,B:SASL_PLAINTEXT,C:SSL,D:SASL_SSL",
        "listener.name.b.sasl.enabled.mechanisms=PLAIN",
        PLAIN_USERS.format("b"),
        "ssl.keystore.location=/key.pem",
        "ssl.truststore.location=/ca.pem",
        "listener.name.c.ssl.client.auth=required",
        "listener.name.d.sasl.enabled.mechanisms=SCRAM-SHA-512",
        B="h:5",
    )
    authority = "-X ssl.ca.location=CA.pem"
    sasl = "-X sasl.username=USER -X sasl.password=PASSWORD"
    own = "-X ssl.certificate.location=CERTIFICATE.pem -X ssl.key.location=KEY.pem"
    assert lines[4:] == [
        "Listener B:",
        f"  kcat -b h:5 -L -X security.protocol=SASL_PLAINTEXT -X sasl.mechanism=PLAIN {sasl}",
        "Listener C:",
        f"  kcat -b h:3 -L -X security.protocol=SSL -X ssl.ca.location=CA.pem {own}",
        "Listener D:",
        f"  kcat -b h:4 -L -X security.protocol=SASL_SSL -X sasl.mechanism=SCRAM-SHA-512 {sasl} {authority}",
    ]


def test_the_greeting_of_a_secured_first_listener_shows_its_options() -> None:
    lines = greeted(
        "listeners=B://127.0.0.1:9092",
        "listener.security.protocol.map=B:SASL_PLAINTEXT",
        "listener.name.b.sasl.enabled.mechanisms=PLAIN",
        PLAIN_USERS.format("b"),
    )
    options = (
        "-X security.protocol=SASL_PLAINTEXT -X sasl.mechanism=PLAIN -X sasl.username=USER -X sasl.password=PASSWORD"
    )
    assert lines[1:] == [
        f"  echo hello | kcat -b 127.0.0.1:9092 -t hello -P {options}",
        f"  kcat -b 127.0.0.1:9092 -t hello -C -e {options}",
    ]
