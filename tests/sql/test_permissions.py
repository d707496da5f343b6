"""Roles, ACLs and attempts to escalate through the SQL door."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator

import asyncpg
import pytest
from confluent_kafka import Consumer

from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.sql.reading import error, read
from tests.steps.waiting import until

Connection = asyncpg.Connection


async def connect_as(url: str, role: str) -> Connection:
    """Connect as the role. The embedded server's socket accepts no other user, so a session of its own user changes its
    role.
    """
    connection = await asyncpg.connect(url)
    await connection.execute(f"set session authorization {role}")
    return connection


async def make_role(sql: Connection, *member_of: str) -> str:
    """Create a role that is a member of the given roles, and of no other role."""
    role = f"sql_test_{uuid.uuid4().hex[:12]}"
    await sql.execute(f"create role {role}")
    for group in member_of:
        await sql.execute(f"grant {group} to {role}")
    return role


@pytest.fixture
async def roles(sql: Connection) -> AsyncIterator[list[str]]:
    """Yield a function that creates roles, and drop these roles at the end."""
    made: list[str] = []
    yield made
    for role in made:
        await sql.execute(f"drop owned by {role} cascade; drop role {role}")


async def test_a_role_without_rights_may_do_nothing(
    sql: Connection, gateway: GatewayProcess, topic: str, roles: list[str]
) -> None:
    roles.append(await make_role(sql))
    assert gateway.database_url is not None
    stranger = await connect_as(gateway.database_url, roles[0])
    try:
        for statement in (
            f"select kafka.produce('{topic}', 'v')",
            f"select kafka.commit_offset('g', '{topic}', 0, 1)",
            "select * from kafka.topics",
            "select * from sluice.staged_record",
            "select sluice.door_produce('t', null, null, null, null, null)",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await stranger.execute(statement)
    finally:
        await stranger.close()


async def test_a_reader_reads_and_a_writer_writes(
    sql: Connection, gateway: GatewayProcess, topic: str, roles: list[str]
) -> None:
    roles += [await make_role(sql, "kafka_reader"), await make_role(sql, "kafka_writer")]
    assert gateway.database_url is not None
    reader = await connect_as(gateway.database_url, roles[0])
    writer = await connect_as(gateway.database_url, roles[1])
    try:
        await writer.execute("select kafka.produce($1, 'v', partition => 0)", topic)
        await writer.execute("select kafka.produce_many($1, array['w'], partition => 0)", topic)
        await writer.execute("select kafka.commit_offset('by-role', $1, 0, 1)", topic)
        assert await reader.fetchval("select kafka.wait_for($1, 0, 1)", topic)
        assert await reader.fetchval("select count(*) from kafka.records($1, 0)", topic) == 2
        assert await reader.fetchval("select lag from kafka.lag where group_id = 'by-role'") == 1
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await reader.execute("select kafka.produce($1, 'v')", topic)
    finally:
        await reader.close()
        await writer.close()


async def test_a_writer_gains_no_right_of_the_owner(
    sql: Connection, gateway: GatewayProcess, topic: str, roles: list[str]
) -> None:
    """A search path, an operator or a temporary table of the caller must not run as the functions' owner."""
    roles.append(await make_role(sql, "kafka_writer"))
    await sql.execute(f"create schema authorization {roles[0]}")
    assert gateway.database_url is not None
    writer = await connect_as(gateway.database_url, roles[0])
    try:
        await writer.execute(
            f"""create function {roles[0]}.trap() returns text language plpgsql as
            $$ begin raise exception 'runs as %', current_user; end $$;
            create function {roles[0]}.door_produce(text, bytea, bytea, jsonb, integer, timestamptz) returns void
            language plpgsql as $$ begin raise exception 'runs as %', current_user; end $$;
            create function {roles[0]}.octet_length(bytea) returns integer language plpgsql as
            $$ begin raise exception 'runs as %', current_user; end $$;
            create temporary table sql_door (max_message_bytes bigint);
            create temporary table topic (name text);
            create temporary table staged_record (xid bigint);
            set search_path = {roles[0]}, pg_temp, pg_catalog"""
        )
        async with writer.transaction():
            assert await writer.fetchval("select kafka.produce($1, 'v', 'k', partition => 0)", topic) == 0
            await writer.execute("select kafka.produce_many($1, array['v'], array['k'])", topic)
            await writer.execute("select kafka.commit_offset('trap', $1, 0, 1)", topic)
        assert await writer.fetchval("select count(*) from staged_record") == 0
        await writer.fetch("select * from kafka.topics")
    finally:
        await writer.close()
    unsafe = await sql.fetch(
        """select p.oid::regprocedure::text from pg_proc p join pg_namespace n on n.oid = p.pronamespace
        where p.prosecdef and (n.nspname = 'kafka' or p.proname like 'door%')
            and coalesce(array_to_string(p.proconfig, ' '), '') not like '%search_path=sluice, pg_temp%'"""
    )
    assert unsafe == []


async def test_capture_runs_no_cast_of_an_ordinary_role(
    sql: Connection, gateway: GatewayProcess, topic: str, roles: list[str], consumer: Consumer
) -> None:
    """To turn a row into JSON, Postgres calls the casts that the owners of the columns' types have made."""
    roles.append(await make_role(sql, "kafka_writer"))
    await sql.execute(f"create schema authorization {roles[0]}")
    await sql.execute("create type public.trusted as (a integer, b text)")
    assert gateway.database_url is not None
    writer = await connect_as(gateway.database_url, roles[0])
    try:
        await writer.execute(
            f"""set search_path = {roles[0]}, public;
            create type trap as enum ('x');
            create type pair as (a integer, b trap);
            create domain whole as integer;
            create function sprung(trap) returns json language plpgsql as
            $$ begin raise exception 'runs as %', current_user; end $$;
            create function sprung_as_text(trap) returns text language plpgsql as
            $$ begin raise exception 'runs as %', current_user; end $$;
            create cast (trap as json) with function sprung(trap);
            create cast (trap as text) with function sprung_as_text(trap);
            create table captured (
                id integer primary key, a trap, b trap[], c pair, d whole, e public.trusted, f trap, "G %s" text,
                converted boolean
            );
            select kafka.capture('captured', '{topic}');
            insert into captured values (1, 'x', '{{x}}', (1, 'x'), 2, (3, 'y'), null, 'z', true)"""
        )
    finally:
        await writer.close()
        await sql.execute("drop type public.trusted cascade")
    (message,) = read(consumer, topic, 1)
    assert json.loads(message.value())["after"] == {
        "id": 1, "a": "x", "b": "{x}", "c": "(1,x)", "d": 2, "e": {"a": 3, "b": "y"}, "f": None, "G %s": "z",
        "converted": True,
    }  # fmt: skip


async def test_capture_ignores_functions_that_another_role_put_into_the_search_path(
    sql: Connection, gateway: GatewayProcess, topic: str, roles: list[str], consumer: Consumer
) -> None:
    roles.append(await make_role(sql))
    await sql.execute(f"create schema authorization {roles[0]}; create table public.trapped (id integer primary key)")
    assert gateway.database_url is not None
    attacker = await connect_as(gateway.database_url, roles[0])
    try:
        for arguments in ("quote_literal(name)", "format(text, regclass, text, text)", "format(text, regclass)"):
            await attacker.execute(
                f"""create function {roles[0]}.{arguments} returns text language plpgsql as
                $$ begin raise exception 'runs as %', current_user; end $$"""
            )
    finally:
        await attacker.close()
    await sql.execute(f"set search_path = public, {roles[0]}")
    try:
        await sql.execute("select kafka.capture('trapped', $1)", topic)
        await sql.execute("insert into public.trapped values (1)")
        await sql.execute("select kafka.release('trapped')")
    finally:
        await sql.execute("reset search_path; drop table public.trapped")
    (message,) = read(consumer, topic, 1)
    assert json.loads(message.value())["after"] == {"id": 1}


async def test_acls_decide_with_an_authorizer(
    gateway_factory: GatewayFactory, sql: Connection, roles: list[str]
) -> None:
    gateway = gateway_factory(
        {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS;User:postgres;User:root",
        }
    )
    assert gateway.database_url is not None
    owner = await asyncpg.connect(gateway.database_url)
    roles.append(await make_role(sql, "kafka_writer"))
    writer = await connect_as(gateway.database_url, roles[0])
    try:
        for name in ("open", "closed"):
            await owner.execute("insert into sluice.topic (name) values ($1)", name)
        await owner.execute(
            """insert into sluice.partition (topic_id, partition_index, replicas)
            select topic_id, 0, null from sluice.topic where name in ('open', 'closed')"""
        )
        for statement in ("select kafka.produce('open', 'v')", "select kafka.commit_offset('g', 'open', 0, 1)"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError) as refused:
                await writer.execute(statement)
            assert roles[0] in str(refused.value)
            assert "ACL" in error(refused).hint
        await owner.execute("insert into sluice.sql_principal values ($1, 'User:shop')", roles[0])
        for number, (kind, pattern, name, operation) in enumerate(
            [(2, 4, "op", 4), (2, 3, "open", 3), (3, 3, "g", 3), (2, 3, "made", 4), (2, 3, "made", 5)]
        ):
            await owner.execute(
                "insert into sluice.acl values ($1, $2, $3, $4, 'User:shop', '*', $5, 3)",
                bytes([number]), kind, pattern, name, operation,
            )  # fmt: skip
        await writer.execute("select kafka.produce('open', 'v')")
        await writer.execute("select kafka.produce('made', 'v')")
        await writer.execute("select kafka.commit_offset('g', 'open', 0, 1)")
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="may not WRITE topic closed"):
            await writer.execute("select kafka.produce('closed', 'v')")
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="may not WRITE topic other"):
            await writer.execute("select kafka.produce('other', 'v')")
        assert "closed" not in [row["topic"] for row in await writer.fetch("select topic from kafka.topics")]
        # Soon after its start, the node creates the journal's tables for the current day.
        made = "select exists (select from pg_inherits where inhparent = 'sluice.journal_ownership'::regclass)"
        await until(lambda: owner.fetchval(made), "the journal's first table")
        await owner.execute(
            """insert into sluice.group_member values ('g', 'm', 1, '{}');
            insert into sluice.journal_ownership
            select n, now(), 1, 1, 'g', 1, null, t, 0, 'assigned', 'm'
            from unnest(array['open', 'closed']) with ordinality names (t, n)"""
        )
        assert await writer.fetchval("select owns from kafka.members where group_id = 'g'") == ["open-0"]
        details = [
            None,
            "claimed (open-0, open-1)",
            "offsets of open[0], closed[0] reset",
            "withheld (closed-0)",
            "closed.",
        ]
        await owner.execute(
            """insert into sluice.journal_event (seq, at_ms, node_id, group_id, group_type, kind, detail, generation_id)
            select n, 1, 1, 'g', 'classic', 'observed', d, 1 from unnest($1::text[]) with ordinality details (d, n)""",
            details,
        )
        shown = await writer.fetch("select detail from kafka.journal where group_id = 'g' and kind = 'observed'")
        assert [row["detail"] for row in shown] == [*details[:2], None, None, None]
        await owner.execute("insert into sluice.acl values ('\\xff', 2, 3, 'open', 'User:*', '*', 4, 2)")
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="may not WRITE topic open"):
            await writer.execute("select kafka.produce('open', 'v')")
    finally:
        await writer.close()
        await owner.close()


@pytest.mark.parametrize("host", ["0:0:0:0:0:0:0:1", "::1/127", "::0001"])
async def test_a_host_that_is_denied_in_another_spelling_is_denied(
    gateway_factory: GatewayFactory, sql: Connection, roles: list[str], host: str
) -> None:
    """The gateway compares addresses, and not their texts."""
    gateway = gateway_factory({"authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer"})
    assert gateway.database_url is not None
    roles.append(await make_role(sql, "kafka_reader"))
    owner = await asyncpg.connect(gateway.database_url)
    try:
        transaction = owner.transaction()
        await transaction.start()
        # The server of the tests has no address, so this stands for a client that has connected from ::1.
        await owner.execute(
            """set local allow_system_table_mods = on;
            create or replace function pg_catalog.inet_client_addr() returns inet language sql stable
            as $$ select '::1'::inet $$"""
        )
        acl = "insert into sluice.acl values ($1, 2, 3, 'open', 'User:*', $2, 8, $3)"
        await owner.execute(acl, b"allow", "*", 3)
        await owner.execute(f"set local role {roles[0]}")
        assert await owner.fetchval("select kafka.may_describe('topic', 'open')")
        await owner.execute("reset role")
        await owner.execute(acl, b"deny", host, 2)
        await owner.execute(f"set local role {roles[0]}")
        assert not await owner.fetchval("select kafka.may_describe('topic', 'open')")
        await transaction.rollback()
    finally:
        await owner.close()
