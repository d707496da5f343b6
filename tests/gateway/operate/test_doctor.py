"""`sluice doctor` against a real Postgres, real sockets and a real disk."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.operate.doctor import examine_clock, examine_open_files, judge_syncs
from storage.pool import connect
from tests.gateway_process import GatewayProcess, free_ports
from tests.pooler import admit_pooler, pooler
from tests.restorable_postgres import RestorablePostgres


def findings(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, str]]:
    """Return the exit code, and the problem that each check found."""
    capsys.readouterr()
    code = main(["doctor", "--json", *words])
    return code, {each["check"]: each["problem"] for each in json.loads(capsys.readouterr().out)}


async def alter_system(url: str, settings: dict[str, str]) -> None:
    connection = await connect(url, {})
    try:
        for name, value in settings.items():
            await connection.execute(f"alter system set {name} = '{value}'")
    finally:
        await connection.close()


async def admit(url: str) -> None:
    connection = await connect(url, {})
    try:
        await admit_pooler(connection)
    finally:
        await connection.close()


def test_settings_that_lose_or_delay_records_are_findings(
    restorable: RestorablePostgres, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dangerous = {"fsync", "full_page_writes", "max_wal_size"}
    options = ("--database-url", restorable.url, "--data-dir", str(tmp_path))
    assert not findings(capsys, *options)[1].keys() & dangerous
    broken = {"fsync": "off", "full_page_writes": "off", "max_wal_size": "64MB"}
    asyncio.run(alter_system(restorable.url, broken))
    restorable.stop()
    restorable.start()
    code, found = findings(capsys, *options)
    assert code == 1
    assert found.keys() >= dangerous


def test_a_pooler_in_transaction_mode_is_a_finding(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(admit(database_url))
    with pooler(database_url, tmp_path, mode="transaction", ignored="") as url:
        code, found = findings(capsys, "--database-url", url, "--data-dir", str(tmp_path))
    assert code == 1
    assert "session mode" in found["pooler"]


def test_an_advertised_address_that_nobody_serves_is_a_finding(
    gateway: GatewayProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gateway.database_url is not None
    common = ("--database-url", gateway.database_url, "--data-dir", str(tmp_path))
    _, served = findings(capsys, *common, "--listen", gateway.bootstrap)
    assert "advertised" not in served
    (port,) = free_ports(1)
    code, refused = findings(capsys, *common, "--listen", gateway.bootstrap, "--advertise", f"127.0.0.1:{port}")
    assert code == 1
    assert refused["advertised"].startswith(f"127.0.0.1:{port} cannot be reached from this host: ")


def test_more_connections_than_postgres_admits_are_a_finding(
    gateway: GatewayProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gateway.database_url is not None
    options = ("--listen", gateway.bootstrap, "--data-dir", str(tmp_path), "--workers", "64")
    code, found = findings(capsys, "--database-url", gateway.database_url, *options)
    assert code == 1
    assert "max_connections" in found


def test_an_unreachable_postgres_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"postgresql://nobody@127.0.0.1:{taken.getsockname()[1]}/none"
        assert main(["doctor", "--database-url", url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sluice: Postgres cannot be examined: ")


def test_clock_disk_and_open_files_have_bounds(tmp_path: Path) -> None:
    assert examine_clock(1_000, 900, 1_100) == []
    assert examine_clock(1_601, 900, 1_100)[0].check == "clock"
    assert examine_clock(399, 900, 1_100)[0].check == "clock"
    assert judge_syncs(tmp_path, 10.0) == []
    assert judge_syncs(tmp_path, 10.1)[0].check == "disk"
    assert examine_open_files(-1) == examine_open_files(4096) == []
    assert examine_open_files(1024)[0].check == "open-files"
