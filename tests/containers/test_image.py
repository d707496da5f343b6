"""The image that the Dockerfile makes, the compose file as it is written, and the container that tests may use."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from testcontainers.core.config import testcontainers_config

from sluice.testing.containers import SluiceContainer
from tests.closing import close
from tests.containers.conftest import BUILD_SECONDS, VERSION
from tests.containers.engine import Engine, checked
from tests.gateway_process import ROOT, free_ports
from tests.steps.waiting import wait_for

HEALTHY_SECONDS = 120
RECORDS = 100
PROJECT = "sluice-test"
MAX_ADDED_BYTES = 128 * 1024 * 1024
"""Bytes that the Dockerfile may add to its base image: python:3.12-slim has 120 MB, and the image may have 250 MB."""


GATEWAYS = {"gateway": "SLUICE_ADVERTISE", "gateway-2": "SLUICE_ADVERTISE_2", "gateway-3": "SLUICE_ADVERTISE_3"}
"""Services of the compose file, each with the variable that holds the address for its clients."""


class Composition:
    """The compose file as it is written, except for the published ports, because 9092 may be in use."""

    def __init__(self, engine: Engine, directory: Path, *profiles: str) -> None:
        self.engine = engine
        composition: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
        self.bootstraps: dict[str, str] = {}
        self._environment = engine.environment()
        for port, (service, variable) in zip(free_ports(len(GATEWAYS)), GATEWAYS.items(), strict=True):
            (written,) = composition["services"][service]["ports"]
            composition["services"][service]["ports"] = [f"{port}:{written.partition(':')[2]}"]
            self.bootstraps[service] = self._environment[variable] = f"localhost:{port}"
        path = directory / "docker-compose.yml"
        path.write_text(yaml.safe_dump(composition))
        self._command = ["docker-compose", "--file", str(path), "--project-directory", str(ROOT)]
        self._command += ["--project-name", PROJECT]
        for profile in profiles:
            self._command += ["--profile", profile]

    def run(self, *arguments: str) -> str:
        return checked([*self._command, *arguments], self._environment, HEALTHY_SECONDS)

    def await_health(self, services: int) -> None:
        names = self.run("ps", "--quiet").split()
        assert len(names) == services
        for name in names:
            _await_health(self.engine, name)


@pytest.fixture
def compose(engine: Engine, image: str, postgres_image: str, tmp_path: Path) -> Iterator[Callable[..., Composition]]:
    """Run `docker compose up` with these profiles."""
    made: list[Composition] = []

    def up(*profiles: str) -> Composition:
        made.append(Composition(engine, tmp_path, *profiles))
        made[-1].run("up", "--detach", "--no-build")
        return made[-1]

    try:
        yield up
    finally:
        for each in made:
            print(each.run("logs", "--no-color"))
            each.run("down", "--volumes")


def round_trip(bootstraps: Sequence[str], topic: str, count: int = RECORDS) -> None:
    """Assert that a stock client can write records to these brokers and read them back."""
    sent = [f"record {number}".encode() for number in range(count)]
    for number, bootstrap in enumerate(bootstraps):
        producer = Producer({"bootstrap.servers": bootstrap})
        for value in sent[number :: len(bootstraps)]:
            producer.produce(topic, value)
        assert producer.flush(30) == 0
    consumer = Consumer(
        {"bootstrap.servers": ",".join(bootstraps), "group.id": f"{topic}-readers", "auto.offset.reset": "earliest"}
    )
    try:
        consumer.subscribe([topic])
        got: list[bytes | None] = []
        while len(got) < count:
            message = consumer.poll(30)
            assert message is not None, f"{len(got)} of {count} records came"
            if message.error() is None:
                got.append(message.value())
    finally:
        close(consumer)
    assert sorted(value or b"" for value in got) == sorted(sent)


@pytest.mark.timeout(BUILD_SECONDS + 2 * HEALTHY_SECONDS)
def test_the_image_serves_on_a_read_only_root_without_capabilities(engine: Engine, image: str) -> None:
    """The test restricts the container as the Kubernetes manifests do."""
    (port,) = free_ports(1)
    confined = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
    given = ("--publish", f"127.0.0.1:{port}:9092", "--env", f"SLUICE_ADVERTISE=localhost:{port}")
    name = engine.run("run", "--detach", *confined, *given, image, timeout_s=60).strip()
    try:
        _await_health(engine, name)
        round_trip([f"localhost:{port}"], "confined")
        assert engine.run("exec", name, "id", "--user", timeout_s=30).strip() == "10001"
    finally:
        engine.run("rm", "--force", "--volumes", name, timeout_s=60)


@pytest.mark.timeout(BUILD_SECONDS)
def test_the_image_is_small_and_says_what_it_contains(engine: Engine, image: str, python_image: str) -> None:
    sizes = engine.run("image", "inspect", "--format", "{{.Size}}", image, python_image, timeout_s=30).split()
    assert int(sizes[0]) - int(sizes[1]) <= MAX_ADDED_BYTES
    labels = json.loads(engine.run("image", "inspect", "--format", "{{json .Config.Labels}}", image, timeout_s=30))
    assert labels["org.opencontainers.image.version"] == VERSION
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    bill = "/opt/sluice/share/sluice/sluice.cdx.json"
    listed = json.loads(engine.run("run", "--rm", "--entrypoint", "cat", image, bill, timeout_s=60))
    assert listed["metadata"]["component"]["version"] == VERSION
    assert "asyncpg" in {component["name"] for component in listed["components"]}


@pytest.mark.timeout(BUILD_SECONDS + 2 * HEALTHY_SECONDS)
def test_docker_compose_up_becomes_healthy_and_serves_a_stock_client(
    compose: Callable[..., Composition],
) -> None:
    composition = compose()
    composition.await_health(2)
    round_trip([composition.bootstraps["gateway"]], "composed")


@pytest.mark.timeout(BUILD_SECONDS + 3 * HEALTHY_SECONDS)
def test_the_cluster_profile_runs_three_gateways_and_one_may_stop(compose: Callable[..., Composition]) -> None:
    composition = compose("cluster")
    composition.await_health(4)
    addresses = composition.bootstraps
    for address in addresses.values():
        wait_for(
            lambda address=address: brokers(address) == set(addresses.values()), f"{address} does not list all three"
        )
    round_trip(list(addresses.values()), "before")
    # A client in another container receives addresses that it can reach.
    inside = ("exec", "-T", "gateway-3", "sluice")
    (found,) = json.loads(composition.run(*inside, "cluster", "info", "--json", "--bootstrap", "gateway:19092"))
    assert {(node["host"], node["port"]) for node in found["nodes"]} == {(service, 19092) for service in addresses}
    for service in addresses:
        composition.run(*inside, "healthcheck", f"{service}:19092")
    # Each line of a container's log names its node.
    for service, address in addresses.items():
        lines = composition.run("logs", "--no-color", service).splitlines()
        told = [json.loads(line[line.index("{") :]) for line in lines if "{" in line]
        assert told
        assert {line["node"] for line in told} == {address}
        assert address.partition(":")[2] in composition.run("port", service, inner_port(service))

    composition.run("stop", "gateway-2")
    (stopped,) = composition.run("ps", "--quiet", "gateway-2").split()
    ended = composition.engine.run("inspect", "--format", "{{.State.ExitCode}}", stopped, timeout_s=30)
    assert ended.strip() == "0", "it was killed"
    rest = {service: address for service, address in addresses.items() if service != "gateway-2"}
    for address in rest.values():
        wait_for(lambda address=address: brokers(address) == set(rest.values()), f"{address} lists one that has gone")
    round_trip(list(rest.values()), "after")
    composition.run("start", "gateway-2")
    wait_for(lambda: brokers(addresses["gateway-2"]) == set(addresses.values()), "it does not come back")


def brokers(bootstrap: str) -> set[str]:
    listed = AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=30).brokers.values()
    return {f"{broker.host}:{broker.port}" for broker in listed}


def inner_port(service: str) -> str:
    composition: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return composition["services"][service]["ports"][0].partition(":")[2]


def _await_health(engine: Engine, name: str) -> None:
    """Wait for health by the engine's events. The events begin with past ones, so no change between a look and the wait
    is missed.
    """
    with subprocess.Popen(
        engine.command(
            *("events", "--since", "0", "--filter", f"container={name}"),
            *("--filter", "event=health_status", "--format", "{{json .}}"),
        ),
        stdout=subprocess.PIPE,
        text=True,
    ) as events:
        assert events.stdout is not None
        try:
            for line in events.stdout:
                # Depending on its version, the engine reports "health_status: healthy" in one field or in two.
                if "unhealthy" not in line and "healthy" in json.dumps(json.loads(line)):
                    return
        finally:
            events.kill()
    raise AssertionError(f"{name} did not become healthy:\n{engine.run('logs', name, timeout_s=30)}")


@pytest.mark.timeout(HEALTHY_SECONDS * 2)
def test_the_suite_uses_a_postgres_container_if_an_engine_answers(engine: Engine, postgres_image: str) -> None:
    # Disable Ryuk, which removes the containers of a killed test run, because its image would have to be pulled.
    environment = {**engine.environment(), "TESTCONTAINERS_RYUK_DISABLED": "true"}
    environment.pop("SLUICE_TEST_DATABASE_URL", None)
    said = checked(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/storage/test_append.py"],
        environment,
        HEALTHY_SECONDS,
    )
    assert f"Postgres of this run: a container of {postgres_image}" in said
    assert " passed" in said.rstrip().splitlines()[-1]
    assert engine.run("ps", "--quiet", timeout_s=30).split() == []


@pytest.mark.timeout(BUILD_SECONDS + HEALTHY_SECONDS)
def test_the_testcontainers_module_serves_a_client_outside(
    engine: Engine, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine.host)
    monkeypatch.setattr(testcontainers_config, "ryuk_disabled", True)
    container = SluiceContainer(image).with_setting("num.partitions", "3")
    with container:
        bootstrap = container.get_bootstrap_server()
        assert bootstrap.rpartition(":")[2] != str(container.port)
        round_trip([bootstrap], "greetings")
        topics = AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=30).topics
        assert len(topics["greetings"].partitions) == 3
    assert engine.run("ps", "--quiet", timeout_s=30).split() == []
