"""Secrets that a variable names by a file: which variables may do so, and which files are refused. A refusal never
shows the file's content.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.config.errors import ConfigurationError
from gateway.config.secret_files import MAX_SECRET_BYTES
from gateway.config.settings import load

URL = "postgresql://me:secret@host/db"
JAAS = 'org.apache.kafka.common.security.plain.PlainLoginModule required user_a="x,b=y" user_c="z";'
ASKING = {
    "SLUICE_SET": "listeners=IN://127.0.0.1:1\nlistener.security.protocol.map=IN:SASL_PLAINTEXT",
    "SLUICE_BROKER_NUM_PARTITIONS": "3",
}


def write(directory: Path, content: str | bytes) -> str:
    path = directory / f"secret-{len(list(directory.iterdir()))}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_url_in_a_file_is_loaded_without_its_line_break(tmp_path: Path, end: str) -> None:
    path = write(tmp_path, URL + end)
    loaded = load({}, (), {"SLUICE_DATABASE_URL_FILE": path})
    assert (loaded.settings.database_url, loaded.settings.database_url_file) == (URL, Path(path))
    assert loaded.settings.sources.files == (Path(path),)
    (shown,) = (value for value in loaded.values if value.name == "database-url")
    assert shown.text == "postgresql://me:…@host/db"
    assert shown.origin == f"file {path} of SLUICE_DATABASE_URL_FILE"


def test_flag_beats_the_file_of_a_secret(tmp_path: Path) -> None:
    environment = {"SLUICE_DATABASE_URL_FILE": write(tmp_path, URL)}
    settings = load({"database-url": "postgresql://other/db"}, (), environment).settings
    assert (settings.database_url, settings.database_url_file) == ("postgresql://other/db", None)


def test_secret_broker_setting_is_read_from_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "token key\n")
    loaded = load({}, (), {"SLUICE_BROKER_DELEGATION_TOKEN_SECRET_KEY_FILE": path})
    assert loaded.settings.broker.delegation_token_secret_key == "token key"
    (shown,) = (value for value in loaded.values if value.name == "delegation.token.secret.key")
    assert (shown.text, path in shown.origin) == ("[hidden]", True)


def test_file_of_settings_holds_one_per_line_and_beats_the_variable(tmp_path: Path) -> None:
    lines = f"listener.name.in.sasl.enabled.mechanisms=PLAIN\n\nlistener.name.in.plain.sasl.jaas.config={JAAS}\n"
    path = write(tmp_path, f"{lines}num.network.threads=5\n")
    given = {**ASKING, "SLUICE_SET": f"{ASKING['SLUICE_SET']}\nnum.network.threads=4", "SLUICE_SET_FILE": path}
    static = load({}, (), given).settings.broker.static
    assert static["listener.name.in.plain.sasl.jaas.config"] == JAAS
    assert static["num.network.threads"] == "5"
    assert static["num.partitions"] == "3"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"\xff", "not UTF-8"),
        (b"x" * (MAX_SECRET_BYTES + 1), "has more than"),
        (None, "No such file"),
    ],
)
def test_unusable_file_is_refused_by_name(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = str(tmp_path / "absent") if content is None else write(tmp_path, content)
    with pytest.raises(ConfigurationError) as refused:
        load({}, (), {"SLUICE_DATABASE_URL_FILE": path})
    assert str(refused.value).startswith(f"SLUICE_DATABASE_URL_FILE: '{path}' (from environment): ")
    assert reason in str(refused.value)


def test_pipe_is_refused_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="must be a file"):
        load({}, (), {"SLUICE_DATABASE_URL_FILE": str(tmp_path / "pipe")})


def test_secret_given_by_value_and_by_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="SLUICE_DATABASE_URL is set, too"):
        load({}, (), {"SLUICE_DATABASE_URL": URL, "SLUICE_DATABASE_URL_FILE": write(tmp_path, URL)})


def test_setting_that_is_no_secret_has_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no setting has this variable"):
        load({}, (), {"SLUICE_LISTEN_FILE": write(tmp_path, "127.0.0.1:1")})


@pytest.mark.parametrize(
    ("variable", "content"),
    [
        ("SLUICE_DATABASE_URL_FILE", "http://me:hush@host"),
        ("SLUICE_SET_FILE", "hush"),
        ("SLUICE_SET_FILE", "listener.name.in.plain.sasl.jaas=hush"),
        ("SLUICE_SET_FILE", "num.partitions=hush"),
        ("SLUICE_SET_FILE", "listener.name.in.plain.sasl.jaas.config=hush"),
    ],
)
def test_content_of_a_refused_file_is_not_shown(tmp_path: Path, variable: str, content: str) -> None:
    enabled = f"{ASKING['SLUICE_SET']}\nlistener.name.in.sasl.enabled.mechanisms=PLAIN"
    with pytest.raises(ConfigurationError) as refused:
        load({}, (), {"SLUICE_SET": enabled, variable: write(tmp_path, content)})
    assert "hush" not in str(refused.value)


def test_settings_are_loaded_again_from_changed_files(tmp_path: Path) -> None:
    path = write(tmp_path, URL)
    settings = load({}, iter(["num.partitions=2"]), {"SLUICE_DATABASE_URL_FILE": path}).settings
    Path(path).write_text("postgresql://me:new@host/db\n")
    again = settings.sources.load()
    assert (again.database_url, again.broker.num_partitions) == ("postgresql://me:new@host/db", 2)
