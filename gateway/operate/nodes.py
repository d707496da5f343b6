"""`sluice nodes`: the cluster's members, and the deleted topics whose data still exists, according to Postgres.

The one idea: the command reads the database and not a broker, so that it works while no node serves. It finds the
database as `serve` does, starts none, and changes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable

from gateway.commands.render import Row, show
from gateway.config.listeners import render_address, render_roles
from gateway.config.settings import Settings
from storage.deletion import DeletionStore
from storage.embedded_socket import running_url
from storage.errors import StorageError
from storage.nodes import NodeStore
from storage.pool import Database
from storage.types import NodeReport

EXIT_FAILED = 1
DELETION_COLUMNS = ("topic", "topic_id", "deleted_s", "partitions_left", "failures", "retry_in_s", "error")
MAX_DELETIONS = 1_000
COLUMNS = ("node", "roles", "listeners", "rack", "leases", "revision_lag", "up_s")

Configure = Callable[[argparse.Namespace], Settings]


def add_nodes(parser: argparse.ArgumentParser, settings: Configure) -> None:
    def run(given: argparse.Namespace) -> int:
        return _run(settings(given), deleting=bool(given.deleting), as_json=bool(given.json))

    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument(
        "--deleting",
        action="store_true",
        help="deleted topics that still have data, and why, instead of nodes",
    )
    parser.set_defaults(run=run)


def _run(settings: Settings, *, deleting: bool, as_json: bool) -> int:
    try:
        url = settings.database_url or running_url(settings.data_dir)
        if url is None:
            place = settings.data_dir.absolute()
            raise StorageError(f"no gateway serves from {place}: give --config, --database-url or --data-dir")
        rows = asyncio.run(_look(url, _deletions if deleting else _nodes))
    except StorageError as error:
        print(f"sluice: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_FAILED
    show(rows, DELETION_COLUMNS if deleting else COLUMNS, as_json=as_json)
    return 0


async def _look(url: str, rows: Callable[[Database], Awaitable[list[Row]]]) -> list[Row]:
    database = await Database.open(url, hot_connections=1, cold_connections=1, control_connections=1)
    try:
        return await rows(database)
    finally:
        await database.close()


async def _nodes(database: Database) -> list[Row]:
    return [_row(report) for report in await NodeStore(database).reports()]


async def _deletions(database: Database) -> list[Row]:
    return [
        {
            "topic": deletion.name,
            "topic_id": str(deletion.topic_id),
            "deleted_s": deletion.deleted_ms_ago // 1000,
            "partitions_left": deletion.partitions_left,
            "failures": deletion.failures,
            "retry_in_s": None if deletion.retry_in_ms is None else deletion.retry_in_ms // 1000,
            "error": deletion.error,
        }
        for deletion in await DeletionStore(database).pending(MAX_DELETIONS)
    ]


def _row(report: NodeReport) -> Row:
    node = report.node
    return {
        "node": int(node.node_id),
        "roles": render_roles(node.roles),
        "listeners": {name: render_address(address) for name, address in node.listeners.items()},
        "rack": node.rack,
        "leases": dict(report.leases),
        "revision_lag": report.revision_lag,
        "up_s": report.registered_ms_ago // 1000,
    }
