"""Commands for operators of a cluster: `sluice groups …`, `sluice topics …`, `sluice transactions …`.

The one idea: a command is a client. It knows bootstrap addresses and Kafka's protocol, nothing of Postgres or of the
process that serves. So it works with any broker and is a test of this one. Only `groups history` reads Postgres.

This package imports its modules only when a command needs them, so that `sluice --help` does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.commands.arguments import Commands

EXIT_FAILED = 1


def add_groups(parser: argparse.ArgumentParser, add_history: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add `groups …`; `add_history` adds the arguments of `groups history`, which needs the settings of a node."""
    from gateway.commands.arguments import common

    parser.set_defaults(run=run)
    commands: Commands = parser.add_subparsers(metavar="COMMAND", required=True)
    options = common()
    for verb, described in _GROUP_VERBS.items():
        # Import this only when the verb is chosen, because `history` needs no client.
        commands.add_parser(verb, parents=[options], help=described, fill=partial(_fill_group_verb, verb))
    commands.add_parser("history", help="what happened to a group, from the journal in Postgres", fill=add_history)


_GROUP_VERBS = {
    "list": "every group with its state",
    "describe": "members, assignments and lag of a group",
    "lag": "how far groups are behind, all groups without names",
    "reset-offsets": "move an empty group's offsets; shows them only, without --execute",
    "delete": "forget empty groups and their offsets",
}


def _fill_group_verb(verb: str, parser: argparse.ArgumentParser) -> None:
    from gateway.commands import groups

    adds = {
        "list": groups.add_list,
        "describe": groups.add_describe,
        "lag": groups.add_lag,
        "reset-offsets": groups.add_reset_offsets,
        "delete": groups.add_delete,
    }
    adds[verb](parser)


def add_topics(parser: argparse.ArgumentParser) -> None:
    from gateway.commands import topics

    _add_verbs(parser, topics.add_commands)


def add_transactions(parser: argparse.ArgumentParser) -> None:
    from gateway.commands import transactions

    _add_verbs(parser, transactions.add_commands)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    from gateway.commands import cluster_info

    _add_verbs(parser, cluster_info.add_commands)


def add_acls(parser: argparse.ArgumentParser) -> None:
    from gateway.commands import acls

    _add_verbs(parser, acls.add_commands)


def add_quotas(parser: argparse.ArgumentParser) -> None:
    from gateway.commands import quotas

    _add_verbs(parser, quotas.add_commands)


def add_configs(parser: argparse.ArgumentParser) -> None:
    from gateway.commands import configs

    _add_verbs(parser, configs.add_commands)


def add_context(parser: argparse.ArgumentParser) -> None:
    from gateway.commands import contexts

    parser.set_defaults(run=contexts.run)
    contexts.add_commands(parser.add_subparsers(metavar="COMMAND", required=True))


def add_produce(parser: argparse.ArgumentParser) -> None:
    from gateway.commands import produce

    _add_alone(parser, produce.add_arguments)


def add_consume(parser: argparse.ArgumentParser) -> None:
    from gateway.commands import consume

    _add_alone(parser, consume.add_arguments)


def add_top(parser: argparse.ArgumentParser) -> None:
    from gateway.commands import top

    _add_alone(parser, top.add_arguments)


def _add_verbs(
    parser: argparse.ArgumentParser, add_commands: Callable[[Commands, argparse.ArgumentParser], None]
) -> None:
    from gateway.commands.arguments import common

    parser.set_defaults(run=run)
    add_commands(parser.add_subparsers(metavar="COMMAND", required=True), common())


def _add_alone(parser: argparse.ArgumentParser, add_arguments: Callable[[argparse.ArgumentParser], None]) -> None:
    from gateway.commands.arguments import add_common

    parser.set_defaults(run=run)
    add_common(parser)
    add_arguments(parser)


def run(given: argparse.Namespace) -> int:
    """Run `given.command` with a client of the chosen cluster, and return its exit code."""
    from gateway.commands.client import Cluster
    from gateway.commands.contexts import choose
    from gateway.commands.errors import CommandError
    from gateway.commands.security import read_properties

    try:
        choose(given)
        security = read_properties(given.command_config) if given.command_config else None
        with Cluster(given.bootstrap, timeout_s=given.timeout, security=security) as cluster:
            return int(given.command(cluster, given))
    except CommandError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return EXIT_FAILED
