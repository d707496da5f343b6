"""Database URLs: several hosts and IPv6 addresses on every Python, and URLs that are refused."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest
from asyncpg.connect_utils import _parse_connect_dsn_and_args

from storage.backup import back_up
from storage.database_url import parse_database_url
from storage.errors import StorageUnavailable
from storage.guard import HistoryGuard
from storage.history import HistoryStore
from storage.notify import Listener
from storage.pool import SESSION_SETTINGS

UNSET = (
    "host port user password passfile database ssl service servicefile direct_tls server_settings "
    "target_session_attrs krbsrvname gsslib"
)


def addresses(url: str) -> Any:
    """Return the addresses, and the user and password, with which asyncpg would connect."""
    given = dict.fromkeys(UNSET.split())
    found, parameters, *_ = _parse_connect_dsn_and_args(dsn=parse_database_url(url).for_asyncpg, **given)
    return found, parameters.user, parameters.password, parameters.database


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://me@host/db", [("host", 5432)]),
        ("postgresql://me@[::1]:5433/db", [("::1", 5433)]),
        ("postgresql://me@one,two:7/db", [("one", 5432), ("two", 7)]),
        ("postgresql://me@host,[::1]:5433/db", [("host", 5432), ("::1", 5433)]),
        ("postgres://me@[fe80::1]:1,[fe80::2]:2/db?sslmode=disable", [("fe80::1", 1), ("fe80::2", 2)]),
        ("postgresql://me@/db?host=one,two&port=1,2", [("one", 1), ("two", 2)]),
    ],
)
def test_hosts_and_ports_reach_asyncpg(url: str, expected: list[tuple[str, int]]) -> None:
    assert addresses(url) == (expected, "me", None, "db")


def test_the_login_reaches_asyncpg_with_several_hosts() -> None:
    assert addresses("postgresql://a%40b:s%2Ft@host,[::1]/d%20b")[1:] == ("a@b", "s/t", "d b")


@pytest.mark.parametrize(
    ("url", "shown", "password"),
    [
        ("postgresql://me@host/db", "postgresql://me@host/db", None),
        (
            "postgresql://a%40b:s%2Ft%20@host,[::1]/d?sslmode=disable",
            "postgresql://a%40b@host,[::1]/d?sslmode=disable",
            "s/t ",
        ),
        ("postgresql://me@/d?host=%2Frun&password=a%26b&port=1", "postgresql://me@/d?host=%2Frun&port=1", "a&b"),
        ("postgresql://me:first@/d?password=second", "postgresql://me@/d", "second"),
        ("postgresql:///d?pass%77ord=secret", "postgresql:///d", "secret"),
    ],
)
def test_the_password_is_removed_from_a_url(url: str, shown: str, password: str | None) -> None:
    assert parse_database_url(url).without_password() == (shown, password)


def test_a_url_whose_password_cannot_be_passed_otherwise_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^every user of this machine would see sslpassword") as refused:
        parse_database_url("postgresql://me@host/db?sslpassword=secret").without_password()
    assert "=secret" not in str(refused.value)


SEVERAL_HOSTS = "postgresql://me@host,[::1]:5433/db"


def beside_the_pools(directory: Path) -> Iterator[Awaitable[object]]:
    """Modules that open connections without a pool."""
    database: Any = SimpleNamespace(url=SEVERAL_HOSTS, guard=HistoryGuard())
    yield HistoryStore(database).adopt()
    yield Listener(database, {}).listen(lambda: None, lambda: None)
    yield back_up(SEVERAL_HOSTS, None, directory)


async def test_connections_outside_the_pools_read_the_url_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A node with pools also needs these connections: to know its history, to listen to other nodes, and to make
    backups.
    """
    asked: list[str] = []

    async def nobody(dsn: str, **_: object) -> None:
        asked.append(dsn)
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncpg, "connect", nobody)
    for opening in beside_the_pools(tmp_path):
        with pytest.raises(StorageUnavailable):
            await opening
    assert asked == [parse_database_url(SEVERAL_HOSTS).for_asyncpg] * 3


async def test_connections_outside_the_pools_set_the_settings_they_rely_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pooler in session mode refuses a connection that names unknown settings, or drops these settings."""
    named: list[set[str]] = []
    pinned: list[list[str]] = []

    class Connection:
        async def fetch(self, query: str, names: list[str], values: list[str]) -> None:
            pinned.append(names)
            raise ConnectionResetError

        def terminate(self) -> None:
            pinned[-1].append("terminated")

    async def connect(dsn: str, **options: Any) -> Connection:
        named.append(set(options.get("server_settings", ())))
        return Connection()

    monkeypatch.setattr(asyncpg, "connect", connect)
    for opening in beside_the_pools(tmp_path):
        with pytest.raises(StorageUnavailable):
            await opening
    assert named == [set()] * 3
    of_history, of_listener, of_backup = pinned
    assert {*SESSION_SETTINGS, "statement_timeout", "terminated"} == set(of_history)
    assert of_listener == ["application_name", "search_path", "terminated"]
    timeouts = ["idle_in_transaction_session_timeout", "idle_session_timeout", "lock_timeout", "statement_timeout"]
    assert sorted(of_backup) == sorted(["search_path", *timeouts, "transaction_timeout", "terminated"])


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://host/db",
        "postgresql:host",
        "postgresql://host:port/db",
        "postgresql://host:0/db",
        "postgresql://host:70000/db",
        "postgresql://me:[secret@host/db",
        "postgresql://me@[::1/db",
        "postgresql://me@a,,b/db",
        "postgresql://me@a@b/db",
        "postgresql://host/db?port=1,x",
    ],
)
def test_an_invalid_database_url_is_refused_without_showing_its_secrets(url: str) -> None:
    with pytest.raises(ValueError, match="URL") as refused:
        parse_database_url(url)
    assert "secret" not in str(refused.value)
