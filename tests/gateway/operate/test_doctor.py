"""`sluice doctor` against a real Postgres, real sockets and a real disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.operate.doctor import examine_clock, examine_open_files, judge_syncs
from storage.pool import connect
from tests.gateway_process import GatewayProcess, free_ports
from tests.pooler import admit_pooler, pooler
from tests.restorable_postgres import RestorablePostgres
from tests.steps.waiting import wait_for


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


def test_address_of_all_workers_is_looked_up_once(
    gateway: GatewayProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gateway.database_url is not None
    shared, private = free_ports(2, in_a_row=2)
    given = {
        "listeners": f"CLIENTS://127.0.0.1:{shared},NODES://127.0.0.1:{private}",
        "listener.security.protocol.map": "CLIENTS:PLAINTEXT,NODES:PLAINTEXT",
        "shared.listener.names": "CLIENTS",
        "inter.broker.listener.name": "NODES",
    }
    options = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    with contextlib.ExitStack() as stack:
        for port in (shared, private, private + 1):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        common = ("--database-url", gateway.database_url, "--data-dir", str(tmp_path), "--workers", "2")
        assert "advertised" not in findings(capsys, *common, *options)[1]


def test_more_connections_than_postgres_admits_are_a_finding(
    gateway: GatewayProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gateway.database_url is not None
    options = ("--listen", gateway.bootstrap, "--data-dir", str(tmp_path), "--workers", "64")
    code, found = findings(capsys, "--database-url", gateway.database_url, *options)
    assert code == 1
    assert "max_connections" in found


def test_each_connection_of_a_node_is_counted(
    gateway: GatewayProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = gateway.database_url
    assert url is not None
    names = ("sluice listener", "sluice relay")
    wait_for(lambda: asyncio.run(sessions(url, names)), "two sessions beside the pools", holds=lambda found: found == 2)
    hot, cold, control, confirming, workers = 2, 2, 3, 1, 64
    pools = ("--hot-connections", str(hot), "--cold-connections", str(cold), "--workers", str(workers))
    _, found = findings(capsys, "--database-url", url, "--data-dir", str(tmp_path), *pools)
    (needed,) = re.findall(r"open up to (\d+)$", found["max_connections"])
    assert int(needed) == workers * (hot + cold + control + len(names) + confirming)


async def sessions(url: str, names: Sequence[str]) -> int:
    connection = await connect(url, {})
    try:
        return await connection.fetchval(
            "select count(*) from pg_stat_activity where datname = current_database() and application_name = any($1)",
            names,
        )
    finally:
        await connection.close()


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
