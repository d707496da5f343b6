"""The `sluice` command: one table of commands, each imported only when it is used.

The one idea: a command parses its arguments and calls one function. A failure before that is one line on stderr and an
exit code (2: refused configuration or arguments, 1: could not run). `sluice --version` and `sluice --help` import no
other part of the program, so they answer at once.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.commands import (
    add_acls,
    add_cluster,
    add_configs,
    add_consume,
    add_context,
    add_groups,
    add_produce,
    add_quotas,
    add_top,
    add_topics,
    add_transactions,
)
from gateway.commands.parsing import Parser
from gateway.config.suggestions import did_you_mean

EXIT_FAILED, EXIT_REFUSED = 1, 2


@dataclass(frozen=True, slots=True)
class _Command:
    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Imports what the command needs, adds its arguments to a parser and sets `run`."""


def _serve(parser: argparse.ArgumentParser) -> None:
    from gateway.serve import add_serve

    add_serve(parser)


def _test_server(parser: argparse.ArgumentParser) -> None:
    from gateway.testing.command import add_test_server

    add_test_server(parser)


def _config(parser: argparse.ArgumentParser) -> None:
    from gateway.tools import add_config

    add_config(parser)


def _apis(parser: argparse.ArgumentParser) -> None:
    from gateway.tools import add_apis

    add_apis(parser)


def _decode(parser: argparse.ArgumentParser) -> None:
    from gateway.tools import add_decode

    add_decode(parser)


def _healthcheck(parser: argparse.ArgumentParser) -> None:
    from gateway.tools import add_healthcheck

    add_healthcheck(parser)


def _groups(parser: argparse.ArgumentParser) -> None:
    add_groups(parser, _history)


def _history(parser: argparse.ArgumentParser) -> None:
    from gateway.commands.history import add_history
    from gateway.options import add_database_options, settings_of

    add_database_options(parser)
    add_history(parser, settings_of)


def _completion(parser: argparse.ArgumentParser) -> None:
    from gateway.commands.completion import add_completion

    add_completion(parser, parsers)


def _nodes(parser: argparse.ArgumentParser) -> None:
    from gateway.operate.nodes import add_nodes
    from gateway.options import add_database_options, settings_of

    add_database_options(parser)
    add_nodes(parser, settings_of)


def _doctor(parser: argparse.ArgumentParser) -> None:
    from gateway.operate.doctor import add_doctor
    from gateway.options import add_options, settings_of

    add_options(parser)
    add_doctor(parser, settings_of)


def _users(parser: argparse.ArgumentParser) -> None:
    from gateway.commands.arguments import add_broker_options
    from gateway.commands.users import add_users
    from gateway.options import database_options, settings_of

    def on_database(given: argparse.Namespace) -> int:
        from gateway.operate.users import run

        return run(given, settings_of)

    options = database_options()
    add_broker_options(options, default="none, and the command uses the database")
    add_users(parser.add_subparsers(metavar="COMMAND", required=True), options, on_database)


def _check(parser: argparse.ArgumentParser) -> None:
    from gateway.operate.upkeep import add_check
    from gateway.options import add_database_options, settings_of

    add_database_options(parser)
    add_check(parser, settings_of)


def _backup(parser: argparse.ArgumentParser) -> None:
    from gateway.operate.upkeep import add_backup
    from gateway.options import add_database_options, settings_of

    add_database_options(parser)
    add_backup(parser, settings_of)


def _restore(parser: argparse.ArgumentParser) -> None:
    from gateway.operate.upkeep import add_restore
    from gateway.options import add_database_options, settings_of

    add_database_options(parser)
    add_restore(parser, settings_of)


def _mirror(parser: argparse.ArgumentParser) -> None:
    from gateway.mirror.command import add_mirror
    from gateway.options import add_database_options, configuration_of

    add_database_options(parser)
    add_mirror(parser, configuration_of)


COMMANDS: dict[str, tuple[_Command, ...]] = {
    "Run a node": (
        _Command("serve", "serve Kafka clients", _serve),
        _Command("test-server", "serve tests, alone or beside a command, and keep nothing", _test_server),
        _Command("config", "show each option's value and origin", _config),
    ),
    "Ask a broker (--bootstrap HOST:PORT)": (
        _Command("topics", "topics: list, describe, create, alter, delete, tail, and more", add_topics),
        _Command("groups", "consumer groups: list, describe, lag, reset-offsets, delete", _groups),
        _Command("transactions", "transactions: list, describe, abort", add_transactions),
        _Command("produce", "append the lines of stdin to a topic", add_produce),
        _Command("consume", "print the records of a topic", add_consume),
        _Command("top", "lag of groups and rates of topics, live", add_top),
        _Command("configs", "settings of topics, brokers and groups: describe, alter", add_configs),
        _Command("acls", "permissions of principals: list, add, remove", add_acls),
        _Command("quotas", "limits of users, client ids and addresses: list, set, remove", add_quotas),
        _Command("cluster", "the cluster: its id, controller and nodes", add_cluster),
        _Command("healthcheck", "ask HOST:PORT (no --bootstrap) for its API versions; exit code 0 or 1", _healthcheck),
    ),
    "Move data": (_Command("mirror", "copy topics and group offsets from a Kafka cluster", _mirror),),
    "Ask the database (--config, --database-url, --data-dir)": (
        _Command("nodes", "list the live nodes, their leases, and how many changes each has not read yet", _nodes),
        _Command("doctor", "check Postgres, disk, clock, addresses and limits, and say what to do", _doctor),
        _Command("users", "users who authenticate by SCRAM: add, list, delete; by a broker with --bootstrap", _users),
        _Command("groups history", "what happened to a group, from the journal", _groups),
        _Command("check", "read every record, and report damage", _check),
        _Command("backup", "copy the database and its records while a node serves", _backup),
        _Command("restore", "fill an empty data directory, database or bucket from a backup", _restore),
    ),
    "Set up the command line": (
        _Command("context", "named clusters: list, show, set, use, delete", add_context),
        _Command("completion", "print a script that completes commands in bash, zsh or fish", _completion),
    ),
    "Look things up": (
        _Command("apis", "list the APIs and versions that a node serves", _apis),
        _Command("decode", "show the fields of a request or a response", _decode),
    ),
}
"""Commands, grouped by the system that they query, as `sluice --help` shows them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` default to the process's."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    by_name = {
        command.name: command for commands in COMMANDS.values() for command in commands if " " not in command.name
    }
    if not words or words[0] not in by_name:
        return _without_command(words, list(by_name))
    from gateway.config.errors import ConfigurationError

    try:
        parser = Parser(prog=f"sluice {words[0]}")
        by_name[words[0]].add_arguments(parser)
        given = parser.parse_args(words[1:])
        code = int(given.run(given))
        sys.stdout.flush()
    except ConfigurationError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except OSError as error:
        # The reader has closed the pipe (`sluice config | head`), or no more output fits.
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            print(f"sluice: the output cannot be written: {error.strerror}", file=sys.stderr)
        elif not isinstance(error, BrokenPipeError):
            raise
        # The interpreter must not fail when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        # Python ends the process by SIGINT, so that a shell also ends the script. A person needs no traceback.
        sys.excepthook = _print_nothing
        raise
    return code


def _print_nothing(*_: object) -> None:
    """Replace the hook that prints a traceback."""


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command. This imports what every command needs."""
    made: dict[str, argparse.ArgumentParser] = {}
    for commands in COMMANDS.values():
        for command in commands:
            if " " not in command.name:
                made[command.name] = Parser(prog=f"sluice {command.name}", description=command.help)
                command.add_arguments(made[command.name])
                made[command.name].description = command.help
    return made


def _without_command(words: Sequence[str], names: Sequence[str]) -> int:
    width = max(len(command.name) for commands in COMMANDS.values() for command in commands) + 2
    listed = "\n\n".join(
        "\n".join([f"{title}:", *(f"  {command.name:{width}}{command.help}" for command in commands)])
        for title, commands in COMMANDS.items()
    )
    parser = Parser(
        prog="sluice",
        usage="sluice [-h] [--version] COMMAND …",
        description="A Kafka-protocol gateway on Postgres.\n\n" + listed,
        epilog="`sluice COMMAND --help` shows a command's arguments.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show the program's version and exit")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.version:
        from gateway.version import program_version

        print(f"sluice {program_version()}")
        return 0
    if given.command is None:
        return parser.error("name a command; `sluice --help` lists them")
    return parser.error(f"there is no command {given.command!r}{did_you_mean(given.command, names)}")


if __name__ == "__main__":
    sys.exit(main())
