"""`sluice context`, and the cluster that a command connects to. No broker listens at the addresses, so the error names
the chosen address.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from gateway.cli import main

Run = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SLUICE_BOOTSTRAP", "SLUICE_CONTEXT", "SLUICE_COMMAND_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "sluice" / "contexts.toml"


def refused(capsys: Run, *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 1
    return capsys.readouterr().err


def make(*names: str) -> None:
    for port, name in enumerate(names, 1):
        assert main(["context", "set", name, "-b", f"127.0.0.1:{port}", "--command-config", f"/{name}.properties"]) == 0


def test_contexts_are_made_used_shown_and_deleted(home: Path, capsys: Run) -> None:
    make("prod", "test")
    assert stat.S_IMODE(home.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.parent.stat().st_mode) == 0o700
    capsys.readouterr()
    assert main(["context", "use", "test"]) == 0
    assert main(["context", "list"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[-3:]] == [
        ["NAME", "IN-USE", "BOOTSTRAP", "COMMAND-CONFIG"],
        ["prod", "no", "127.0.0.1:1", "/prod.properties"],
        ["test", "yes", "127.0.0.1:2", "/test.properties"],
    ]
    assert main(["context", "set", "test", "--command-config", "none", "--json"]) == 0
    row = {"name": "test", "in_use": True, "bootstrap": "127.0.0.1:2", "command_config": None}
    assert json.loads(capsys.readouterr().out) == [row]
    assert main(["context", "delete", "test"]) == 0
    assert "no context is in use" in refused(capsys, "context", "show")
    assert "did you mean prod?" in refused(capsys, "context", "use", "prud")
    assert "context new is new: give --bootstrap" in refused(capsys, "context", "set", "new")
    assert [path.name for path in home.parent.iterdir()] == ["contexts.toml"]


def test_names_and_paths_of_any_characters_are_kept(capsys: Run) -> None:
    name, file = 'a"b\\c] # é😀', '/tmp/with "quotes" and \\ é'
    assert main(["context", "set", name, "-b", "[::1]:9092", "--command-config", file]) == 0
    capsys.readouterr()
    assert main(["context", "show", name, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["bootstrap"], row["command_config"]) == (name, "[::1]:9092", file)


def test_a_flag_beats_a_named_context_beats_the_environment_beats_the_context_in_use(
    capsys: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("one", "two", "three")
    without = "/one.properties cannot be read"
    assert without in refused(capsys, "topics", "list")
    monkeypatch.setenv("SLUICE_CONTEXT", "two")
    assert "/two.properties cannot be read" in refused(capsys, "topics", "list")
    monkeypatch.setenv("SLUICE_BOOTSTRAP", "127.0.0.1:7")
    assert "127.0.0.1:7 cannot be reached" in refused(capsys, "topics", "list")
    assert "/three.properties cannot be read" in refused(capsys, "topics", "list", "--context", "three")
    assert "127.0.0.1:9 cannot be reached" in refused(
        capsys, "topics", "list", "--context", "three", "-b", "127.0.0.1:9"
    )
    monkeypatch.setenv("SLUICE_BOOTSTRAP", "nowhere")
    assert "SLUICE_BOOTSTRAP: 'nowhere' is no HOST:PORT" in refused(capsys, "topics", "list")
    assert "there is no context thre; did you mean three" in refused(capsys, "topics", "list", "--context", "thre")


def test_credentials_of_a_context_never_reach_another_address(capsys: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    make("prod")
    assert "127.0.0.1:9 cannot be reached" in refused(capsys, "topics", "list", "-b", "127.0.0.1:9")
    monkeypatch.setenv("SLUICE_BOOTSTRAP", "127.0.0.1:7")
    assert "127.0.0.1:7 cannot be reached" in refused(capsys, "topics", "list")
    monkeypatch.setenv("SLUICE_COMMAND_CONFIG", "/other.properties")
    assert "/other.properties cannot be read" in refused(capsys, "topics", "list")
    assert "/prod.properties cannot be read" in refused(capsys, "topics", "list", "--context", "prod")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("current = ", "cannot be read: "),
        ('current = "x"', "current names no context"),
        ("current = [1]", "current names no context"),
        ("contexts = 1", "contexts is no table"),
        ("[contexts.a]\nbootstrap = 1", "context a needs bootstrap, a text"),
        ("contexts.a = 1", "context a needs bootstrap, a text"),
        ('[contexts.a]\nbootstrap = "nowhere"\n', "'nowhere' is no HOST:PORT"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(home: Path, capsys: Run, content: str, said: str) -> None:
    home.parent.mkdir(parents=True)
    home.write_text(content)
    line = refused(capsys, "topics", "list", "--context", "a")
    assert str(home) in line
    assert said in line
    assert line.count("\n") == 1
