"""`sluice users … --bootstrap`: users who authenticate by SCRAM, by Kafka's protocol, with any broker (KIP-554).

The one idea: the command salts and hashes the password, so the broker never receives the password itself. The salted
password is enough to authenticate, so such a connection needs TLS or a network that is trusted.
"""

from __future__ import annotations

import argparse
import getpass
import secrets
import sys
from collections.abc import Callable

from gateway.commands import run
from gateway.commands.arguments import Commands
from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError
from gateway.commands.refusals import reason
from gateway.commands.render import Row, show
from gateway.config.suggestions import SUGGESTIONS, did_you_mean
from gateway.security.scram import (
    DEFAULT_ITERATIONS,
    MAX_ITERATIONS,
    MECHANISMS,
    MIN_ITERATIONS,
    SALT_BYTES,
    ScramMechanism,
    salted_password,
)
from protocol.errors import ErrorCode
from protocol.messages.alter_user_scram_credentials import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
)
from protocol.messages.describe_user_scram_credentials import (
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)

COLUMNS = ("user", "mechanism", "iterations")


def add_users(
    commands: Commands, options: argparse.ArgumentParser, on_database: Callable[[argparse.Namespace], int]
) -> None:
    """Add the subcommands of `users`. `options` find the database or, if one of them names a broker, the cluster.
    `on_database` runs `given.verb` on the database."""

    def run_given(given: argparse.Namespace) -> int:
        return on_database(given) if given.bootstrap is None and given.context is None else run(given)

    add = commands.add_parser("add", parents=[options], help="give a user a password, or another one")
    add.add_argument("user")
    add.add_argument(
        "--mechanism",
        choices=sorted(MECHANISMS),
        action="append",
        help="may be repeated; default: all of them",
    )
    add.add_argument(
        "--iterations",
        type=_iterations,
        default=DEFAULT_ITERATIONS,
        metavar="N",
        help=f"of the password's hash, {MIN_ITERATIONS} to {MAX_ITERATIONS} ({DEFAULT_ITERATIONS})",
    )
    add.add_argument(
        "--password-stdin",
        action="store_true",
        help="take the password from the first line of standard input; default: ask for it",
    )
    delete = commands.add_parser("delete", parents=[options], help="take a user's passwords away")
    delete.add_argument("user")
    delete.add_argument("--mechanism", choices=sorted(MECHANISMS), action="append", help="default: all of them")
    listing = commands.add_parser("list", parents=[options], help="users and their mechanisms")
    listing.add_argument("--json", action="store_true", help="JSON instead of a table")
    for parser, verb, command in (
        (add, "add", add_user),
        (delete, "delete", delete_user),
        (listing, "list", list_users),
    ):
        parser.set_defaults(run=run_given, verb=verb, command=command)


def _iterations(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not MIN_ITERATIONS <= int(text) <= MAX_ITERATIONS:
        raise argparse.ArgumentTypeError(f"expected a number from {MIN_ITERATIONS} to {MAX_ITERATIONS}")
    return int(text)


def mechanisms(given: argparse.Namespace) -> list[ScramMechanism]:
    """Return the chosen mechanisms. The default is every mechanism."""
    chosen: list[str] = given.mechanism or sorted(MECHANISMS)
    return [MECHANISMS[name] for name in dict.fromkeys(chosen)]


def nothing_to_delete(given: argparse.Namespace) -> str:
    """Return the error of a user who exists, but not with any of the chosen mechanisms."""
    return f"user {given.user} does not authenticate by {' or '.join(each.mechanism for each in mechanisms(given))}"


def password(given: argparse.Namespace) -> str:
    """Read the password. It is never an argument, because everyone on the machine can read those."""
    if given.password_stdin:
        try:
            found = sys.stdin.readline().rstrip("\r\n")
            found.encode()
        except UnicodeError:
            raise CommandError("the password must be UTF-8") from None
    elif not sys.stdin.isatty():
        raise CommandError("no terminal to ask for the password: give it by --password-stdin")
    else:
        found = getpass.getpass(f"Password of {given.user}: ")
        if getpass.getpass("Again: ") != found:
            raise CommandError("the two passwords differ")
    if not found:
        raise CommandError("the password is empty")
    return found


def add_user(cluster: Cluster, given: argparse.Namespace) -> int:
    if not given.user:
        raise CommandError("the user's name is empty")
    text = password(given)
    made: list[ScramCredentialUpsertion] = []
    for mechanism in mechanisms(given):
        salt = secrets.token_bytes(SALT_BYTES)
        made.append(
            ScramCredentialUpsertion(
                name=given.user,
                mechanism=mechanism,
                iterations=given.iterations,
                salt=salt,
                salted_password=salted_password(mechanism, text, salt, given.iterations),
            )
        )
    _alter(cluster, given.user, AlterUserScramCredentialsRequest(upsertions=tuple(made)))
    print(f"{given.user} authenticates by {', '.join(each.mechanism for each in mechanisms(given))}")
    return 0


def delete_user(cluster: Cluster, given: argparse.Namespace) -> int:
    rows = _described(cluster)
    wanted = {each.mechanism: each for each in mechanisms(given)}
    known = {str(row["user"]) for row in rows}
    present = [str(row["mechanism"]) for row in rows if row["user"] == given.user and row["mechanism"] in wanted]
    if not present:
        hint = did_you_mean(given.user, sorted(known), SUGGESTIONS)
        raise CommandError(nothing_to_delete(given) if given.user in known else f"there is no user {given.user}{hint}")
    deletions = tuple(ScramCredentialDeletion(name=given.user, mechanism=wanted[name]) for name in present)
    _alter(cluster, given.user, AlterUserScramCredentialsRequest(deletions=deletions))
    return 0


def list_users(cluster: Cluster, given: argparse.Namespace) -> int:
    show(_described(cluster), COLUMNS, as_json=given.json)
    return 0


def _alter(cluster: Cluster, user: str, request: AlterUserScramCredentialsRequest) -> None:
    response = cluster.ask_controller(AlterUserScramCredentialsResponse, request)
    for result in response.results:
        if result.error_code:
            why = reason(result.error_code, result.error_message, needs="--operation alter --cluster")
            raise CommandError(f"user {user}: {why}")


def _described(cluster: Cluster) -> list[Row]:
    response = cluster.ask(DescribeUserScramCredentialsResponse, DescribeUserScramCredentialsRequest(users=None))
    if response.error_code:
        why = reason(response.error_code, response.error_message, needs="--operation describe --cluster")
        raise CommandError(f"users: {why}")
    return [
        {"user": result.user, "mechanism": _mechanism(info.mechanism), "iterations": info.iterations}
        for result in sorted(response.results, key=lambda result: result.user)
        if result.error_code != ErrorCode.RESOURCE_NOT_FOUND
        for info in sorted(result.credential_infos, key=lambda info: info.mechanism)
    ]


def _mechanism(code: int) -> str:
    try:
        return ScramMechanism(code).mechanism
    except ValueError:
        return str(code)
