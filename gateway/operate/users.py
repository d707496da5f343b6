"""`sluice users`: add, list and delete the users who may authenticate by SCRAM.

The one idea: the first user must exist before any client can authenticate, so these commands are not clients. As
`kafka-storage format --add-scram` does, they write where the cluster keeps its users, with or without a running node.
Their changes take effect at once. With --bootstrap or --context they ask a broker (`gateway/commands/users.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from gateway.commands import run
from gateway.commands import users as by_kafka
from gateway.commands.errors import CommandError
from gateway.commands.render import Row, show
from gateway.commands.users import mechanisms, password
from gateway.config.settings import Settings
from gateway.operate.upkeep import Configure, existing_database, require_tables
from gateway.security.scram import (
    DEFAULT_ITERATIONS,
    MAX_ITERATIONS,
    MECHANISMS,
    MIN_ITERATIONS,
    SALT_BYTES,
    ScramMechanism,
    credential,
    salted_password,
)
from storage.embedded import EmbeddedPostgresError
from storage.errors import StorageError
from storage.migrate import migrate
from storage.pool import Database
from storage.types import ScramCredential, ScramKey
from storage.users import UserStore

Command = Callable[[argparse.Namespace, Settings], Coroutine[object, None, int]]

EXIT_FAILED = 1


class UserError(Exception):
    """A refused command. The message is one line for the person who ran it."""


class Commands(Protocol):
    """The subcommands of a parser, as `add_subparsers` returns them."""

    def add_parser(
        self, name: str, *, parents: Sequence[argparse.ArgumentParser], help: str
    ) -> argparse.ArgumentParser:
        """Add a subcommand."""
        ...


def add_users(commands: Commands, options: argparse.ArgumentParser, settings: Configure) -> None:
    """Add the subcommands of `users`; `options` find the database or, if one of them names a broker, the cluster."""
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
    for parser, command, by_broker in (
        (add, add_user, by_kafka.add_user),
        (delete, delete_user, by_kafka.delete_user),
        (listing, list_users, by_kafka.list_users),
    ):
        parser.set_defaults(run=partial(_run, command, settings), command=by_broker)


def _iterations(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not MIN_ITERATIONS <= int(text) <= MAX_ITERATIONS:
        raise argparse.ArgumentTypeError(f"expected a number from {MIN_ITERATIONS} to {MAX_ITERATIONS}")
    return int(text)


def _run(command: Command, settings: Configure, given: argparse.Namespace) -> int:
    if given.bootstrap is not None or given.context is not None:
        return run(given)
    try:
        return asyncio.run(command(given, settings(given)))
    except (UserError, CommandError, StorageError, EmbeddedPostgresError) as error:
        print(f"sluice: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_FAILED


@asynccontextmanager
async def _users(settings: Settings, *, first: bool = False) -> AsyncGenerator[UserStore]:
    """Yield the users. `first`: if no gateway has served from the database yet, create its tables for the first
    user."""
    async with existing_database(settings) as url:
        database = await Database.open(url, hot_connections=1, cold_connections=1, control_connections=1)
        try:
            if not first:
                await require_tables(database)
            await migrate(database)
            yield UserStore(database)
        finally:
            await database.close()


async def add_user(given: argparse.Namespace, settings: Settings) -> int:
    if not given.user:
        raise UserError("the user's name is empty")
    text = password(given)
    made: list[ScramCredential] = []
    for mechanism in mechanisms(given):
        salt = secrets.token_bytes(SALT_BYTES)
        salted = salted_password(mechanism, text, salt, given.iterations)
        made.append(credential(given.user, mechanism, salted, salt, given.iterations))
    async with _users(settings, first=True) as users:
        await users.change(made, ())
    print(f"{given.user} authenticates by {', '.join(each.mechanism for each in mechanisms(given))}")
    return 0


async def delete_user(given: argparse.Namespace, settings: Settings) -> int:
    wanted = {int(mechanism) for mechanism in mechanisms(given)}
    async with _users(settings) as users:
        there = [info for info in await users.described({given.user}) if info.mechanism in wanted]
        await users.change((), [ScramKey(info.user, info.mechanism) for info in there])
    if not there:
        raise UserError(f"there is no user {given.user}")
    return 0


async def list_users(given: argparse.Namespace, settings: Settings) -> int:
    async with _users(settings) as users:
        found = await users.described()
    rows: list[Row] = [
        {"user": info.user, "mechanism": ScramMechanism(info.mechanism).mechanism, "iterations": info.iterations}
        for info in found
    ]
    show(rows, ("user", "mechanism", "iterations"), as_json=given.json)
    return 0
