"""Commands that use the database directly. Without a database they create none."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from gateway.cli import main
from storage.migrate import has_tables
from storage.pool import Database

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


async def _has_tables(url: str) -> bool:
    database = await Database.open(url, hot_connections=1, cold_connections=1, control_connections=1)
    try:
        return await has_tables(database)
    finally:
        await database.close()
