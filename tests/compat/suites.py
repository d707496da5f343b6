"""Read the suites' descriptions (`suite.toml`), and check whether this machine can run the suites.

    client = "Sarama"                                      # name on the report card
    language = "Go"
    needs = ["go"]                                         # executables that must be on PATH
    build = ["go", "build", "-o", "{build}/sarama", "."]   # run in the suite's folder; may be left out
    run = ["{build}/sarama"]
    version = ["{build}/sarama", "-version"]               # prints the version of the client library
    limit_s = 600                                          # for all scenarios together
    build_limit_s = 600
    member = ["{build}/member"]                            # one consumer, for groups of mixed languages
    uses = ["java"]                                        # suites whose members it starts: built before it
    scenarios = ["spark.batch"]                            # if it does not answer the canonical ones
    own_kafka = "Apache Kafka 4.2.0"                       # what it starts itself if it is asked on Apache Kafka
    part = 3                                               # part of the rotation that runs all its scenarios (1)
    core = ["spark.batch"]                                 # asked in every part; the canonical core if left out
    [flaky]                                                # scenarios that may pass at the second try, and why
    "spark.batch" = "its driver gives up after 2 s"
    [unserved]                                             # not served yet, and why: red, but no failure
    "spark.transactions" = "transactions"
    [settings]                                             # of the gateway it runs against
    "group.min.session.timeout.ms" = "1000"

`{build}` is a folder that outlives the run, `{root}` the repository, `{suite}` the suite's folder, `{python}` the
interpreter that runs this.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.compat.scenarios import CORE
from tests.rotation import PARTS

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
CACHE = ROOT / ".compat"
FILE_NAME = "suite.toml"


class SuiteError(Exception):
    """A suite's description is wrong; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Suite:
    """One suite. Commands are as written in its description; `command` replaces their placeholders."""

    name: str
    folder: Path
    client: str
    language: str
    run: tuple[str, ...]
    build: tuple[str, ...] = ()
    version: tuple[str, ...] = ()
    member: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    own_kafka: str = ""
    part: int = 1
    core: tuple[str, ...] | None = None
    limit_s: float = 600.0
    build_limit_s: float = 600.0
    settings: dict[str, str] = field(default_factory=dict)
    unserved: dict[str, str] = field(default_factory=dict)
    flaky: dict[str, str] = field(default_factory=dict)
    fault: str = ""

    @property
    def build_dir(self) -> Path:
        return CACHE / self.name

    def command(self, words: tuple[str, ...]) -> list[str]:
        places = {"build": str(self.build_dir), "root": str(ROOT), "suite": str(self.folder), "python": sys.executable}
        return [_fill(word, places) for word in words]

    def asked_in(self, part: int) -> tuple[str, ...] | None:
        """Return the scenarios that run in this part of the rotation: an empty tuple for all, None if the suite does
        not run.
        """
        if part == self.part:
            return ()
        core = self.core
        if core is None:
            core = () if self.scenarios else CORE
        return core or None

    def missing(self) -> str | None:
        """Return why this machine cannot run the suite; None if it can."""
        absent = [name for name in self.needs if shutil.which(name) is None]
        return f"needs {' and '.join(absent)}, not on PATH" if absent else None


def discover(folder: Path = FOLDER) -> list[Suite]:
    """Read all suites. A suite with a wrong description has a `fault` and does not stop the others."""
    return [_load_or_fault(path.parent) for path in sorted(folder.glob(f"*/{FILE_NAME}"))]


def _load_or_fault(folder: Path) -> Suite:
    try:
        return load(folder)
    except SuiteError as error:
        return Suite(folder.name, folder, folder.name, "", (), fault=str(error))


def load(folder: Path) -> Suite:
    """Read one suite. A SuiteError names the key that is missing, unknown or of the wrong kind."""
    path = folder / FILE_NAME
    try:
        entries: dict[str, Any] = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SuiteError(f"{path}: {error}") from None
    values: dict[str, Any] = {"name": folder.name, "folder": folder}
    for key, kind in _KINDS.items():
        if key not in entries:
            if key in ("client", "language", "run"):
                raise SuiteError(f"{path}: {key} is missing")
            continue
        values[key] = _read(entries.pop(key), kind, f"{path}: {key}")
    if entries:
        raise SuiteError(f"{path}: unknown: {', '.join(sorted(entries))}")
    return Suite(**values)


_KINDS = {
    "client": str,
    "language": str,
    "run": tuple,
    "build": tuple,
    "version": tuple,
    "member": tuple,
    "needs": tuple,
    "uses": tuple,
    "scenarios": tuple,
    "own_kafka": str,
    "part": int,
    "core": tuple,
    "limit_s": float,
    "build_limit_s": float,
    "settings": dict,
    "unserved": dict,
    "flaky": dict,
}


def _read(value: Any, kind: type, where: str) -> Any:
    if kind is tuple and isinstance(value, list) and all(isinstance(word, str) for word in value):
        return tuple(value)
    if kind is int and isinstance(value, int) and 1 <= value <= PARTS:
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    if kind is dict and isinstance(value, dict):
        return {name: str(setting) for name, setting in value.items()}
    if kind is str and isinstance(value, str):
        return value
    raise SuiteError(f"{where} is of the wrong kind: {value!r}")


def _fill(word: str, places: dict[str, str]) -> str:
    for name, value in places.items():
        word = word.replace("{" + name + "}", value)
    return word
