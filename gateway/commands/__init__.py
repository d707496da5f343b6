"""Commands for people who look after a cluster: `sluice groups …`, `sluice topics …`, `sluice transactions …`.

The one idea: a command is a client. It knows bootstrap addresses and Kafka's protocol, nothing of Postgres or of the
process that serves, so it works with any broker and is a test of this one. `groups history` alone reads Postgres.
"""

from __future__ import annotations

import argparse
import sys

from gateway.commands import groups, topics, transactions
from gateway.commands.arguments import Commands, common
from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError
from gateway.commands.security import read_properties

EXIT_FAILED = 1


def add_commands(commands: Commands) -> None:
    """Adds `groups`, `topics` and `transactions` to the program's commands."""
    parent = common()
    for name, module, said in (
        ("groups", groups, "consumer groups: list, describe, history, lag, reset-offsets, delete"),
        ("topics", topics, "topics: list, describe, create, delete, tail"),
        ("transactions", transactions, "transactions: list, describe, abort"),
    ):
        room = commands.add_parser(name, help=said)
        module.add_commands(room.add_subparsers(metavar="COMMAND", required=True), parent)
        room.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    try:
        security = read_properties(given.command_config) if given.command_config else None
        with Cluster(given.bootstrap, timeout_s=given.timeout, security=security) as cluster:
            return int(given.command(cluster, given))
    except CommandError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return EXIT_FAILED
