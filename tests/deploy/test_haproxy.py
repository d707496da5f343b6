"""HAProxy offers two nodes at one address and port. It leads each client to the node that the client names in TLS
(SNI).
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaConsumer, KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic

from tests.conftest import gateways
from tests.gateway_process import free_ports
from tests.postgres import Databases
from tests.secured import Authority
from tests.steps.waiting import wait_for

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "haproxy" / "haproxy.cfg"
DOMAIN = "kafka.example.org"
PARTITIONS, GROUPS = 6, 8

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="HAProxy is not installed")


@pytest.fixture(scope="module")
def client(postgres: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Settings of a client of two nodes behind a running HAProxy."""
    directory = tmp_path_factory.mktemp("haproxy")
    authority = Authority(directory, "authority")
    server = authority.issue(f"/CN={DOMAIN}", names=(DOMAIN, f"*.{DOMAIN}"))
    port, *of_nodes = free_ports(5)
    text = CONFIGURATION.read_text().replace("bind :9094", f"bind 127.0.0.1:{port}")
    with gateways(postgres) as factory:
        database_url = None
        for number, (inside, outside) in enumerate((of_nodes[:2], of_nodes[2:]), start=1):
            settings = {
                "listeners": f"INSIDE://127.0.0.1:{inside},OUTSIDE://127.0.0.1:{outside}",
                "advertised.listeners": f"INSIDE://127.0.0.1:{inside},OUTSIDE://n{number}.{DOMAIN}:{port}",
                "listener.security.protocol.map": "INSIDE:PLAINTEXT,OUTSIDE:SSL",
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": str(server.whole),
            }
            database_url = factory(settings, database_url=database_url).database_url
            text = text.replace(f"10.0.0.{number}:9094", f"127.0.0.1:{outside}")
        (directory / "haproxy.cfg").write_text(text)
        proxy = subprocess.Popen(["haproxy", "-f", str(directory / "haproxy.cfg")])
        try:
            wait_for(lambda: _accepts(port), "HAProxy accepts clients")
            yield {
                "bootstrap_servers": f"{DOMAIN}:{port}",
                "security_protocol": "SSL",
                "ssl_cafile": str(authority.certificate),
            }
        finally:
            proxy.kill()
            proxy.wait()


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve the names that clients of this process use to HAProxy's address, as a DNS wildcard would."""
    look_up = socket.getaddrinfo

    def resolve(host: Any, *more: Any, **named: Any) -> Any:
        return look_up("127.0.0.1" if str(host).endswith(DOMAIN) else host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_every_partition_and_group_is_reached_at_its_node(client: dict[str, Any]) -> None:
    admin = KafkaAdminClient(**client)
    admin.create_topics([NewTopic("orders", PARTITIONS, 1)])
    (topic,) = admin.describe_topics(["orders"])
    leaders = {partition["leader_id"] for partition in topic["partitions"]}
    admin.close()
    assert len(leaders) == 2
    producer = KafkaProducer(**client, retries=0)
    for partition in range(PARTITIONS):
        assert producer.send("orders", b"value", partition=partition).get(60).partition == partition
    producer.close()
    # A node refuses members of groups that another node coordinates. So a group whose members reached the wrong node
    # could never form.
    for number in range(GROUPS):
        consumer = KafkaConsumer("orders", group_id=f"group-{number}", auto_offset_reset="earliest", **client)
        seen: set[Any] = set()

        def read(consumer: Any = consumer, seen: set[Any] = seen) -> int:
            seen.update(consumer.poll(timeout_ms=1000))
            return len(seen)

        wait_for(read, f"group-{number} reads all partitions", holds=lambda count: count == PARTITIONS)
        consumer.commit()
        consumer.close()
