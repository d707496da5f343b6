"""HTTP interface by which a test program gets brokers of its own: `POST /open`, `/close`, `/stop`, `/start`.

The one idea: a test that was written for a cluster inside its own process gets one outside of it, with the broker
settings that it asks for. The cluster consists of nodes on a database of their own, or of one node of Apache Kafka. All
databases are in one Postgres. The cluster is new. Only tests that leave behind nothing but topics and groups may get a
used cluster, from which topics and groups were deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from gateway.config.broker_table import find_broker_config
from gateway.config.definition import ConfigError
from gateway.security.scram import DEFAULT_ITERATIONS, MECHANISMS, SALT_BYTES, credential, salted_password
from storage.pool import Database
from storage.types import ScramCredential
from storage.users import UserStore
from tests.compat.brokers import APACHE_KAFKA, BrokerProcess
from tests.gateway_process import GatewayProcess, free_ports
from tests.postgres import SERVED, Databases, databases, short_directory
from tests.templates import make_templates

DEFAULTS = {"group.initial.rebalance.delay.ms": "0"}
LOWEST = {
    "group.consumer.session.timeout.ms": "group.consumer.min.session.timeout.ms",
    "group.consumer.heartbeat.interval.ms": "group.consumer.min.heartbeat.interval.ms",
}
"""Each of these settings has a lower bound, which is a setting of its own. A broker refuses a value below the bound. So
if a test does not set the bound, it is set to the value.
"""
OURS = (
    *("listeners", "advertised.listeners", "controller.listener.names", "process.roles"),
    *("node.id", "broker.id", "broker.rack", "log.dirs"),
)
"""Settings that a test may not change: addresses, ids and directories."""
CONTROLLER = "CONTROLLER"
FIRST_CONTROLLER = 3000
"""Id of the first node that is only a controller. Clusters inside a test's process use the same id."""
PROTOCOL_MAP = "listener.security.protocol.map"
OF_OUR_LISTENER = "PLAINTEXT:PLAINTEXT"
"""The name of a node's only listener here. If a test's listener map lacks this name, the map is not applied to the
node.
"""
LOG_CHARACTERS = 2000
ADMIN_SECONDS = 10.0


class _Place(NamedTuple):
    """A node's number among the brokers and among the controllers, None for a role that it does not have."""

    broker: int | None
    controller: int | None


class _Started(NamedTuple):
    """Started brokers: their addresses, the addresses of listeners with authentication, if any, and the addresses of
    controllers.
    """

    nodes: list[BrokerProcess]
    secured: Sequence[str] = ()
    controllers: Sequence[str] = ()


@dataclass(slots=True)
class _Cluster:
    """A running cluster. A later request with the same `key` can also use it; with None, no later request can.
    `secured` are the addresses of listeners with authentication, if any.
    """

    nodes: list[BrokerProcess]
    secured: Sequence[str]
    controllers: Sequence[str]
    """Addresses of controllers, if there are any."""
    stack: contextlib.ExitStack
    key: str | None = None


class Gateways:
    """Fresh nodes for each request.

    `most_nodes` gives the maximal number of nodes of a class or a test; others get one. Tests in `from_0` number their
    nodes from 0, as a cluster inside a test's process does. Nodes of `roles` tests are brokers, controllers or both, as
    requested; nodes of other tests are both.
    """

    def __init__(
        self,
        server: Databases,
        most_nodes: Mapping[str, int],
        from_0: Collection[str] = (),
        roles: Collection[str] = (),
    ) -> None:
        self._server = server
        self._most_nodes = most_nodes
        self._from_0 = frozenset(from_0)
        self._roles = frozenset(roles)

    def start(self, asked: Mapping[str, Any], stack: contextlib.ExitStack) -> _Started:
        settings = {**DEFAULTS, **served(asked["settings"])}
        url = self._server.create(SERVED)
        stack.callback(self._server.drop, url)
        protocol = str(asked.get("protocol", ""))
        if protocol:
            # The program that requests brokers uses the other listener, and creates the users.
            settings["super.users"] = ";".join(filter(None, (settings.get("super.users"), "User:ANONYMOUS")))
            asyncio.run(_know(url, [scram_user(text) for text in asked["users"]]))
        nodes: list[BrokerProcess] = []
        secured: list[str] = []
        controllers: list[str] = []
        test = str(asked["test"])
        most, counted, with_roles = self.particulars(test)
        racks: list[str] = asked.get("racks", [])
        for place in _places(asked, most, with_roles=with_roles):
            number = place.broker
            rack = racks[number] if number is not None and number < len(racks) else ""
            directory = stack.enter_context(short_directory())
            port, controller_port = free_ports(2)
            own: dict[str, str] = {}
            bound: list[str] = []
            # A cluster inside a test's process uses this name.
            told: list[str] = []
            if number is not None:
                bound.append(f"PLAINTEXT://127.0.0.1:{port}")
                told.append(f"PLAINTEXT://{asked.get('advertise', f'localhost:{port}')}")
                if counted:
                    own["node.id"] = str(number)
            if protocol:
                (other,) = free_ports(1)
                secured.append(f"127.0.0.1:{other}")
                bound.append(f"{protocol}://127.0.0.1:{other}")
                told.append(f"{protocol}://localhost:{other}")
            if place.controller is not None:
                bound.append(f"{CONTROLLER}://127.0.0.1:{controller_port}")
                told.append(f"{CONTROLLER}://localhost:{controller_port}")
                own["controller.listener.names"] = CONTROLLER
                controllers.append(f"127.0.0.1:{controller_port}")
            if with_roles:
                own["process.roles"] = ",".join(
                    role for role, plays in zip(("broker", "controller"), place, strict=True) if plays is not None
                )
            if number is None:
                own["node.id"] = str(FIRST_CONTROLLER + (place.controller or 0))
            own |= {"listeners": ",".join(bound), "advertised.listeners": ",".join(told)}
            node = GatewayProcess(
                directory,
                database_url=url,
                settings={**settings, **own},
                environment={"SLUICE_RACK": rack} if rack else {},
            )
            stack.callback(_end, node)
            node.start()
            if number is not None:
                nodes.append(node)
        return _Started(nodes, secured, controllers)

    def particulars(self, test: str) -> tuple[int, bool, bool]:
        """Return for `Class.method`: the maximal number of nodes, whether they are numbered from 0, and whether they
        have the requested roles."""
        names = (test, test.partition(".")[0])
        counted, roles = (not given.isdisjoint(names) for given in (self._from_0, self._roles))
        return most_nodes(self._most_nodes, test), counted, roles


def _places(asked: Mapping[str, Any], most: int, *, with_roles: bool) -> list[_Place]:
    """Return the nodes to start, in order. `most` is the maximal number of nodes if roles do not matter."""
    brokers, controllers = int(asked["brokers"]), int(asked.get("controllers", 0))
    if not with_roles:
        count = min(max(brokers, controllers), most)
        return [_Place(number, number if number < controllers else None) for number in range(count)]
    if not asked.get("combined", True):
        return [
            *(_Place(None, number) for number in range(controllers)),
            *(_Place(number, None) for number in range(brokers)),
        ]
    return [
        _Place(number if number < brokers else None, number if number < controllers else None)
        for number in range(max(brokers, controllers))
    ]


def most_nodes(given: Mapping[str, int], test: str) -> int:
    """Return the maximal number of nodes of `Class.method`: its own entry, or the entry of its class, or one."""
    return given.get(test, given.get(test.partition(".")[0], 1))


class Kafkas:
    """Clusters of Apache Kafka. Each is one node, however many nodes a test requests."""

    def particulars(self, test: str) -> tuple[()]:
        """Accept every request: each test gets the broker settings that it requests."""
        return ()

    def start(self, asked: Mapping[str, Any], stack: contextlib.ExitStack) -> _Started:
        settings = {**DEFAULTS, **_with_bounds(asked["settings"])}
        if "advertise" in asked:
            settings["advertised.listeners"] = f"PLAINTEXT://{asked['advertise']}"
        node = APACHE_KAFKA.process(stack.enter_context(short_directory()), settings)
        stack.callback(_end, node)
        node.start()
        return _Started([node])


class Brokers:
    """Clusters by number. A test of a `sharing` class may get a cluster that another such test used."""

    def __init__(self, maker: Gateways | Kafkas, sharing: Collection[str] = ()) -> None:
        self._maker = maker
        self._sharing = sharing
        self._clusters: dict[str, _Cluster] = {}
        self._idle: dict[str, _Cluster] = {}
        self._lock = threading.Lock()
        self._count = 0

    def open(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        key = self.key_of(asked)
        with self._lock:
            cluster = self._idle.pop(key, None) if key is not None else None
            others, self._idle = self._idle, {}
        for other in others.values():
            # Two clusters of six nodes need more connections than the shared Postgres offers.
            other.stack.close()
        if cluster is None:
            with contextlib.ExitStack() as stack:
                started = self._maker.start(asked, stack)
                cluster = _Cluster(*started, stack.pop_all(), key)
        with self._lock:
            self._count += 1
            number = str(self._count)
            self._clusters[number] = cluster
        opened: dict[str, Any] = {
            "number": number,
            "bootstrap": ",".join(node.bootstrap for node in cluster.nodes),
            "controllers": ",".join(cluster.controllers),
            "from_0": self._maker.particulars(str(asked["test"]))[1:2] == (True,),
        }
        if cluster.secured:
            opened["secured"] = ",".join(cluster.secured)
            opened["metrics"] = [node.metrics_url for node in cluster.nodes]
        return opened

    def key_of(self, asked: Mapping[str, Any]) -> str | None:
        """Return the key for requests that this cluster can serve later, or None if it can serve no other request."""
        test = str(asked["test"])
        if test.partition(".")[0] not in self._sharing:
            return None
        return json.dumps(
            [
                *(asked["brokers"], asked.get("controllers"), asked.get("combined"), asked["settings"]),
                self._maker.particulars(test),
            ],
            sort_keys=True,
        )

    def close(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            cluster = self._clusters.pop(str(asked["number"]))
        whole = all(node.running for node in cluster.nodes)
        if cluster.key is None or not whole or not _emptied(cluster.nodes[0].bootstrap):
            cluster.stack.close()
            return {}
        with self._lock:
            # Keep one cluster for the next test, because most tests request the same settings as the previous test.
            self._idle[cluster.key] = cluster
        return {}

    def close_all(self) -> None:
        for cluster in (*self._clusters.values(), *self._idle.values()):
            cluster.stack.close()

    def stop(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        self._node(asked).close()
        return {}

    def start(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        self._node(asked).start()
        return {}

    def _node(self, asked: Mapping[str, Any]) -> BrokerProcess:
        nodes = self._clusters[str(asked["number"])].nodes
        return nodes[int(asked["broker"]) % len(nodes)]


def _emptied(bootstrap: str) -> bool:
    """Delete all topics and groups. Return whether that succeeded: a client that a test left behind may still be a
    member.
    """
    admin = AdminClient({"bootstrap.servers": bootstrap})
    try:
        groups = [group.group_id for group in admin.list_consumer_groups().result(ADMIN_SECONDS).valid]
        for deleted in admin.delete_consumer_groups(groups).values() if groups else ():
            deleted.result(ADMIN_SECONDS)
        topics = [name for name in admin.list_topics(timeout=ADMIN_SECONDS).topics if not name.startswith("__")]
        for deleted in admin.delete_topics(topics).values() if topics else ():
            deleted.result(ADMIN_SECONDS)
    except (KafkaException, TimeoutError) as error:
        sys.stderr.write(f"not to be used again: {error!r}\n")
        return False
    return True


def _end(node: BrokerProcess) -> None:
    """Kill the node without a handover, because its database is dropped too."""
    if node.running:
        node.kill()
    sys.stderr.write(node.log_tail()[-LOG_CHARACTERS:] + "\n")


def _with_bounds(settings: Mapping[str, str]) -> dict[str, str]:
    bounds = {bound: settings[name] for name, bound in LOWEST.items() if name in settings}
    return {**bounds, **settings}


def served(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that a gateway knows and accepts. The other settings concern a broker's disks, threads and
    replicas.
    """
    taken: dict[str, str] = {}
    for name, value in _with_bounds(settings).items():
        key = find_broker_config(name)
        if key is None or name in OURS or (name == PROTOCOL_MAP and OF_OUR_LISTENER not in value.split(",")):
            continue
        try:
            key.parse(value)
        except ConfigError:
            continue
        taken[name] = value
    return taken


def scram_user(text: str) -> ScramCredential:
    """Parse `SCRAM-SHA-256=[name=alice,password=secret]`, the notation of kafka-storage."""
    mechanism_name, _, rest = text.partition("=")
    fields = dict(part.split("=", 1) for part in rest.strip("[]").split(","))
    mechanism, salt = MECHANISMS[mechanism_name], secrets.token_bytes(SALT_BYTES)
    salted = salted_password(mechanism, fields["password"], salt, DEFAULT_ITERATIONS)
    return credential(fields["name"], mechanism, salted, salt, DEFAULT_ITERATIONS)


async def _know(url: str, users: list[ScramCredential]) -> None:
    database = await Database.open(url)
    try:
        await UserStore(database).change(users, [])
    finally:
        await database.close()


@contextlib.contextmanager
def door(
    nodes: Mapping[str, int],
    *,
    sharing: Collection[str] = (),
    from_0: Collection[str] = (),
    roles: Collection[str] = (),
    kafka: bool = False,
) -> Iterator[str]:
    """Yield the interface's address while the context lasts. Then end every cluster that the interface has opened."""
    with contextlib.ExitStack() as stack:
        if kafka:
            brokers = Brokers(Kafkas(), sharing)
        else:
            server = stack.enter_context(databases())
            make_templates(server)
            brokers = Brokers(Gateways(server, nodes, from_0, roles), sharing)
        actions = {"/open": brokers.open, "/close": brokers.close, "/stop": brokers.stop, "/start": brokers.start}

        class Door(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
                status, said = 200, b""
                try:
                    said = json.dumps(actions[self.path](asked)).encode()
                except Exception as error:  # Any error is returned to the test.
                    traceback.print_exception(error)
                    status, said = 500, str(error)[-LOG_CHARACTERS:].encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: the tests report their actions."""

        listener = ThreadingHTTPServer(("127.0.0.1", 0), Door)
        listener.daemon_threads = True
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.server_address[1]}"
        finally:
            listener.shutdown()
            listener.server_close()
            brokers.close_all()
