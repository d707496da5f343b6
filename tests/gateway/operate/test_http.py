"""The operator's routes under load."""

from __future__ import annotations

import http.client
import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

from gateway.operate.http import MAX_CONNECTIONS
from tests.gateway_process import GatewayProcess


def test_one_address_leaves_connections_to_the_probes_of_others(gateway: GatewayProcess) -> None:
    """Kubernetes restarts a node whose /livez does not answer."""
    place = urlsplit(gateway.metrics_url)
    assert place.hostname is not None
    assert place.port is not None
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection((place.hostname, place.port)))
        probe = http.client.HTTPConnection(place.hostname, place.port, timeout=10, source_address=("127.0.0.2", 0))
        probe.request("GET", "/livez")
        assert probe.getresponse().status == 200
        probe.close()
