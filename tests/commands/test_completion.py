"""`sluice completion`, called by each shell as when a person presses the tab key."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gateway.cli import main

SHELLS = ("bash", "zsh", "fish")
CASES = [
    ("sluice gr", ["groups"]),
    ("sluice groups re", ["reset-offsets"]),
    ("sluice groups history --da", ["--data-dir", "--database-url"]),
    ("sluice acls add --operation rea", ["read"]),
    ("sluice acls list -b h:1 --prin", ["--principal"]),
    ("sluice configs describe ", ["broker", "group", "topic"]),
    ("sluice completion ", ["bash", "fish", "zsh"]),
    ("sluice topics list --command-config properties/cl", ["properties/client.properties"]),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    directory = tmp_path_factory.mktemp("completion")
    (directory / "properties").mkdir()
    (directory / "properties" / "client.properties").touch()
    made: dict[str, Path] = {}
    for shell in SHELLS:
        with pytest.MonkeyPatch.context() as patch:
            written: list[str] = []
            patch.setattr("builtins.print", lambda text, end, to=written: to.append(text))
            assert main(["completion", shell]) == 0
        made[shell] = directory / f"sluice.{shell}"
        made[shell].write_text("".join(written))
    return made


def run(script: Path, *words: str) -> list[str]:
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(script.parent), "LANG": "C.UTF-8"}
    done = subprocess.run(
        words, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def by_bash(script: Path, line: str) -> list[str]:
    program = (
        'source "$0"; line=$1; read -ra COMP_WORDS <<<"$line"; [[ $line == *" " ]] && COMP_WORDS+=(""); '
        'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _sluice; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return run(script, "bash", "-c", program, str(script), line)


def by_fish(script: Path, line: str) -> list[str]:
    found = run(script, "fish", "-c", "source $argv[1]; complete -C $argv[2]", str(script), line)
    return [word.partition("\t")[0] for word in found]


_ZSH = """
PROMPT= RPROMPT=
autoload -Uz compinit
compinit -u -D
source $SCRIPT
compadd() {
  if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\\ * ]]; then
    builtin compadd "$@"
    return
  fi
  local -a matches
  builtin compadd -A matches "$@"
  print -rl -- $matches >>$FOUND
  builtin compadd "$@"
}
ended() { exit }
comppostfuncs=(ended)
bindkey '^I' complete-word
"""
"""Start of an interactive zsh that writes each completion to $FOUND and exits after the first press of the tab key."""


def by_zsh(script: Path, line: str) -> list[str]:
    started, found = script.with_name("started.zsh"), script.with_name("found")
    started.write_text(_ZSH)
    found.write_text("")
    program = (
        'zmodload zsh/zpty; export SCRIPT=$1 FOUND=$2; zpty shell zsh -f -i; zpty -w shell "source $3"; '
        "zpty -w -n shell \"$4\"$'\\t'; while zpty -r shell shown; do :; done; exit 0"
    )
    assert run(script, "zsh", "-f", "-c", program, "zsh", str(script), str(found), str(started), line) == []
    directory = line.rpartition(" ")[2].rpartition("/")
    return list({f"{directory[0]}{directory[1]}{word}" for word in found.read_text().splitlines() if word})


@pytest.mark.parametrize(("line", "expected"), CASES, ids=[line for line, _ in CASES])
@pytest.mark.parametrize(
    ("shell", "complete"), [("bash", by_bash), ("fish", by_fish), ("zsh", by_zsh)], ids=["bash", "fish", "zsh"]
)
def test_shell_completes_the_line(
    scripts: Mapping[str, Path], shell: str, complete: Callable[[Path, str], list[str]], line: str, expected: list[str]
) -> None:
    found = [word for word in complete(scripts[shell], line) if word]
    if line.endswith(" "):
        found = [word for word in found if not word.startswith("-")]
    assert sorted(found) == expected
