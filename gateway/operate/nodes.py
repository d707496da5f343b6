"""`sluice nodes`: who makes up the cluster, by what Postgres says of it.

The one idea: it asks the database and not a broker, so that it answers while no node does. It finds the database as
`serve` does, starts none, and changes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable

from gateway.commands.render import Row, show
from gateway.config.listeners import render_address
from gateway.config.settings import Settings
from storage.embedded import EmbeddedPostgres
from storage.errors import StorageError
from storage.nodes import NodeStore
from storage.pool import Database
from storage.types import NodeReport

EXIT_FAILED = 1
COLUMNS = ("node", "listeners", "rack", "leases", "revision_lag", "up_s")

Configure = Callable[[argparse.Namespace], Settings]


def add_nodes(parser: argparse.ArgumentParser, settings: Configure) -> None:
    def run(given: argparse.Namespace) -> int:
        return _run(settings(given), as_json=bool(given.json))

    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.set_defaults(run=run)


def _run(settings: Settings, *, as_json: bool) -> int:
    url = settings.database_url or EmbeddedPostgres(settings.data_dir).running_url()
    if url is None:
        print(f"sluice: no node serves from {settings.data_dir}: see --data-dir, --database-url", file=sys.stderr)
        return EXIT_FAILED
    try:
        reports = asyncio.run(_reports(url))
    except StorageError as error:
        print(f"sluice: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_FAILED
    show([_row(report) for report in reports], COLUMNS, as_json=as_json)
    return 0


async def _reports(url: str) -> list[NodeReport]:
    database = await Database.open(url, hot_connections=1, cold_connections=1, control_connections=1)
    try:
        return await NodeStore(database).reports()
    finally:
        await database.close()


def _row(report: NodeReport) -> Row:
    node = report.node
    return {
        "node": int(node.node_id),
        "listeners": {name: render_address(address) for name, address in node.listeners.items()},
        "rack": node.rack,
        "leases": dict(report.leases),
        "revision_lag": report.revision_lag,
        "up_s": report.registered_ms_ago // 1000,
    }
