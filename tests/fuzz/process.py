"""The process of several targets: `python -m tests.fuzz.process DIRECTORY LOGS TARGET … -- [libFuzzer's arguments]`.

The instrumented import takes a second. So this process imports once and forks for each target. The child writes to
LOGS/TARGET. When it has ended, this process prints the target and the exit code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    include=["gateway", "protocol"]
):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    directory, logs, *targets = sys.argv[1 : sys.argv.index("--")]
    options = sys.argv[sys.argv.index("--") + 1 :]
    for target in targets:
        pid = os.fork()
        if not pid:
            _fuzz(Path(directory), Path(logs), target, options)
        _, status = os.waitpid(pid, 0)
        print(target, os.waitstatus_to_exitcode(status), flush=True)


def _fuzz(directory: Path, logs: Path, target: str, options: list[str]) -> None:
    """Fuzz one target. libFuzzer ends the process."""
    with (logs / target).open("wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    arguments = [sys.argv[0], str(directory / target), *options, f"-artifact_prefix={directory}/{target}-"]
    atheris.Setup(arguments, TARGETS[target])  # pyright: ignore[reportUnknownMemberType]
    atheris.Fuzz()  # pyright: ignore[reportUnknownMemberType]


if __name__ == "__main__":
    main()
