"""kill −9 at every step of append, roll, rewrite and delete: acknowledged records are not lost, no record is stored
twice, and every byte that the index names is correct."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.pool import Database
from tests.storage.conftest import MakeTopic
from tests.storage.crashes import KILLS, kill_again_and_again


@pytest.mark.timeout(120 + 30 * KILLS)
async def test_a_killed_process_loses_no_acknowledged_record(
    database: Database, database_url: str, make_topic: MakeTopic, tmp_path: Path
) -> None:
    await kill_again_and_again(database, database_url, make_topic, str(tmp_path))
