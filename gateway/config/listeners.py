"""The listeners of a node, from Kafka's `listeners`, `advertised.listeners`, `listener.security.protocol.map`,
`controller.listener.names` and `inter.broker.listener.name`, and from `shared.listener.names`.

The one idea: a listener is a name with two addresses. The node binds the first. A client that connected there gets the
second, of every node. `--listen` and `--advertise` are short for one listener called PLAINTEXT. Through a listener of
`controller.listener.names` clients use the node as a controller (KIP-919), through any other as a broker. A node has no
listener for a role that it does not have (`process.roles`).

The advertised address of a shared listener stands for all nodes. The nodes forward what one of them must do, through
their listener `inter.broker.listener.name`.

This module opens no socket: `gateway/net/server.py` binds, and `storage/nodes.py` publishes listeners to other nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gateway.config.definition import ConfigError
from storage.roles import BOTH, Address, Roles

WILDCARDS = frozenset({"0.0.0.0", "::", ""})
DEFAULT_NAME = "PLAINTEXT"
PROTOCOL_MAP = "listener.security.protocol.map"
INTER_BROKER = "inter.broker.listener.name"
MAX_LISTENERS = 32
SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
DEFAULT_MAP = ",".join(f"{protocol}:{protocol}" for protocol in SECURITY_PROTOCOLS)

BROKER, CONTROLLER = "broker", "controller"

_LISTENER = re.compile(r"([A-Za-z0-9_.\-]{1,64})://(.*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Listener:
    """One named listener of a node."""

    name: str
    """The name in capitals, as Kafka keeps it; the same on every node that serves the same clients."""
    security_protocol: str
    bind: Address
    """Address to bind. Port 0: the kernel chooses one. An empty host is every interface."""
    advertised: Address
    """Address to which clients of this listener connect. Port 0 stands for the port that was bound."""
    is_controller: bool = False
    """True if clients of this listener use the node as a controller."""
    is_shared: bool = False
    """True if the advertised address stands for all nodes."""
    is_inter_broker: bool = False
    """True if other nodes forward requests to this listener."""


def render_address(address: Address) -> str:
    """Return HOST:PORT, with an IPv6 host in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def render_listeners(addresses: Mapping[str, Address]) -> str:
    """Return the addresses as Kafka's configuration writes them: NAME://HOST:PORT,NAME://HOST:PORT."""
    return ",".join(f"{name}://{render_address(address)}" for name, address in addresses.items())


def parse_address(text: str) -> Address:
    """Return (host, port). The text of a ValueError says what was expected."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise ValueError("expected HOST:PORT, e.g. 127.0.0.1:9092")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("write an IPv6 address in brackets, e.g. [::1]:9092")
    try:
        host.encode("idna")  # as the resolver does
    except UnicodeError as error:
        raise ValueError("expected a name between its dots, of at most 63 characters") from error
    return host, int(port)


def parse_roles(text: str | None) -> Roles:
    """Return the roles of a node by `process.roles`: both if it is not given. Raise ConfigError for an unknown role
    and for an empty list."""
    if text is None:
        return BOTH
    roles = [role.strip() for role in text.split(",") if role.strip()]
    if not roles or not {BROKER, CONTROLLER}.issuperset(roles):
        raise ConfigError("process.roles", text, f"expected {BROKER}, {CONTROLLER} or both, separated by commas")
    if len(set(roles)) < len(roles):
        raise ConfigError("process.roles", text, "names one twice")
    return Roles(is_broker=BROKER in roles, is_controller=CONTROLLER in roles)


def render_roles(roles: Roles) -> str:
    """Return the roles in the spelling of `process.roles`."""
    return ",".join(name for name, plays in ((BROKER, roles.is_broker), (CONTROLLER, roles.is_controller)) if plays)


def parse_listeners(
    listeners: str,
    advertised: str | None,
    protocol_map: str | None,
    host_name: str,
    controllers: str | None = None,
    roles: Roles = BOTH,
) -> list[Listener]:
    """Return the listeners in the order given, those of brokers first; ConfigError names the setting that is wrong, and
    why.

    Without `advertised` a listener is advertised as it is bound, or at `host_name` if it is bound to every interface.
    The same holds for a listener of controllers that `advertised` does not name. This function is stricter than Kafka
    in one thing: each listener of brokers must be advertised, because otherwise it could not name any node to its
    clients.
    """
    bound = _addresses("listeners", listeners)
    of_controllers = _controllers(controllers, bound, roles)
    told = bound if advertised is None else _addresses("advertised.listeners", advertised)
    as_bound = bound.keys() if advertised is None else of_controllers - told.keys()
    told = {**told, **{name: bound[name] for name in as_bound}}
    protocols = _protocols(protocol_map)
    if protocol_map is None and all(protocols.get(name) == DEFAULT_NAME for name in bound.keys() - of_controllers):
        protocols = {**dict.fromkeys(of_controllers, DEFAULT_NAME), **protocols}
    taken = [address for address in bound.values() if address[1]]
    if len(set(taken)) < len(taken):
        raise ConfigError("listeners", listeners, "two listeners have one address")
    if told.keys() != bound.keys():
        raise ConfigError("advertised.listeners", advertised, f"expected an address for each of {', '.join(bound)}")
    made: list[Listener] = []
    for name, bind in bound.items():
        host, port = told[name]
        if name in as_bound and host in WILDCARDS:
            host = host_name
        elif host in WILDCARDS:
            raise ConfigError("advertised.listeners", advertised, f"{host or 'an empty host'} is no address of a node")
        protocol = protocols.get(name)
        if protocol is None:
            raise ConfigError(PROTOCOL_MAP, protocol_map, f"no security protocol for {name}")
        made.append(Listener(name, protocol, bind, (host, port), name in of_controllers))
    return sorted(made, key=lambda listener: listener.is_controller)


def share_listeners(
    listeners: Iterable[Listener], shared: str | None, inter_broker: str | None, roles: Roles, node_id: int | None
) -> list[Listener]:
    """Mark the listeners that `shared.listener.names` and `inter.broker.listener.name` name. Shared ones come behind
    the brokers' other listeners, because the address of the first listener is the node's name. Raise ConfigError.

    Without a shared listener no node forwards requests, and any name of an inter-broker listener is accepted.
    """
    setting, found = "shared.listener.names", {listener.name: listener for listener in listeners}
    names = frozenset(name for part in (shared or "").split(",") if (name := part.strip().upper()))
    if not names or not roles.is_broker:
        return list(found.values())
    for name in sorted(names):
        if name not in found:
            raise ConfigError(setting, shared, f"there is no listener {name}")
        if found[name].is_controller:
            raise ConfigError(setting, shared, f"{name} is a listener of controllers")
    between, private = (inter_broker or "").strip().upper(), INTER_BROKER
    if not between:
        raise ConfigError(setting, shared, f"nodes need a listener to forward requests to: set {private}")
    if between not in found or found[between].is_controller:
        raise ConfigError(private, inter_broker, f"brokers have no listener {between}")
    if between in names:
        raise ConfigError(private, inter_broker, f"{setting} has {between}: its address must belong to one node")
    if node_id == 0:
        raise ConfigError("node.id", "0", f"at a listener of {setting} id 0 stands for all nodes")
    marked = [
        replace(each, is_shared=each.name in names, is_inter_broker=each.name == between) for each in found.values()
    ]
    return sorted(marked, key=lambda listener: (listener.is_controller, listener.is_shared))


def _controllers(text: str | None, bound: Mapping[str, Address], roles: Roles) -> frozenset[str]:
    """Return the names of the controllers' listeners. A broker has at least one other listener, and a node that is
    only a controller has no other."""
    setting = "controller.listener.names"
    names = frozenset(name for part in (text or "").split(",") if (name := part.strip().upper()))
    if not roles.is_controller:
        # Kafka's own configuration files do the same: brokers name the listeners of other nodes.
        if own := bound.keys() & names:
            raise ConfigError(
                setting, text, f"process.roles has no controller, and listeners has {', '.join(sorted(own))}"
            )
        return frozenset()
    if unknown := names - bound.keys():
        raise ConfigError(setting, text, f"there is no listener {', '.join(sorted(unknown))}")
    others = bound.keys() - names
    if roles.is_broker and not others:
        raise ConfigError(setting, text, "process.roles has broker: name a listener for it")
    if not roles.is_broker and others:
        raise ConfigError(
            setting,
            text,
            f"process.roles has no broker: controller.listener.names must name {', '.join(sorted(others))}, too",
        )
    return names


def _addresses(setting: str, text: str) -> dict[str, Address]:
    found: dict[str, Address] = {}
    for part in text.split(","):
        match = _LISTENER.fullmatch(part.strip())
        if match is None:
            raise ConfigError(setting, text, "expected NAME://HOST:PORT, separated by commas")
        name = match[1].upper()
        if name in found:
            raise ConfigError(setting, text, f"names {name} twice")
        try:
            found[name] = parse_address(match[2])
        except ValueError as error:
            raise ConfigError(setting, text, str(error)) from error
    if len(found) > MAX_LISTENERS:
        raise ConfigError(setting, text, f"at most {MAX_LISTENERS} listeners")
    return found


def check_protocol_map(text: str, listeners: Iterable[Listener]) -> None:
    """Raise ConfigError if this map gives an existing listener another protocol or none. Mirrors upstream's
    DynamicListenerConfig, and its words."""
    protocols = _protocols(text)
    for listener in listeners:
        protocol = protocols.get(listener.name)
        if protocol is None:
            reason = f"Listeners '{listener.name}' must be subset of listener map '{text}'"
            raise ConfigError(PROTOCOL_MAP, text, reason, reason)
        if protocol != listener.security_protocol:
            reason = f"Security protocol cannot be updated for existing listener {listener.name}"
            raise ConfigError(PROTOCOL_MAP, text, reason, reason)


def _protocols(text: str | None) -> dict[str, str]:
    """Return the security protocol by name; without a map, a listener named like a protocol speaks it."""
    setting, protocols = PROTOCOL_MAP, dict[str, str]()
    for part in (text or DEFAULT_MAP).split(","):
        name, colon, protocol = (side.strip().upper() for side in part.partition(":"))
        if not colon or not name or protocol not in SECURITY_PROTOCOLS:
            raise ConfigError(setting, text, f"expected NAME:PROTOCOL with one of {', '.join(SECURITY_PROTOCOLS)}")
        if name in protocols:
            raise ConfigError(setting, text, f"names {name} twice")
        protocols[name] = protocol
    return protocols
