"""The compose file: a password may contain any character, clients reach the addresses, and the
profiles fit together.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from asyncpg.connect_utils import _parse_connect_dsn_and_args

from gateway.config.listeners import Listener, parse_address
from gateway.config.settings import Configuration, load
from storage.database_url import parse_database_url

COMPOSE = Path(__file__).parents[2] / "docker-compose.yml"
UNSET = (
    "host port user password passfile database ssl service servicefile direct_tls server_settings "
    "target_session_attrs krbsrvname gsslib"
)
GATEWAYS = {"gateway": 9092, "gateway-2": 9093, "gateway-3": 9094}
"""Services that are gateways, and the port of each for clients outside."""
PROFILES = ("cluster", "registry", "monitoring")
IMAGE = {"SLUICE_LISTEN": "0.0.0.0:9092", "SLUICE_ADVERTISE": "localhost:9092"}
"""Variables of the image that the compose file overrides or repeats."""


def settings(password: str) -> dict[str, str]:
    """Return the database settings of the file, with `password` interpolated as compose does."""
    text = COMPOSE.read_text().replace("${POSTGRES_PASSWORD:-sluice}", password)
    return dict(re.findall(r"^ +(POSTGRES_PASSWORD|PGPASSWORD|SLUICE_DATABASE_URL): (.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("password", ["sluice", "a@b:c/d?e#f", "100%25 [x]", "&password=y", "ü$ä'\"\\"])
def test_a_password_of_any_characters_reaches_postgres_and_gateways(
    password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = settings(password)
    monkeypatch.setenv("PGPASSWORD", found["PGPASSWORD"])
    url = parse_database_url(found["SLUICE_DATABASE_URL"])
    given: dict[str, Any] = dict.fromkeys(UNSET.split())
    hosts, parameters, *_ = _parse_connect_dsn_and_args(dsn=url.for_asyncpg, **given)
    assert (hosts, parameters.user, parameters.database) == ([("postgres", 5432)], "sluice", "sluice")
    assert parameters.password == found["POSTGRES_PASSWORD"] == password


def rendered(**variables: str) -> dict[str, Any]:
    """Return the services of the file with all profiles, as docker-compose renders it."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    profiles = [word for profile in PROFILES for word in ("--profile", profile)]
    done = subprocess.run(
        ["docker-compose", "--file", str(COMPOSE), *profiles, "config"],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)["services"]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return rendered()


def configured(service: dict[str, Any]) -> Configuration:
    """Return the settings of a gateway in its container."""
    given = {name: value for name, value in service["environment"].items() if name.startswith("SLUICE_")}
    return load({}, (), {**IMAGE, **given})


def listener(service: dict[str, Any], name: str) -> Listener:
    (found,) = [each for each in configured(service).settings.listeners if each.name == name]
    return found


@pytest.mark.parametrize(("name", "port"), GATEWAYS.items())
def test_clients_outside_and_in_other_containers_are_sent_where_they_came_from(
    services: dict[str, Any], name: str, port: int
) -> None:
    service = services[name]
    assert configured(service).warnings == ()
    outside, inside = listener(service, "PLAINTEXT"), listener(service, "COMPOSE")
    assert (outside.bind, outside.advertised) == (("0.0.0.0", port), ("localhost", port))
    assert inside.bind[0] == "0.0.0.0"
    assert inside.advertised == (name, inside.bind[1])
    assert _published(service) == {port: port}
    # The first service names the node in its log.
    assert configured(service).settings.listeners[0] == outside


def test_the_address_for_clients_outside_can_be_given() -> None:
    services = rendered(SLUICE_ADVERTISE="kafka.example.org:9092", SLUICE_ADVERTISE_3="kafka.example.org:9094")
    assert configured(services["gateway"]).warnings == ()
    assert listener(services["gateway"], "PLAINTEXT").advertised == ("kafka.example.org", 9092)
    assert listener(services["gateway"], "COMPOSE").advertised[0] == "gateway"
    assert listener(services["gateway-3"], "PLAINTEXT").advertised == ("kafka.example.org", 9094)


def test_the_registry_reaches_the_gateway_and_is_published_on_this_host_only(services: dict[str, Any]) -> None:
    registry = services["schema-registry"]
    variables = registry["environment"]
    assert parse_address(variables["KARAPACE_BOOTSTRAP_URI"]) == listener(services["gateway"], "COMPOSE").advertised
    assert variables["KARAPACE_ADVERTISED_HOSTNAME"] == "schema-registry"
    port = int(variables["KARAPACE_PORT"])
    assert _published(registry) == {port: port}
    assert f"127.0.0.1:{port}/" in registry["healthcheck"]["test"][-1]
    assert registry["depends_on"]["gateway"]["condition"] == "service_healthy"
    written = yaml.safe_load(COMPOSE.read_text())["services"]["schema-registry"]
    assert written["profiles"] == ["registry"]
    assert written["ports"] == [f"127.0.0.1:{port}:{port}"]
    # A name without a host is resolved where the user's engine resolves names.
    assert registry["image"] == "karapace:6.2.0"
    assert rendered(KARAPACE_IMAGE="other/karapace:7")["schema-registry"]["image"] == "other/karapace:7"


def _published(service: dict[str, Any]) -> dict[int, int]:
    """Return the container's port for each port of the host, from the short or the long form."""
    found: dict[int, int] = {}
    for port in service["ports"]:
        if isinstance(port, str):
            *_, published, target = port.partition("/")[0].split(":")
        else:
            published, target = port["published"], port["target"]
        found[int(published)] = int(target)
    return found
