"""Connections through a pooler: served if a client's connection keeps its server, refused at once if not."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import pytest

from storage.errors import StorageError
from storage.history import HistoryStore
from storage.log import LogStore
from storage.pool import Database
from storage.types import PartitionKey
from tests.pooler import admit_pooler, pooler
from tests.storage.batches import append, new_batch


@pytest.fixture(autouse=True)
async def pooler_may_connect(sql: asyncpg.Connection) -> None:
    await admit_pooler(sql)


@pytest.mark.parametrize("mode", ["transaction", "statement"])
async def test_a_pooler_that_moves_a_session_is_refused(database_url: str, tmp_path: Path, mode: str) -> None:
    with (
        pooler(database_url, tmp_path, mode=mode, ignored="") as url,
        pytest.raises(StorageError, match="session mode"),
    ):
        await (await Database.open(url)).close()


async def test_a_session_pooler_serves_with_the_settings_that_we_rely_on(
    database_url: str, tmp_path: Path, key: PartitionKey
) -> None:
    with pooler(database_url, tmp_path, mode="session", ignored="extra_float_digits") as url:
        database = await Database.open(url)
        try:
            assert await database.hot.fetch_value("select current_setting('statement_timeout')") == "10s"
            assert await append(LogStore(database), new_batch(key)) == [0]
            history = HistoryStore(database)  # This uses a connection of its own.
            history.accept(*await history.adopt())
        finally:
            await database.close()
