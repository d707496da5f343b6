"""The template databases of the suite's Postgres."""

from __future__ import annotations

from gateway.config.broker_parsing import parse_broker_configs
from gateway.sql_door import door_settings
from storage.journal import JournalStore
from storage.migrate import migrate
from storage.pool import Database
from storage.sql_door import install
from tests.postgres import EMPTY, MIGRATED, SERVED, Databases


def make_templates(server: Databases) -> None:
    server.make_template(MIGRATED, EMPTY, migrate_at)
    server.make_template(SERVED, MIGRATED, _serve)


async def migrate_at(url: str) -> None:
    database = await Database.open(url)
    try:
        await migrate(database)
    finally:
        await database.close()


async def _serve(url: str) -> None:
    """Create what a node with default settings creates at its first start."""
    broker = parse_broker_configs({})
    database = await Database.open(url)
    try:
        await install(database, broker.sql_schema, door_settings(broker))
        await JournalStore(database).make_partitions()
    finally:
        await database.close()
