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


async def test_the_key_of_a_row_is_the_same_in_every_session(
    sql: Connection, other: Connection, topic: str, consumer: Consumer
) -> None:
    await sql.execute(
        "create table settings_of_sessions (at timestamptz, hash bytea, span interval, place regclass, n integer,"
        " primary key (at, hash, span, place))"
    )
    await sql.execute("select kafka.capture('settings_of_sessions', topic => $1)", topic)
    await sql.execute("set timezone = 'UTC'; set bytea_output = 'hex'")
    await sql.execute(
        "insert into settings_of_sessions"
        " values ('2026-01-01 00:00Z', '\\x00ff', '1 day 2 hours', 'settings_of_sessions', 1)"
    )
    await other.execute(
        "set timezone = 'Europe/Berlin'; set bytea_output = 'escape'; set intervalstyle = 'iso_8601';"
        " set quote_all_identifiers = on"
    )
    await other.execute("update settings_of_sessions set n = 2")
    keys = [message.key() for message in read(consumer, topic, 2, none_more_s=0.3)]
    assert keys[0] == keys[1]
    assert json.loads(keys[0])["at"] == "2026-01-01T00:00:00+00:00"


async def test_a_renamed_column_of_the_key_remains_in_the_key(sql: Connection, topic: str, consumer: Consumer) -> None:
    await sql.execute("create table renamed (id integer primary key, n integer)")
    await sql.execute("select kafka.capture('renamed', topic => $1)", topic)
    await sql.execute("alter table renamed rename column id to number")
    await sql.execute("insert into renamed values (1, 1), (2, 2)")
    keys = [json.loads(message.key()) for message in read(consumer, topic, 2, none_more_s=0.3)]
    assert sorted(key["number"] for key in keys) == [1, 2]
    await sql.execute("alter table renamed drop constraint renamed_pkey")
    with pytest.raises(asyncpg.InvalidParameterValueError, match="neither the columns of the key nor a"):
        await sql.execute("insert into renamed values (3, 3)")


async def test_a_key_of_which_only_the_text_changes_is_deleted_and_created(
    sql: Connection, topic: str, consumer: Consumer
) -> None:
    """Compaction compares bytes. A record with the former text of the key would otherwise stay for ever."""
    await sql.execute("create table scaled (id numeric primary key)")
    await sql.execute("select kafka.capture('scaled', topic => $1)", topic)
    await sql.execute("insert into scaled values (1.0)")
    await sql.execute("update scaled set id = 1.00")
    found: dict[bytes, list[str | None]] = {b'{"id": 1.0}': [], b'{"id": 1.00}': []}
    for message in read(consumer, topic, 4, none_more_s=0.3):
        found[message.key()].append(None if message.value() is None else json.loads(message.value())["op"])
    assert found == {b'{"id": 1.0}': ["c", "d", None], b'{"id": 1.00}': ["c"]}


async def test_included_columns_of_a_primary_key_are_not_in_the_key(
    sql: Connection, topic: str, consumer: Consumer
) -> None:
    await sql.execute("create table included (id integer, n integer, primary key (id) include (n))")
    await sql.execute("select kafka.capture('included', topic => $1)", topic)
    await sql.execute("insert into included values (1, 1)")
    await sql.execute("update included set n = 2")
    found = read(consumer, topic, 2, none_more_s=0.3)
    assert [(json.loads(each.key()), json.loads(each.value())["op"]) for each in found] == [
        ({"id": 1}, "c"),
        ({"id": 1}, "u"),
    ]


async def test_virtual_generated_columns_are_left_out(sql: Connection, topic: str, consumer: Consumer) -> None:
    if await sql.fetchval("select current_setting('server_version_num')::integer < 180000"):
        pytest.skip("virtual generated columns exist since Postgres 18")
    await sql.execute(
        "create table generated (id integer primary key, twice integer generated always as (id * 2) virtual,"
        " thrice integer generated always as (id * 3) stored)"
    )
    await sql.execute("select kafka.capture('generated', topic => $1)", topic)
    await sql.execute("insert into generated values (1)")
    (message,) = read(consumer, topic, 1)
    assert json.loads(message.value())["after"] == {"id": 1, "thrice": 3}


async def test_the_key_is_the_primary_key_if_another_column_takes_its_name(
    sql: Connection, topic: str, consumer: Consumer
) -> None:
    await sql.execute("create table swapped (id integer primary key, n integer)")
    await sql.execute("select kafka.capture('swapped', topic => $1)", topic)
    await sql.execute("alter table swapped rename column id to number; alter table swapped rename column n to id")
    await sql.execute("insert into swapped values (1, 7)")
    (message,) = read(consumer, topic, 1)
    assert json.loads(message.key()) == {"number": 1}


async def test_a_change_by_a_trigger_follows_the_change_that_fired_the_trigger(
    sql: Connection, topic: str, consumer: Consumer
) -> None:
    """Otherwise the last record of the row would show a former state."""
    await sql.execute(
        f"""create table doubled (id integer primary key, n integer, twice integer);
        create function double() returns trigger language plpgsql as
        $$ begin update doubled set twice = 2 * new.n where id = new.id; return null; end $$;
        create trigger computes after insert on doubled for each row execute function double();
        -- as former releases did
        create trigger sluice_capture after insert or update or delete on doubled
            for each row execute function kafka.capture_row('{topic}', 'id');
        select kafka.capture('doubled', topic => '{topic}')"""
    )
    await sql.execute("insert into doubled values (1, 5)")
    await sql.execute("select kafka.release('doubled')")
    await sql.execute("insert into doubled values (2, 5)")
    events = [json.loads(message.value()) for message in read(consumer, topic, 2, none_more_s=0.3)]
    assert [(event["op"], event["after"]["twice"]) for event in events] == [("c", None), ("u", 10)]
