"""The configuration file of the embedded Postgres, as text."""

from __future__ import annotations

from pathlib import Path

from storage.embedded_settings import SERVER_SETTINGS, configuration


def test_more_connections_than_the_default_get_room() -> None:
    assert "max_connections = '100'\n" in configuration(SERVER_SETTINGS, 99, Path("/s"), 18)
    assert "max_connections = '150'\n" in configuration(SERVER_SETTINGS, 150, Path("/s"), 18)


def test_setting_unknown_to_an_older_server_is_left_out() -> None:
    assert "io_workers = '2'\n" in configuration(SERVER_SETTINGS, 0, Path("/s"), 18)
    assert "io_workers" not in configuration(SERVER_SETTINGS, 0, Path("/s"), 17)


def test_quote_and_backslash_in_a_value_are_escaped() -> None:
    text = configuration({"max_connections": "1", "io_workers": "2"}, 0, Path("/it's\\here"), 18)
    assert "unix_socket_directories = '/it''s\\\\here'\n" in text
