"""Row changes of a table as events in Debezium's envelope."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import pytest
from confluent_kafka import Consumer

from tests.sql.reading import read

Connection = asyncpg.Connection


async def test_row_changes_become_events_until_the_table_is_released(
    sql: Connection, topic: str, consumer: Consumer
) -> None:
    await sql.execute('create table "Captured" (a integer, "B" text, total numeric, primary key (a, "B"))')
    await sql.execute("select kafka.capture('\"Captured\"', topic => $1)", topic)
    await sql.execute("""insert into "Captured" values (1, 'x', 5)""")
    await sql.execute("""update "Captured" set total = 6""")
    await sql.execute("""update "Captured" set a = 2""")
    await sql.execute("""delete from "Captured" """)
    await sql.execute("select kafka.release('\"Captured\"')")
    await sql.execute("""insert into "Captured" values (3, 'x', 5)""")
    one, two = {"a": 1, "B": "x"}, {"a": 2, "B": "x"}
    found: dict[int, list[Any]] = {1: [], 2: []}
    for message in read(consumer, topic, 7, none_more_s=0.3):
        value = None if message.value() is None else json.loads(message.value())
        event = None if value is None else (value["op"], value["before"], value["after"])
        found[json.loads(message.key())["a"]].append(event)
        assert value is None or value["source"]["table"] == "Captured"
    assert found == {
        1: [
            ("c", None, {**one, "total": 5}),
            ("u", {**one, "total": 5}, {**one, "total": 6}),
            ("d", {**one, "total": 6}, None),
            None,
        ],
        2: [("c", None, {**two, "total": 6}), ("d", {**two, "total": 6}, None), None],
    }


async def test_a_table_without_a_primary_key_is_not_captured(sql: Connection, topic: str) -> None:
    await sql.execute("create table keyless (a integer)")
    with pytest.raises(asyncpg.InvalidParameterValueError, match="keyless cannot be captured"):
        await sql.execute("select kafka.capture('keyless', $1)", topic)
