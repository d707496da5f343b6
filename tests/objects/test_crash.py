"""kill −9 at every step from Postgres into a bucket: no acknowledged record is lost and none stored twice. No
referenced object is deleted, and unreferenced objects are collected."""

from __future__ import annotations

import pytest

from storage.pool import Database
from tests.objects.conftest import MakeStore
from tests.storage.conftest import MakeTopic
from tests.storage.crashes import KILLS, kill_again_and_again


@pytest.mark.timeout(120 + 30 * KILLS)
async def test_a_process_killed_while_it_writes_objects_loses_no_record(
    database: Database, database_url: str, make_topic: MakeTopic, make_store: MakeStore, url: str
) -> None:
    await kill_again_and_again(database, database_url, make_topic, url)
