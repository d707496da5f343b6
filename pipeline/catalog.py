"""The catalog of Iceberg tables: Sluice's own Postgres, a folder, a REST catalog, or one that --conf describes.

The one idea: the form of --catalog determines the kind of catalog. In Postgres the catalog is two tables in a schema of
its own, in the database that also lists the topics.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any, cast

import asyncpg  # pyright: ignore[reportMissingTypeStubs]

from pipeline import jdbc
from pipeline.errors import PipelineError

SPARK_NAME = "spark.sql.catalog.sluice"
SCHEMA = "sluice_iceberg"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("table format")
    group.add_argument("--format", choices=("delta", "iceberg"), default="delta", help="(default %(default)s)")
    group.add_argument(
        "--catalog",
        default=os.environ.get("SLUICE_DATABASE_URL"),
        metavar="WHERE",
        help="catalog of Iceberg tables: postgresql://user:password@host/database, a REST catalog's URL, or a folder "
        "for one writer (default: SLUICE_DATABASE_URL)",
    )
    group.add_argument(
        "--warehouse",
        metavar="PATH",
        help="folder or URL for the files of Iceberg tables; a catalog that is a folder holds the files itself",
    )


def settings_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Return Spark's settings for --catalog, none for Delta. In Postgres, create the catalog's schema if it is absent.

    Raise PipelineError if the catalog is not described, or if Postgres does not respond.
    """
    if getattr(arguments, "format", "delta") != "iceberg":
        return {}
    if any(text.startswith(f"{SPARK_NAME}=") for text in arguments.conf):
        return {}
    where, warehouse = arguments.catalog, arguments.warehouse
    if not where:
        raise PipelineError(
            "Iceberg tables need a catalog.",
            "Name Sluice's Postgres with --catalog postgresql://user:password@host/database, or a folder.",
        )
    settings = {SPARK_NAME: "org.apache.iceberg.spark.SparkCatalog", f"{SPARK_NAME}.cache-enabled": "false"}
    if where.startswith(("postgresql://", "postgres://")):
        if not warehouse:
            raise PipelineError("A catalog in Postgres holds no files.", "Name a folder for them with --warehouse.")
        return settings | _in_postgres(where) | {f"{SPARK_NAME}.warehouse": warehouse}
    if where.startswith(("http://", "https://")):
        placed = {f"{SPARK_NAME}.warehouse": warehouse} if warehouse else {}
        return settings | {f"{SPARK_NAME}.type": "rest", f"{SPARK_NAME}.uri": where} | placed
    if warehouse:
        raise PipelineError("A catalog that is a folder also holds the files.", "Leave --warehouse out.")
    return settings | {f"{SPARK_NAME}.type": "hadoop", f"{SPARK_NAME}.warehouse": where}


def _in_postgres(url: str) -> dict[str, str]:
    found = jdbc.address(url, "--catalog")
    if found is None:
        raise PipelineError(
            "Spark cannot reach Postgres by a Unix socket.",
            "Name a Postgres that listens on TCP with --catalog, or a folder; an embedded Postgres has only a socket.",
        )
    asyncio.run(_create_schema(url))
    uri, properties = found
    named = {f"{SPARK_NAME}.jdbc.{name}": value for name, value in properties.items()}
    return named | {
        f"{SPARK_NAME}.type": "jdbc",
        f"{SPARK_NAME}.uri": uri,
        f"{SPARK_NAME}.jdbc.currentSchema": SCHEMA,
        f"{SPARK_NAME}.jdbc.schema-version": "V1",
    }


async def _create_schema(url: str) -> None:
    try:
        connection = cast(Any, await asyncpg.connect(url, timeout=jdbc.CONNECT_SECONDS))
    except (OSError, asyncpg.PostgresError, TimeoutError) as error:
        raise PipelineError(
            f"The catalog's Postgres does not answer ({type(error).__name__}: {error}).",
            "Check --catalog, and that the server runs; then start the job again.",
        ) from error
    try:
        if not await connection.fetchval("select 1 from pg_namespace where nspname = $1", SCHEMA):
            await connection.execute(f"create schema if not exists {SCHEMA}")
    except asyncpg.UniqueViolationError:
        # Another job created the schema in the meantime.
        return
    except asyncpg.InsufficientPrivilegeError as error:
        raise PipelineError(
            f"The user in --catalog may not create the schema {SCHEMA} ({error}).",
            "Create the schema as the owner of the database, and grant the user usage and create on it.",
        ) from error
    finally:
        await connection.close()
