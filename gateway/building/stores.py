"""The stores of a node: all parts that read and write Postgres, and the places of records outside Postgres."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.building.undo import STEP_TIMEOUT_S, Undo
from gateway.config.broker import BrokerConfig
from gateway.config.settings import Settings
from storage.byte_store import ByteStore
from storage.groups import GroupStore
from storage.log import LogStore
from storage.nodes import NodeStore
from storage.offsets import OffsetStore
from storage.pool import Database
from storage.producers import ProducerStore
from storage.roller import Roller
from storage.share import ShareStore
from storage.store import open_store
from storage.topics import TopicStore
from storage.transactions import TransactionStore
from storage.users import UserStore


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores of one node, all on one database."""

    database: Database
    topics: TopicStore
    nodes: NodeStore
    log: LogStore
    roller: Roller
    groups: GroupStore
    offsets: OffsetStore
    producers: ProducerStore
    transactions: TransactionStore
    share: ShareStore
    users: UserStore


async def open_stores(
    settings: Settings, broker: BrokerConfig, database: Database, topics: TopicStore, nodes: NodeStore, undo: Undo
) -> Stores:
    """Open the place of the log's records. Raise StorageError."""
    cached = broker.log_store_page_cache_bytes
    store = await open_store(database, settings.log_place, page_cache_bytes=None if cached < 0 else cached)
    if store is not None:
        undo.push("store", STEP_TIMEOUT_S, _closing(store))
    log = LogStore(database, store, nodes.registration, inline_max_bytes=broker.log_store_inline_max_bytes)
    undo.push("log", STEP_TIMEOUT_S, log.close)
    roller = Roller(
        *(database, log, store, nodes.registration),
        max_bytes=broker.log_store_roll_bytes,
        max_age_ms=broker.log_store_roll_ms,
    )
    undo.push("roller", STEP_TIMEOUT_S, roller.close)
    return Stores(
        database,
        topics,
        nodes,
        log,
        roller,
        GroupStore(database),
        OffsetStore(database),
        ProducerStore(database),
        TransactionStore(database),
        ShareStore(database),
        UserStore(database),
    )


def _closing(store: ByteStore) -> Callable[[], Awaitable[None]]:
    async def close() -> None:
        store.close()

    return close
