"""Arguments that every command shares."""

from __future__ import annotations

import argparse
from typing import Any, Protocol

Address = tuple[str, int]

DEFAULT_BOOTSTRAP = "127.0.0.1:9092"


class Commands(Protocol):
    """The object to which commands are added: the result of argparse's `add_subparsers`."""

    def add_parser(self, name: str, **given: Any) -> argparse.ArgumentParser: ...


def common() -> argparse.ArgumentParser:
    """Return a parent for each command's parser: which broker to use, how long to wait, how to show the answer."""
    parser = argparse.ArgumentParser(add_help=False)
    add_common(parser)
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `common` to a command that has no verbs."""
    add_broker_options(parser)
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")


def add_broker_options(
    parser: argparse.ArgumentParser, default: str = f"$SLUICE_BOOTSTRAP, the context in use, or {DEFAULT_BOOTSTRAP}"
) -> None:
    """Add the options for the broker to use and the time to wait."""
    parser.add_argument(
        "-b",
        "--bootstrap",
        "--bootstrap-server",
        type=addresses,
        metavar="HOST:PORT,…",
        help=f"any broker of the cluster (default: {default})",
    )
    parser.add_argument("--timeout", type=seconds, default=10.0, metavar="SECONDS", help="for each answer (10)")
    parser.add_argument(
        "--command-config",
        metavar="FILE",
        help="Kafka's client properties, for a listener with TLS or SASL (default: $SLUICE_COMMAND_CONFIG)",
    )
    parser.add_argument("--context", metavar="NAME", help="a cluster of `sluice context list` ($SLUICE_CONTEXT)")


def addresses(text: str) -> tuple[Address, ...]:
    """Return the addresses of HOST:PORT,HOST:PORT. Raise argparse.ArgumentTypeError."""
    found: list[Address] = []
    for part in text.split(","):
        host, colon, port = part.strip().rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise argparse.ArgumentTypeError(f"{part!r} is no HOST:PORT")
        found.append((host.removeprefix("[").removesuffix("]"), int(port)))
    return tuple(found)


def seconds(text: str) -> float:
    """Return a time from more than 0 to an hour. Raise argparse.ArgumentTypeError."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 3600:
        raise argparse.ArgumentTypeError("expected seconds, more than 0")
    return found
