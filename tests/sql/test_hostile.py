"""SQL roles that harm others, or try to."""

from __future__ import annotations

import asyncpg
import pytest
from confluent_kafka import Consumer

from tests.sql.reading import error, read, values

Connection = asyncpg.Connection


async def test_headers_that_python_cannot_parse_stop_no_other_record(
    sql: Connection, topic: str, consumer: Consumer
) -> None:
    deep = "[" * 3000 + "]" * 3000
    for headers in ('{"n": 1e5000}', f'{{"deep": {deep}}}', '{"exact": 0.10, "long": 0.12345678901234567890123}'):
        await sql.execute("select kafka.produce($1, 'v', 'k', headers => $2::text::jsonb)", topic, headers)
    await sql.execute("select kafka.produce($1, 'after', 'k')", topic)
    assert await sql.fetchval("select kafka.flush('5 seconds')")
    found = read(consumer, topic, 4, none_more_s=0.3)
    assert values(found) == [b"v", b"v", b"v", b"after"]
    assert dict(found[0].headers()) == {"n": b"1" + b"0" * 5000}
    assert dict(found[1].headers()) == {"deep": deep.encode()}
    assert dict(found[2].headers()) == {"exact": b"0.10", "long": b"0.12345678901234567890123"}


@pytest.mark.parametrize(
    "headers",
    [
        "jsonb_build_object('h', repeat('x', 20000000))",
        "(select jsonb_object_agg(i, 1e100000) from generate_series(1, 200) i)",
    ],
    ids=["compressed", "numbers"],
)
async def test_headers_count_with_the_size_that_a_record_gives_them(sql: Connection, topic: str, headers: str) -> None:
    await sql.execute(f"create temporary table stored as select {headers} as headers")
    for call in (
        "select kafka.produce($1, 'v', headers => s.headers) from stored s",
        "select kafka.produce_many($1, array['v'], headers => array[s.headers]) from stored s",
    ):
        with pytest.raises(asyncpg.PostgresError) as refused:
            await sql.execute(call, topic)
        assert error(refused).sqlstate == "54000"
    assert await sql.fetchval("select count(*) from sluice.staged_record") == 0
