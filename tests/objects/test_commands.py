"""`sluice check`, `backup` and `restore` with records in a bucket."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.chaos.load import read_all
from tests.clients.topics import create_topic
from tests.gateway_process import ROOT, GatewayFactory
from tests.objects.conftest import StartGateway
from tests.objects.records import moved, produce
from tests.objects.s3_server import S3Server
from tests.postgres import EMPTY, Databases


def sluice(s3: S3Server, url: str, database_url: str, *command: str) -> tuple[int, str]:
    """Run a command, and return its exit code and its output."""
    done = subprocess.run(
        [sys.executable, "-m", "gateway.cli", *command, "--database-url", database_url, "--log-store", url],
        cwd=ROOT,
        env={**os.environ, **s3.environment()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


async def test_a_check_names_missing_and_unknown_objects(
    start_gateway: StartGateway, s3: S3Server, url: str, database_url: str
) -> None:
    gateway = start_gateway(url, shared=database_url)
    topic = create_topic(gateway.bootstrap, 1)
    for first in (0, 300):
        produce(gateway.bootstrap, topic, 300, first=first)
        await moved(database_url)
    gateway.stop()
    code, said = sluice(s3, url, database_url, "check")
    assert code == 0, said
    assert "are right" in said
    folder = s3.files / url.rpartition("/")[2]
    one, two = sorted(folder.glob("*.object"))
    stray = folder / f"{2**40:016x}.object"
    stray.write_bytes(b"stray")
    one.unlink()
    content = bytearray(two.read_bytes())
    content[-1] ^= 1
    two.write_bytes(content)
    code, said = sluice(s3, url, database_url, "check")
    assert code == 1
    assert f"object {one.stem} at 0" in said
    assert f"object {two.stem} at 0" in said
    assert f"{url}/{stray.name}: the index does not know this file" in said
    code, said = sluice(s3, url, database_url, "check", "--repair")
    assert "1 unknown files deleted" in said
    assert not stray.exists()
    assert two.exists(), "what is damaged is left to people"


@pytest.mark.parametrize("into", ["bucket", "directory"])
async def test_a_backup_of_a_bucket_is_restored_into_either(
    start_gateway: StartGateway,
    gateway_factory: GatewayFactory,
    s3: S3Server,
    url: str,
    database_url: str,
    postgres: Databases,
    tmp_path: Path,
    into: str,
) -> None:
    gateway = start_gateway(url, shared=database_url)
    topic = create_topic(gateway.bootstrap, 2)
    produce(gateway.bootstrap, topic, 2_000)
    await moved(database_url)
    produce(gateway.bootstrap, topic, 10, partition=1)
    expected = read_all(gateway.bootstrap, topic, 2)
    backup = tmp_path / "backup"
    code, said = sluice(s3, url, database_url, "backup", str(backup))
    assert code == 0, said
    code, said = sluice(s3, url, database_url, "backup", str(backup))
    assert code == 0, said
    assert ", 0 of them copied" in said or ", 1 of them copied" in said, "only what is new"
    other = postgres.create(EMPTY)
    place = f"{url}-{uuid.uuid4().hex[:6]}" if into == "bucket" else str(tmp_path / "log")
    code, said = sluice(s3, url, other, "restore", str(backup))
    assert code == 1
    assert f"{url} is not empty" in said
    code, said = sluice(s3, place, other, "restore", str(backup))
    assert code == 0, said
    code, said = sluice(s3, place, other, "check")
    assert code == 0, said
    environment = {"SLUICE_LOG_STORE": place, **s3.environment()}
    code, said = sluice(s3, url, other, "check")
    assert code == 1
    assert "holds the records of another database" in said, "the original's store is not the copy's"
    restored = gateway_factory(database_url=other, environment=environment)
    assert read_all(restored.bootstrap, topic, 2) == expected
    produce(restored.bootstrap, topic, 5)
