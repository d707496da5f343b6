"""`sluice mirror`: copy topics and group offsets from one cluster to another, once or for as long as it runs."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict

from gateway.commands.arguments import DEFAULT_BOOTSTRAP, addresses, seconds
from gateway.commands.client import Address, Cluster
from gateway.commands.errors import CommandError, PassingError, remark
from gateway.commands.render import Row, show
from gateway.commands.security import read_properties
from gateway.commands.topic_changes import settings
from gateway.config.settings import Configuration
from gateway.mirror.copier import Copier, Target
from gateway.mirror.groups import COMPLETE, copy_groups
from gateway.mirror.log_target import LogTarget
from gateway.mirror.produce_target import ProduceTarget
from gateway.mirror.source import Source, matches
from gateway.mirror.topics import ensure_topics
from gateway.mirror.verify import compare
from gateway.operate.upkeep import existing_database, require_tables
from storage.embedded import EmbeddedPostgresError
from storage.errors import StorageError, StorageUnavailable
from storage.migrate import migrate
from storage.pool import Database
from storage.topics import TopicStore

LOOK_INTERVAL_S = 10.0
"""Interval at which new topics, new partitions and group offsets are looked for."""
RETRY_S = 5.0
EXIT_FAILED = 1
STATEMENT_TIMEOUT_MS = 60_000

Configure = Callable[[argparse.Namespace], Configuration]


def add_mirror(parser: argparse.ArgumentParser, configuration: Configure) -> None:
    """Add the arguments. `configuration` says where the target's database is."""

    def run(given: argparse.Namespace) -> int:
        return _run(given, configuration(given))

    parser.description = (
        "Copy topics with their records, offsets and settings, and the committed offsets of groups, from a Kafka "
        "cluster to Sluice, or with --produce to any broker. It runs until Ctrl-C and goes on where it stopped. "
        "Nothing else may produce to a topic while it is mirrored."
    )
    parser.add_argument(
        "--from", dest="source", type=addresses, required=True, metavar="HOST:PORT,…", help="the source"
    )
    parser.add_argument(
        "--to",
        dest="target",
        type=addresses,
        default=DEFAULT_BOOTSTRAP,
        metavar="HOST:PORT,…",
        help=f"any node of the target ({DEFAULT_BOOTSTRAP})",
    )
    parser.add_argument("--from-config", metavar="FILE", help="Kafka's client properties for the source")
    parser.add_argument("--to-config", metavar="FILE", help="Kafka's client properties for the target")
    parser.add_argument("--topics", nargs="+", required=True, metavar="GLOB", help="which topics, e.g. 'orders-*'")
    parser.add_argument("--groups", nargs="+", default=[], metavar="GLOB", help="whose offsets (none)")
    parser.add_argument(
        "--produce",
        action="store_true",
        help="append by Kafka's protocol, to any broker, without the target's database; offsets may change",
    )
    parser.add_argument("--once", action="store_true", help="stop at the present end of the topics")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="copy once, then compare all records; exit code 1 if two differ",
    )
    parser.add_argument("--timeout", type=seconds, default=30.0, metavar="SECONDS", help="for each answer (30)")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    parser.set_defaults(run=run)


def _run(given: argparse.Namespace, configuration: Configuration) -> int:
    given.once = given.once or given.verify
    try:
        return asyncio.run(_mirror(given, configuration))
    except KeyboardInterrupt:
        if given.once:
            raise  # the copy is not complete
        return 0
    except (CommandError, StorageError, EmbeddedPostgresError) as error:
        remark(" ".join(str(error).split()))
        return EXIT_FAILED


async def _mirror(given: argparse.Namespace, configuration: Configuration) -> int:
    with (
        _cluster(given, given.source, given.from_config) as source,
        _cluster(given, given.target, given.to_config) as target,
    ):
        cluster_id = await asyncio.to_thread(Source(source).cluster_id)
        if given.produce:
            return await _copy(given, Source(source), target, lambda: ProduceTarget(source, target, cluster_id))
        async with _database(configuration) as database:
            await _demand_one_target(target, database)
            return await _copy(given, Source(source), target, lambda: LogTarget(database, cluster_id))


@asynccontextmanager
async def _database(configuration: Configuration) -> AsyncGenerator[Database]:
    async with existing_database(configuration.settings) as url:
        database = await Database.open(
            url, hot_connections=1, cold_connections=2, statement_timeout_ms=STATEMENT_TIMEOUT_MS
        )
        try:
            await require_tables(database)
            await migrate(database)
            yield database
        finally:
            await database.close()


def _cluster(given: argparse.Namespace, bootstrap: Sequence[Address], config: str | None) -> Cluster:
    return Cluster(bootstrap, timeout_s=given.timeout, security=read_properties(config) if config else None)


async def _demand_one_target(target: Cluster, database: Database) -> None:
    """Raise CommandError unless the broker and the database belong together."""
    served = (await asyncio.to_thread(target.metadata, ())).cluster_id
    held = await TopicStore(database).cluster_id()
    if served != held:
        raise CommandError(
            f"the broker at --to belongs to cluster {served} and the database to cluster {held}: give the database of "
            "the target by --database-url or --data-dir"
        )


async def _copy(given: argparse.Namespace, source: Source, target: Cluster, make: Callable[[], Target]) -> int:
    """Copy until the end, if an end was given. If a broker or database is unavailable, wait for it and resume at the
    target's position.
    """
    once = bool(given.once)
    while True:
        try:
            return await _copy_from_position(given, source, target, make(), once=once)
        except (PassingError, StorageUnavailable) as error:
            if once:
                raise
            _warn(f"{' '.join(str(error).split())}; trying again in {RETRY_S:g} s")
            await asyncio.sleep(RETRY_S)


async def _copy_from_position(
    given: argparse.Namespace, source: Source, target: Cluster, into: Target, *, once: bool
) -> int:
    copier = Copier(source, into, _warn)
    while True:
        topics = await asyncio.to_thread(source.topics, given.topics)
        missing = [glob for glob in given.topics if not any(matches(topic.name, (glob,)) for topic in topics)]
        if once and missing:
            raise CommandError(f"no topic of the source matches {' '.join(missing)}")
        copied = {topic for topic, _ in copier.progress}
        await asyncio.to_thread(ensure_topics, source.cluster, target, topics, copied, _warn)
        await copier.begin(topics, demands_all=once)
        if once:
            await copier.copy_to(await copier.ends())
        else:
            await copier.follow(LOOK_INTERVAL_S)
        groups = await asyncio.to_thread(copy_groups, source.cluster, target, given.groups, into.translate, _warn)
        if once:
            compared = await _verified(source.cluster, target, copier, into) if given.verify else []
            _report(copier, groups, compared, as_json=given.json)
            for glob in given.groups:
                if not any(matches(str(row["group"]), (glob,)) for row in groups):
                    _warn(f"no group with offsets in these topics matches {glob}")
            for row in groups:
                if row["result"] == "waits":
                    _warn(
                        f"group {row['group']} of the source commits offsets in an open transaction, and they are not "
                        "copied: run this again when the transaction has ended"
                    )
            is_whole = not copier.is_held_back and all(row["result"] in COMPLETE for row in groups)
            return 0 if is_whole and all(row["result"] == "same" for row in compared) else EXIT_FAILED


async def _verified(source: Cluster, target: Cluster, copier: Copier, copied: Target) -> list[Row]:
    """Compare each copied partition as far as it is copied, and return a row for each."""
    rows: list[Row] = []
    policies: dict[str, str] = {}
    for key, progress in sorted(copier.progress.items()):
        topic, partition = key
        if not copied.keeps_offsets(key):
            rows.append({"topic": topic, "partition": partition, "result": "not compared: offsets changed"})
            continue
        if topic not in policies:
            found = await asyncio.to_thread(settings, source, topic)
            policies[topic] = next((each.value or "" for each in found if each.name == "cleanup.policy"), "")
        end = copied.translate(key, progress.next_offset) or 0
        compacted = "compact" in policies[topic]
        result = await asyncio.to_thread(compare, source, target, key, end, compacted=compacted)
        outcome = "same" if result.first_difference is None else "differs"
        rows.append({"topic": topic, "partition": partition, "result": outcome, **asdict(result)})
    return rows


def _report(copier: Copier, groups: list[Row], compared: list[Row], *, as_json: bool) -> None:
    rows: list[Row] = [
        {
            "topic": topic,
            "partition": partition,
            "from": progress.begun_at,
            "to": progress.next_offset,
            "bytes": progress.size_bytes,
        }
        for (topic, partition), progress in sorted(copier.progress.items())
    ]
    if as_json:
        show([{"partitions": rows, "groups": groups, "compared": compared}], (), as_json=True)
        return
    show(rows, ("topic", "partition", "from", "to", "bytes"), as_json=False)
    if groups:
        print()
        show(groups, ("group", "partitions", "moved", "result"), as_json=False)
    if compared:
        print()
        columns = ("topic", "partition", "start", "end", "records", "checksum", "first_difference", "result")
        show(compared, columns, as_json=False)


def _warn(text: str) -> None:
    remark(f"warning: {text}")
