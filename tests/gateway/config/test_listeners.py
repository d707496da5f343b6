"""Listeners by Kafka's names: bound addresses, advertised addresses, and refusals."""

from __future__ import annotations

import pytest

from gateway.config.definition import ConfigError
from gateway.config.listeners import (
    MAX_LISTENERS,
    Listener,
    parse_listeners,
    parse_roles,
    render_listeners,
    render_roles,
)
from storage.types import Roles

HERE = "this-host"


def test_each_listener_has_a_name_a_protocol_and_two_addresses() -> None:
    assert parse_listeners(
        "internal://127.0.0.1:9092, OUTSIDE://[::1]:9094",
        "OUTSIDE://kafka.example.org:443,INTERNAL://node-1:9092",
        "INTERNAL:PLAINTEXT,outside:plaintext",
        HERE,
    ) == [
        Listener("INTERNAL", "PLAINTEXT", ("127.0.0.1", 9092), ("node-1", 9092)),
        Listener("OUTSIDE", "PLAINTEXT", ("::1", 9094), ("kafka.example.org", 443)),
    ]


@pytest.mark.parametrize("host", ["", "0.0.0.0", "[::]"])
def test_a_listener_on_every_interface_is_advertised_as_this_host(host: str) -> None:
    (listener,) = parse_listeners(f"PLAINTEXT://{host}:7", None, None, HERE)
    assert listener.advertised == (HERE, 7)


@pytest.mark.parametrize(
    ("listeners", "advertised", "protocol_map", "setting", "reason"),
    [
        ("", None, None, "listeners", "NAME://HOST:PORT"),
        ("PLAINTEXT://a", None, None, "listeners", "HOST:PORT"),
        ("PLAINTEXT://a:70000", None, None, "listeners", "HOST:PORT"),
        ("PLAINTEXT://::1:9092", None, None, "listeners", "brackets"),
        ("PLAINTEXT://a:1,plaintext://a:2", None, None, "listeners", "names PLAINTEXT twice"),
        ("PLAINTEXT://a:1,B://a:1", None, "PLAINTEXT:PLAINTEXT,B:PLAINTEXT", "listeners", "one address"),
        ("PLAINTEXT://a:1", "OTHER://a:1", None, "advertised.listeners", "each of PLAINTEXT"),
        ("PLAINTEXT://a:1", "PLAINTEXT://0.0.0.0:1", None, "advertised.listeners", "no address"),
        ("PLAINTEXT://a:1", "PLAINTEXT://:1", None, "advertised.listeners", "no address"),
        ("B://a:1", None, None, "listener.security.protocol.map", "no security protocol for B"),
        ("B://a:1", None, "B:TLS", "listener.security.protocol.map", "expected NAME:PROTOCOL"),
        ("B://a:1", None, "B:PLAINTEXT,b:PLAINTEXT", "listener.security.protocol.map", "twice"),
        (",".join(f"L{n}://a:{n + 1}" for n in range(MAX_LISTENERS + 1)), None, None, "listeners", "at most"),
    ],
)
def test_a_wrong_listener_is_refused(
    listeners: str, advertised: str | None, protocol_map: str | None, setting: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        parse_listeners(listeners, advertised, protocol_map, HERE)
    assert refused.value.name == setting


def test_ports_that_the_kernel_chooses_are_not_one_address() -> None:
    two = parse_listeners("A://h:0,B://h:0", None, "A:PLAINTEXT,B:PLAINTEXT", HERE)
    assert [listener.bind for listener in two] == [("h", 0), ("h", 0)]


def test_addresses_are_written_as_kafka_writes_them() -> None:
    assert render_listeners({"A": ("::1", 1), "B": ("h", 2)}) == "A://[::1]:1,B://h:2"


def test_a_listener_of_controllers_comes_last_and_need_not_be_advertised() -> None:
    """If the controllers' listener came first, its address would become the node's name."""
    controller, out = ("CONTROLLER://0.0.0.0:9093", "PLAINTEXT://0.0.0.0:9092")
    for advertised, told in (
        ("PLAINTEXT://kafka:1", (HERE, 9093)),
        ("CONTROLLER://inner:2,PLAINTEXT://kafka:1", ("inner", 2)),
    ):
        assert parse_listeners(f"{controller},{out}", advertised, None, HERE, "controller, ") == [
            Listener("PLAINTEXT", "PLAINTEXT", ("0.0.0.0", 9092), ("kafka", 1)),
            Listener("CONTROLLER", "PLAINTEXT", ("0.0.0.0", 9093), told, is_controller=True),
        ]


@pytest.mark.parametrize(
    ("text", "roles"),
    [(None, Roles()), ("broker", Roles(is_controller=False)), (" controller , broker", Roles())],
)
def test_roles_are_read_as_kafka_reads_them(text: str | None, roles: Roles) -> None:
    assert parse_roles(text) == roles


@pytest.mark.parametrize("text", ["", " , ", "broker,voter", "Broker", "broker,broker"])
def test_invalid_list_of_roles_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_roles(text)
    assert refused.value.name == "process.roles"


def test_roles_are_written_as_they_are_read() -> None:
    assert render_roles(Roles()) == "broker,controller"
    assert render_roles(Roles(is_broker=False)) == "controller"


def test_controller_alone_has_controller_listeners_only() -> None:
    (made,) = parse_listeners("CONTROLLER://c:9093", None, None, HERE, "CONTROLLER", Roles(is_broker=False))
    assert made == Listener("CONTROLLER", "PLAINTEXT", ("c", 9093), ("c", 9093), is_controller=True)


def test_broker_alone_may_name_controller_listeners() -> None:
    """The configuration files of Kafka's brokers do the same."""
    (made,) = parse_listeners("PLAINTEXT://b:9092", None, None, HERE, "CONTROLLER", Roles(is_controller=False))
    assert not made.is_controller


@pytest.mark.parametrize(
    ("listeners", "controllers", "role", "reason"),
    [
        ("A://a:1", None, "controller", "process.roles has no broker: controller.listener.names must name A, too"),
        (
            "A://a:1,B://a:2",
            "B",
            "controller",
            "process.roles has no broker: controller.listener.names must name A, too",
        ),
        ("A://a:1", "B", "controller", "there is no listener B"),
        ("A://a:1,B://a:2", "B", "broker", "process.roles has no controller, and listeners has B"),
    ],
)
def test_listener_of_another_role_is_refused(listeners: str, controllers: str | None, role: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        parse_listeners(listeners, None, "A:PLAINTEXT,B:PLAINTEXT", HERE, controllers, parse_roles(role))
    assert refused.value.name == "controller.listener.names"


@pytest.mark.parametrize(
    ("listeners", "protocol_map", "controllers", "setting", "reason"),
    [
        ("A://a:1", "A:PLAINTEXT", "B", "controller.listener.names", "there is no listener B"),
        ("A://a:1", "A:PLAINTEXT", "A", "controller.listener.names", "name a listener for it"),
        # The default protocol applies if no map is given and all other listeners are plain.
        ("A://a:1,B://a:2", "A:PLAINTEXT", "B", "listener.security.protocol.map", "no security protocol for B"),
        ("SSL://a:1,B://a:2", None, "B", "listener.security.protocol.map", "no security protocol for B"),
    ],
)
def test_a_wrong_listener_of_controllers_is_refused(
    listeners: str, protocol_map: str | None, controllers: str, setting: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        parse_listeners(listeners, None, protocol_map, HERE, controllers)
    assert refused.value.name == setting
