"""Files with which a user starts Sluice: Makefile, locks, image, compose file and README."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from gateway.config.settings import load
from pipeline.jars import coordinates
from tests.gateway_process import free_ports
from tests.packages import BUILD_LOCK, DEVELOPMENT_LOCK, ROOT, RUNTIME_LOCK, START_SECONDS, locked, outside, serving
from tests.postgres import short_directory

DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")
"""Default values that the compose file gives for missing variables."""
PIPELINE_LOCK, DOCS_LOCK = "requirements-pipeline.lock", "requirements-docs.lock"
INSTALL_SECONDS = 600


# --- locks --------------------------------------------------------------------------------------------------------


def declared() -> dict[str, list[Requirement]]:
    """Return the requirements of pyproject.toml for each lock file that must contain them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    runtime = [Requirement(text) for text in project["project"]["dependencies"]]
    build = [Requirement(text) for text in project["dependency-groups"]["build"]]
    development = [Requirement(text) for text in project["dependency-groups"]["dev"]]
    system = [Requirement(text) for text in project["build-system"]["requires"]]
    extras = {
        name: [Requirement(text) for text in texts]
        for name, texts in project["project"]["optional-dependencies"].items()
    }
    runtime += extras["embedded"]
    return {
        RUNTIME_LOCK: runtime,
        BUILD_LOCK: build + system,
        DEVELOPMENT_LOCK: runtime + build + system + development,
        PIPELINE_LOCK: runtime + extras["pipeline"] + extras["demo"],
        DOCS_LOCK: [Requirement(text) for text in project["dependency-groups"]["docs"]],
    }


@pytest.mark.parametrize("name", [RUNTIME_LOCK, BUILD_LOCK, DEVELOPMENT_LOCK, PIPELINE_LOCK, DOCS_LOCK])
def test_a_lock_pins_by_hash_what_the_project_declares_and_names_no_host(name: str) -> None:
    text = (ROOT / name).read_text()
    assert "://" not in text
    assert not re.search(r"^\s*-(i|f|-index|-extra|-find|-trusted)", text, re.MULTILINE)
    entries = locked(name)
    for requirement, hashes in entries.values():
        assert [specifier.operator for specifier in requirement.specifier] == ["=="], requirement
        assert hashes > 0, requirement
    for requirement in declared()[name]:
        pinned = next(iter(entries[canonicalize_name(requirement.name)][0].specifier)).version
        assert requirement.specifier.contains(pinned), f"{requirement} is locked at {pinned}"


def test_the_locks_agree_so_that_run_and_test_share_one_environment() -> None:
    development = locked(DEVELOPMENT_LOCK)
    for name in (RUNTIME_LOCK, BUILD_LOCK):
        for package, (requirement, _) in locked(name).items():
            assert development[package][0].specifier == requirement.specifier
    for package, (requirement, _) in (locked(PIPELINE_LOCK) | locked(DOCS_LOCK)).items():
        assert package not in development or development[package][0].specifier == requirement.specifier


def test_the_pipelines_connector_is_of_pysparks_minor_version() -> None:
    versions = {artifact: version for _, artifact, version in coordinates()}
    pinned = next(iter(locked(PIPELINE_LOCK)["pyspark"][0].specifier)).version
    assert Version(versions["spark-sql-kafka-0-10_2.13"]).release[:2] == Version(pinned).release[:2]


# --- make ---------------------------------------------------------------------------------------------------------


def make(*arguments: str, directory: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments], cwd=directory, env=outside(), capture_output=True, text=True, timeout=INSTALL_SECONDS
    )


def test_make_without_a_target_lists_the_targets() -> None:
    said = make().stdout
    for command in ("run", "test", "check", "bench", "lock"):
        assert f"make {command} " in said


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 1", "Sluice needs Python 3.11 or newer"),
        (f'case "$*" in *ensurepip*) exit 1;; *) exec {sys.executable} "$@";; esac', "install its venv package"),
    ],
)
def test_an_unsuitable_interpreter_is_refused_with_one_line(tmp_path: Path, script: str, message: str) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{script}\n")
    interpreter.chmod(0o755)
    result = make("run", f"PYTHON={interpreter}", f"VENV={tmp_path / 'venv'}")
    assert result.returncode != 0
    assert message in result.stderr.splitlines()[0]


@pytest.fixture
def checkout() -> Iterator[Path]:
    """Copy the project's own files, as a clone has them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    with short_directory() as directory:
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, directory / name)
        yield directory


@pytest.mark.long
@pytest.mark.timeout(INSTALL_SECONDS)
def test_make_run_serves_from_a_fresh_checkout_and_again_at_once(checkout: Path) -> None:
    installed = make(".venv/run.stamp", f"PYTHON={sys.executable}", directory=checkout)
    assert installed.returncode == 0, installed.stderr
    assert "up to date" in make(".venv/run.stamp", directory=checkout).stdout
    port, metrics_port = free_ports(2)
    arguments = f"--listen 127.0.0.1:{port} --metrics-listen 127.0.0.1:{metrics_port}"
    for _ in range(2):
        command = ["make", "run", f"ARGS={arguments}"]
        with serving(command, checkout, outside(), f"127.0.0.1:{port}") as said:
            assert f"127.0.0.1:{port}" in said.read_text()
        assert (checkout / ".sluice" / "postgres" / "PG_VERSION").read_text() == "18\n"


# --- image --------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions in order, with continuation lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for name, arguments in instructions():
        if name == "FROM":
            found.append([])
        found[-1].append((name, arguments))
    return found


def image_environment() -> dict[str, str]:
    """Return the ENV values of the final stage."""
    return dict(
        assignment.split("=", 1)
        for name, arguments in stages()[-1]
        if name == "ENV"
        for assignment in arguments.split()
    )


def test_the_image_runs_as_a_numbered_user_that_is_not_root() -> None:
    users = [arguments for name, arguments in stages()[-1] if name == "USER"]
    assert len(users) == 1
    assert int(users[0]) > 0


def test_every_file_that_the_image_copies_is_in_its_build_context() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name, arguments in stages()[0]:
        if name == "COPY":
            for source in arguments.split()[:-1]:
                assert source in allowed
                assert (ROOT / source).exists()


@pytest.mark.long
@pytest.mark.timeout(INSTALL_SECONDS)
def test_the_steps_of_the_image_make_a_gateway_that_serves_and_reports_its_health() -> None:
    """Run the builder's COPY and RUN steps, with /build and /opt at other places. Then run the command of the final
    stage.
    """
    with short_directory() as directory:
        build(directory)
        sluice = directory / "opt" / "sluice" / "bin" / "sluice"
        (wheel,) = (directory / "build" / "dist").glob("*.whl")
        packed = zipfile.ZipFile(wheel).namelist()
        assert {name.split("/")[0] for name in packed if ".dist-info" not in name} == {"sluice"}
        assert any(name.endswith("/LICENSE") for name in packed)

        port, metrics_port = free_ports(2)
        moved = {
            **image_environment(),
            "PATH": os.environ["PATH"],
            "SLUICE_LISTEN": f"0.0.0.0:{port}",
            "SLUICE_METRICS_LISTEN": f"0.0.0.0:{metrics_port}",
            "SLUICE_DATA_DIR": str(directory / "data"),
        }
        (check,) = [
            json.loads(arguments.split("CMD", 1)[1]) for name, arguments in stages()[-1] if name == "HEALTHCHECK"
        ]
        command = [
            json.loads(arguments)
            for wanted in ("ENTRYPOINT", "CMD")
            for name, arguments in stages()[-1]
            if name == wanted
        ]
        started = [str(sluice), *command[0][1:], *command[1]]
        with serving(started, directory, outside(**moved), f"127.0.0.1:{port}"):
            assert check[0] == command[0][0] == "sluice"
            healthy = [str(sluice), *check[1:]]
            assert subprocess.run(healthy, env=outside(**moved), timeout=START_SECONDS).returncode == 0
        assert subprocess.run(healthy, env=outside(**moved), timeout=START_SECONDS).returncode != 0


def build(directory: Path) -> None:
    work = directory / "build"
    work.mkdir()
    # In the image, `python` is this interpreter.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for name, arguments in stages()[0]:
        if name == "COPY":
            *sources, target = arguments.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, work / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, work / target)
        elif name == "RUN":
            step = arguments.replace("/opt/", f"{directory}/opt/")
            result = subprocess.run(
                ["sh", "-c", step], cwd=work, env=outside(PATH=path), capture_output=True, text=True
            )
            assert result.returncode == 0, f"{arguments}\n{result.stdout}\n{result.stderr}"


# --- compose ------------------------------------------------------------------------------------------------------


@pytest.fixture
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_docker_compose_accepts_the_file() -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("docker-compose is not installed")
    result = subprocess.run([program, "config", "-q"], cwd=ROOT, env=outside(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_cluster_profile_has_three_gateways_behind_ports_of_their_own(compose: dict[str, Any]) -> None:
    gateways = {name: service for name, service in compose["services"].items() if name.startswith("gateway")}
    assert [service.get("profiles") for service in gateways.values()] == [None, ["cluster"], ["cluster"]]
    for port, service in zip((9092, 9093, 9094), gateways.values(), strict=True):
        given = {name: re.sub(DEFAULT, r"\1", value) for name, value in service["environment"].items() if value}
        settings = load({}, (), given).settings
        assert settings.listeners[0].bind == ("0.0.0.0", port)
        assert settings.listeners[0].advertised == ("localhost", port)
        assert service["ports"] == [f"{port}:{port}"]
        assert service["healthcheck"]["test"] == ["CMD", "sluice", "healthcheck"]


def test_docker_compose_resolves_the_cluster_profile_as_documented() -> None:
    """Three gateways share one database and one store of bytes. Each has its own address and port."""
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("docker-compose is not installed")
    command = [program, "--profile", "cluster", "config"]
    result = subprocess.run(command, cwd=ROOT, env=outside(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    services = yaml.safe_load(result.stdout)["services"]
    gateways = {name: service for name, service in services.items() if service["image"] == "sluice"}
    shared: set[tuple[str | None, object]] = set()
    ports: list[int] = []
    for service in gateways.values():
        given = {name: value for name, value in service["environment"].items() if value is not None}
        settings = load({}, (), given).settings
        shared.add((settings.database_url, settings.log_store))
        (listener, _), (published,) = settings.listeners, service["ports"]
        ports.append(listener.advertised[1])
        assert listener.advertised == ("localhost", int(published["published"]))
        assert listener.bind == ("0.0.0.0", published["target"])
        assert service["depends_on"]["postgres"]["condition"] == "service_healthy"
    (database_url, log_store), *others = shared
    assert not others
    assert database_url == f"postgresql://sluice@postgres:5432/{services['postgres']['environment']['POSTGRES_DB']}"
    assert log_store is None, "no container reaches what another keeps in its own files"
    up = "docker compose --profile cluster up"
    first, second, third = sorted(set(ports))
    head = (ROOT / "docker-compose.yml").read_text().partition("services:")[0]
    assert f"`{up}`, then localhost:{first}, {second} and {third}." in head
    assert f"`{up}` runs three gateways" in (ROOT / "docs/operate.md").read_text()


def test_the_gateway_waits_for_a_healthy_postgres_and_reports_a_round_trip(compose: dict[str, Any]) -> None:
    postgres, gateway = compose["services"]["postgres"], compose["services"]["gateway"]
    assert "pg_isready" in postgres["healthcheck"]["test"]
    assert gateway["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert gateway["healthcheck"]["test"] == ["CMD", "sluice", "healthcheck"]
    (volume,) = postgres["volumes"]
    assert volume.split(":")[0] in compose["volumes"]


def test_every_variable_of_image_and_compose_file_is_a_setting_of_the_gateway(compose: dict[str, Any]) -> None:
    given = {name: value for name, value in image_environment().items() if name.startswith("SLUICE_")}
    for name, value in compose["services"]["gateway"]["environment"].items():
        if value:
            given[name] = re.sub(DEFAULT, r"\1", value)
    settings = load({}, (), given).settings
    assert settings.listeners[0].bind == ("0.0.0.0", 9092)
    assert settings.listeners[0].advertised == ("localhost", 9092)
    postgres = compose["services"]["postgres"]["environment"]
    assert settings.database_url is not None
    assert f"{postgres['POSTGRES_USER']}@postgres:5432/{postgres['POSTGRES_DB']}" in settings.database_url
    assert compose["services"]["gateway"]["ports"] == ["9092:9092"]


# --- README -------------------------------------------------------------------------------------------------------


def test_the_readme_table_of_apis_equals_the_served_apis() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "gateway.cli", "apis", "--markdown"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    text = (ROOT / "docs/apis.md").read_text()
    between = re.search(r"<!-- apis:begin[^>]*-->\n(.*?)<!-- apis:end -->", text, re.DOTALL)
    assert between is not None
    assert between.group(1).strip() == printed.strip(), "bring it up to date with: make readme"


PAGES = (
    "README.md",
    "docs/configure.md",
    "docs/kubernetes.md",
    "docs/monitoring.md",
    "docs/move-from-kafka.md",
    "docs/releasing.md",
    "docs/restore.md",
    "docs/sql.md",
    "docs/testing.md",
    "SECURITY.md",
    "docs/operate.md",
    "docs/security.md",
    "docs/storage.md",
    "docs/systemd.md",
    "docs/index.md",
    "docs/tutorial.md",
    "docs/rebalances.md",
    "docs/durability.md",
)


@functools.cache
def _help_of_commands() -> str:
    return "".join(
        subprocess.run(
            [sys.executable, "-m", "gateway.cli", *command, "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for command in (
            ["serve"],
            ["mirror"],
            ["test-server"],
            ["check"],
            ["groups", "reset-offsets"],
            ["topics", "tail"],
        )
    )


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_only_options_commands_and_links_that_exist(page: str) -> None:
    text, help_text = (ROOT / page).read_text(), _help_of_commands()
    for flag in set(re.findall(r"`(--[a-z-]+)", text)):
        assert flag in help_text, flag
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in set(re.findall(r"\bmake ([a-z-]+)\b", text)) & set(re.findall(r"`make ([a-z-]+)", text)):
        assert target in targets, target
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link
