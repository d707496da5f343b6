"""The compose file: Postgres and the gateways use one password, with any characters in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from asyncpg.connect_utils import _parse_connect_dsn_and_args

from storage.database_url import parse_database_url

COMPOSE = Path(__file__).parents[2] / "docker-compose.yml"
UNSET = (
    "host port user password passfile database ssl service servicefile direct_tls server_settings "
    "target_session_attrs krbsrvname gsslib"
)


def settings(password: str) -> dict[str, str]:
    """Return the variables of the file that concern the database, with `password` interpolated as compose does it."""
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
