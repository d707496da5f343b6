"""The part of `docker compose` that Sarama's functional tests use, for a cluster that already runs.

The one idea: those tests start a cluster, stop and start its brokers, and run Kafka's Java tools in one of its
containers. This program is found on their PATH as `docker`. `stop` and `start` reach the process that holds the nodes.
`exec` runs the command on this machine, with Kafka's tools from a registry. `up`, `down` and `rm` do nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.compat.brokers import BrokerProcess

SECONDS = 120.0
# Directory of Kafka in the containers, and the address of a broker for clients in its container.
CONTAINER_TOOLS = "/opt/kafka-"
CONTAINER_BROKER = "kafka-1:9091"
TOOLS = {
    "kafka-console-producer.sh": "org.apache.kafka.tools.ConsoleProducer",
    "kafka-console-consumer.sh": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "kafka-verifiable-consumer.sh": "org.apache.kafka.tools.VerifiableConsumer",
}
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xmx128m"


def install(folder: Path, jars: Path, kafka_version: str) -> Path:
    """Put Kafka's tools of `jars` under `folder`, where containers have them under /. Return the folder of `docker`,
    for PATH."""
    tools = folder / f"{CONTAINER_TOOLS}{kafka_version}".lstrip("/") / "bin"
    tools.mkdir(parents=True)
    for name, main_class in TOOLS.items():
        _script(tools / name, f'exec java {JVM} -cp "{jars}/*" {main_class} "$@"')
    programs = folder / "bin"
    programs.mkdir()
    _script(programs / "docker", f'exec "{sys.executable}" -m {__spec__.name} "{folder}" "$@"')
    return programs


def _script(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


@contextlib.contextmanager
def control(nodes: Sequence[BrokerProcess]) -> Iterator[str]:
    """Serve an HTTP interface that stops and starts the nodes. kafka-1 is the first node."""
    actions = {f"/{name}/kafka-{i + 1}": action for i, node in enumerate(nodes) for name, action in _actions(node)}

    class Door(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            action = actions.get(self.path)
            status = 404
            if action is not None:
                try:
                    action()
                    status = 204
                except AssertionError as error:
                    sys.stderr.write(f"{self.path}: {error}\n")
                    status = 500
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the tests report their actions."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _actions(node: BrokerProcess) -> list[tuple[str, Callable[[], None]]]:
    def start() -> None:
        if not node.running:
            node.start()

    return [("stop", node.close), ("start", start)]


def main(arguments: Sequence[str]) -> None:
    folder, *words = arguments
    match words:
        case ["compose", ("up" | "down" | "rm"), *_] | ["compose", "--profile", _, ("up" | "down" | "rm"), *_]:
            return
        case ["compose", ("stop" | "start") as action, service]:
            address = f"{os.environ['COMPOSE_CONTROL']}/{action}/{service}"
            with urllib.request.urlopen(urllib.request.Request(address, method="POST"), timeout=SECONDS):
                return
        case ["compose", "exec", "-T", _, *command]:
            places = {CONTAINER_TOOLS: f"{folder}{CONTAINER_TOOLS}", CONTAINER_BROKER: os.environ["COMPOSE_BOOTSTRAP"]}
            for place, here in places.items():
                command = [word.replace(place, here) for word in command]
            os.execvp(command[0], command)
        case _:
            raise SystemExit(f"docker {' '.join(words)}: not among what Sarama's tests were known to use")


if __name__ == "__main__":
    main(sys.argv[1:])
