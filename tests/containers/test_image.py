"""The image as its Dockerfile says, the compose file as it is written, and the container that tests may ask for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Consumer, Producer

from tests.containers.engine import Engine, checked
from tests.gateway_process import ROOT, free_ports

BUILD_SECONDS = 300
HEALTHY_SECONDS = 120
RECORDS = 100
PROJECT = "sluice-test"


@pytest.fixture(scope="module")
def image(engine: Engine, python_image: str) -> str:
    # The builder reaches the package index as this machine does.
    engine.run("build", "--network", "host", "--tag", "sluice", str(ROOT), timeout_s=BUILD_SECONDS)
    return "sluice"


@pytest.fixture
def composed(engine: Engine, image: str, postgres_image: str, tmp_path: Path) -> Iterator[str]:
    """Where the compose file's gateway is reached. Only its port differs from what is written: 9092 may be taken."""
    (port,) = free_ports(1)
    composition: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    composition["services"]["gateway"]["ports"] = [f"{port}:9092"]
    path = tmp_path / "docker-compose.yml"
    path.write_text(yaml.safe_dump(composition))
    command = ["docker-compose", "--file", str(path), "--project-directory", str(ROOT), "--project-name", PROJECT]
    environment = {**engine.environment(), "SLUICE_ADVERTISE": f"localhost:{port}"}
    try:
        checked([*command, "up", "--detach", "--no-build"], environment, HEALTHY_SECONDS)
        yield f"localhost:{port}"
    finally:
        print(checked([*command, "logs", "--no-color"], environment, HEALTHY_SECONDS))
        checked([*command, "down", "--volumes"], environment, HEALTHY_SECONDS)


@pytest.mark.timeout(BUILD_SECONDS + 2 * HEALTHY_SECONDS)
def test_docker_compose_up_becomes_healthy_and_a_stock_client_reads_what_it_wrote(
    engine: Engine, composed: str
) -> None:
    names = engine.run("ps", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}", timeout_s=30)
    assert len(names.split()) == 2
    for name in names.split():
        _await_health(engine, name)
    sent = [f"record {number}".encode() for number in range(RECORDS)]
    producer = Producer({"bootstrap.servers": composed})
    for value in sent:
        producer.produce("composed", value)
    assert producer.flush(30) == 0
    consumer = Consumer({"bootstrap.servers": composed, "group.id": "readers", "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe(["composed"])
        got: list[bytes | None] = []
        while len(got) < RECORDS:
            message = consumer.poll(30)
            assert message is not None, f"{len(got)} of {RECORDS} records came"
            if message.error() is None:
                got.append(message.value())
    finally:
        consumer.close()
    assert sorted(value or b"" for value in got) == sorted(sent)


def _await_health(engine: Engine, name: str) -> None:
    """By the events of the engine, which begin with what has been: nothing is missed between the look and the wait."""
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
                # The engine says "health_status: healthy", in one field or two by its version.
                if "unhealthy" not in line and "healthy" in json.dumps(json.loads(line)):
                    return
        finally:
            events.kill()
    raise AssertionError(f"{name} did not become healthy:\n{engine.run('logs', name, timeout_s=30)}")


@pytest.mark.timeout(HEALTHY_SECONDS * 2)
def test_the_suite_takes_its_postgres_from_a_container_where_an_engine_answers(
    engine: Engine, postgres_image: str
) -> None:
    # Ryuk, which clears up after a test run that was killed, is an image that would have to be pulled.
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
