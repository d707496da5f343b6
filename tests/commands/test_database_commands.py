"""Commands that use the database directly. Without a database they create none."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import asyncpg
import pytest

from gateway.cli import main
from storage.embedded_socket import LOCK_NAME
from storage.migrate import has_tables
from storage.pool import Database
from storage.postgres_programs import bin_directory

COMMANDS = [
    ("check",),
    ("backup", "{out}"),
    ("nodes",),
    ("users", "add", "bob", "--password-stdin"),
    ("users", "list"),
    ("users", "delete", "bob"),
    ("groups", "history", "orders"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_without_a_database_creates_none(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("her password\n"))
    absent, out = tmp_path / "absent", tmp_path / "out"
    arguments = [word.format(out=out) for word in words]
    assert main([*arguments, "--data-dir", str(absent)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("sluice: no gateway ")
    assert line.endswith(f"{absent}: give --config, --database-url or --data-dir")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code"), [(("doctor",), 2), (("nodes",), 1), (("groups", "history", "orders"), 1)], ids=str
)
def test_a_data_directory_that_cannot_be_read_is_reported_in_one_line(
    words: tuple[str, ...], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A symbolic link in the place of the lock is refused, as the lock of another user is."""
    (tmp_path / LOCK_NAME).symlink_to("elsewhere")
    assert main([*words, "--data-dir", str(tmp_path)]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sluice: ")
    assert f"cannot look into {tmp_path}: " in line


@pytest.mark.parametrize("words", [("check",), ("backup", "{out}"), ("users", "list"), ("nodes",)], ids=" ".join)
def test_a_data_directory_that_cannot_be_found_out_about_is_reported_in_one_line(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / ("x" * 300)
    assert main([*(word.format(out=tmp_path / "out") for word in words), "--data-dir", str(place)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"sluice: cannot look into {place}: File name too long"


@pytest.mark.parametrize("words", [("check",), ("users", "list"), ("users", "delete", "bob")], ids=" ".join)
def test_a_command_creates_no_tables_in_another_database(
    words: tuple[str, ...], empty_database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--database-url", empty_database_url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sluice: no gateway has served from this database: ")
    assert not asyncio.run(_has_tables(empty_database_url))


def test_the_first_user_may_be_created_before_the_first_gateway_starts(
    empty_database_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("her password\n"))
    assert main(["users", "add", "alice", "--password-stdin", "--database-url", empty_database_url]) == 0
    capsys.readouterr()
    assert main(["users", "list", "--database-url", empty_database_url]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["alice", "SCRAM-SHA-256"],
        ["alice", "SCRAM-SHA-512"],
    ]


@pytest.mark.parametrize("words", [("check",), ("backup", "{out}")], ids=" ".join)
def test_a_command_that_only_reads_gives_a_database_no_log_store(
    words: tuple[str, ...], database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a log store of its own, the database would refuse the nodes that keep its records in Postgres."""
    arguments = [word.format(out=tmp_path / "out") for word in words]
    assert main([*arguments, "--database-url", database_url, "--log-store", str(tmp_path / "log")]) == 0
    assert asyncio.run(_log_stores(database_url)) == 0
    assert not (tmp_path / "log").exists()


def test_a_backup_and_its_restore_run_the_programs_of_the_given_directory(
    database_url: str, empty_database_url: str, tmp_path: Path
) -> None:
    """Without the option, a machine may have no Postgres, or one that is too old for the server."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("postgres", "initdb", "pg_dump", "pg_restore", "psql"):
        (programs / name).write_text(f'#!/bin/sh\ntouch "$0.ran"\nexec {bin_directory() / name} "$@"\n')
        (programs / name).chmod(0o755)
    given = ("--postgres-bin", str(programs), "--database-url")
    assert main(["backup", str(tmp_path / "out"), *given, database_url]) == 0
    assert main(["restore", str(tmp_path / "out"), *given, empty_database_url]) == 0
    assert {path.stem for path in programs.glob("*.ran")} >= {"pg_dump", "pg_restore", "psql"}


@pytest.mark.parametrize("words", [("backup", "{out}"), ("restore", "{out}")], ids=" ".join)
def test_a_directory_without_the_programs_of_a_backup_is_named(
    words: tuple[str, ...],
    database_url: str,
    empty_database_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, programs = tmp_path / "out", tmp_path / "programs"
    programs.mkdir()
    url = database_url
    if words[0] == "restore":
        assert main(["backup", str(out), "--database-url", database_url]) == 0
        url = empty_database_url
    capsys.readouterr()
    arguments = [word.format(out=out) for word in words]
    assert main([*arguments, "--postgres-bin", str(programs), "--database-url", url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sluice: {programs} has no pg_")
    assert "--postgres-bin" in line


def test_a_backup_whose_last_file_cannot_be_written_gives_the_reason_in_one_line(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk may be full by then. A directory in the file's place fails in the same step."""
    out = tmp_path / "out"
    (out / "manifest.json.new").mkdir(parents=True)
    assert main(["backup", str(out), "--database-url", database_url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sluice: cannot write to {out}: ")


async def _log_stores(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval("delete from sluice.log_store returning 1") or 0
    finally:
        await connection.close()


async def _has_tables(url: str) -> bool:
    database = await Database.open(url, hot_connections=1, cold_connections=1, control_connections=1)
    try:
        return await has_tables(database)
    finally:
        await database.close()
