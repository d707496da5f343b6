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
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager

from gateway.commands.errors import CommandError
from gateway.commands.render import Row, show
from gateway.commands.users import mechanisms, nothing_to_delete, password
from gateway.config.settings import Settings
from gateway.operate.upkeep import Configure, existing_database, require_tables
from gateway.security.scram import SALT_BYTES, ScramMechanism, credential, salted_password
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


def run(given: argparse.Namespace, settings: Configure) -> int:
    """Run `given.verb` (add, delete or list) on the database, and return its exit code."""
    try:
        return asyncio.run(_VERBS[given.verb](given, settings(given)))
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
        known = await users.described({given.user})
        there = [info for info in known if info.mechanism in wanted]
        await users.change((), [ScramKey(info.user, info.mechanism) for info in there])
    if not there:
        raise UserError(nothing_to_delete(given) if known else f"there is no user {given.user}")
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


_VERBS: dict[str, Command] = {"add": add_user, "delete": delete_user, "list": list_users}
