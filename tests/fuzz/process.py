"""The process of one target: `python -m tests.fuzz.process TARGET [libFuzzer's arguments]`."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    include=["gateway", "protocol"]
):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    target = TARGETS[sys.argv[1]]
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target)  # pyright: ignore[reportUnknownMemberType]
    atheris.Fuzz()  # pyright: ignore[reportUnknownMemberType]


if __name__ == "__main__":
    main()
