"""Listeners whose address stands for all nodes."""

from __future__ import annotations

import pytest

from gateway.config.definition import ConfigError
from gateway.config.errors import ConfigurationError
from gateway.config.listeners import Listener, parse_listeners, share_listeners
from gateway.config.settings import load
from storage.roles import BOTH, Roles

BOUND = "CLIENTS://a:1,NODES://a:2,CONTROLLER://a:3"
MAP = "CLIENTS:PLAINTEXT,NODES:PLAINTEXT,CONTROLLER:PLAINTEXT"


def shared(
    names: str | None, between: str | None, *, roles: Roles = BOTH, node_id: int | None = None
) -> list[Listener]:
    controllers = "CONTROLLER" if roles.is_broker else "CLIENTS,NODES,CONTROLLER"
    made = parse_listeners(BOUND, None, MAP, "host", controllers, roles)
    return share_listeners(made, names, between, roles, node_id)


def test_first_listener_is_one_that_no_other_node_has() -> None:
    """The address of the first listener is the node's name."""
    made = shared("clients", "nodes")
    assert [(each.name, each.is_shared, each.is_inter_broker) for each in made] == [
        ("NODES", False, True),
        ("CLIENTS", True, False),
        ("CONTROLLER", False, False),
    ]


def test_inter_broker_listener_alone_changes_nothing() -> None:
    """Kafka's own configuration files name one."""
    for between in ("NODES", "UNKNOWN", None):
        made = shared(None, between)
        assert [each.name for each in made] == ["CLIENTS", "NODES", "CONTROLLER"]
        assert not any(each.is_shared or each.is_inter_broker for each in made)


def test_controller_alone_shares_no_listener() -> None:
    assert not any(each.is_shared for each in shared("CLIENTS", None, roles=Roles(is_broker=False)))


@pytest.mark.parametrize(
    ("names", "between", "setting", "reason"),
    [
        ("OTHER", "NODES", "shared.listener.names", "there is no listener OTHER"),
        ("CONTROLLER", "NODES", "shared.listener.names", "a listener of controllers"),
        ("CLIENTS", None, "shared.listener.names", "set inter.broker.listener.name"),
        ("CLIENTS", "OTHER", "inter.broker.listener.name", "brokers have no listener OTHER"),
        ("CLIENTS", "CONTROLLER", "inter.broker.listener.name", "brokers have no listener CONTROLLER"),
        ("CLIENTS,NODES", "NODES", "inter.broker.listener.name", "must belong to one node"),
    ],
)
def test_wrong_names_are_refused(names: str, between: str | None, setting: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        shared(names, between)
    assert refused.value.name == setting


def test_id_of_all_nodes_belongs_to_none() -> None:
    assert shared(None, None, node_id=0)
    with pytest.raises(ConfigError, match="id 0 stands for all nodes"):
        shared("CLIENTS", "NODES", node_id=0)


def test_nodes_that_call_each_other_by_tls_must_check_certificates() -> None:
    settings = [
        "listeners=CLIENTS://a:1,NODES://a:2",
        "listener.security.protocol.map=CLIENTS:PLAINTEXT,NODES:SSL",
        "shared.listener.names=CLIENTS",
        "inter.broker.listener.name=NODES",
        "ssl.keystore.location=/nowhere.pem",
    ]
    with pytest.raises(ConfigurationError, match=r"ssl\.truststore\.location.*nodes call each other at NODES"):
        load({}, settings, {})
    assert load({}, [*settings, "ssl.truststore.location=/nowhere.pem"], {}).settings.listeners[0].is_inter_broker
