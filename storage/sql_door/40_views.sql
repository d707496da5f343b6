-- Views and functions that read. Each shows what the calling role may DESCRIBE; columns are documented in docs/sql.md.

create or replace function kafka.may_describe(kind text, name text) returns boolean
language sql stable security definer
set search_path = sluice, pg_temp
as $$
-- Whether the calling role may DESCRIBE a 'topic', a 'group' or the 'cluster'.
    select door_allows(8, case kind when 'topic' then 2 when 'group' then 3 else 4 end, name)
$$;

create or replace view kafka.topics with (security_barrier) as
select
    t.name as topic,
    t.topic_id,
    (select count(*)::integer from sluice.partition p where p.topic_id = t.topic_id) as partitions,
    t.internal,
    t.configs,
    t.created_at
from sluice.topic t
where t.deleted_at is null and kafka.may_describe('topic', t.name);

create or replace view kafka.partitions with (security_barrier) as
select
    t.name as topic,
    p.partition_index as partition,
    p.log_start_offset as start_offset,
    p.next_offset as end_offset,
    greatest(
        coalesce(
            (select min(o.first_offset) from sluice.open_transaction o where o.partition_key = p.partition_key),
            p.next_offset
        ), p.log_start_offset
    ) as last_stable_offset,
    p.size_bytes as bytes,
    case when p.max_timestamp_ms between 0 and 9224318015999999 then to_timestamp(p.max_timestamp_ms / 1000.0) end
        as newest_record_at
from sluice.topic t
join sluice.partition_log p using (topic_id)
where t.deleted_at is null and kafka.may_describe('topic', t.name);

create or replace view kafka.groups with (security_barrier) as
select
    g.group_id,
    g.group_type as type,
    g.state,
    g.generation_id as generation,
    g.protocol_type,
    (select count(*)::integer from sluice.group_member m where m.group_id = g.group_id) as members,
    to_timestamp(g.state_timestamp_ms / 1000.0) as state_since
from sluice.consumer_group g
where kafka.may_describe('group', g.group_id);

create or replace view kafka.members with (security_barrier) as
select
    m.group_id,
    m.member_id,
    case g.group_type when 'classic' then g.generation_id else m.member_epoch end as generation,
    m.document ->> 'group_instance_id' as group_instance_id,
    m.document ->> 'client_id' as client_id,
    m.document ->> 'client_host' as client_host,
    owned.partitions as owns
from sluice.group_member m
join sluice.consumer_group g using (group_id)
left join lateral (
    select array_agg(newest.topic || '-' || newest.partition order by newest.topic, newest.partition) as partitions
    from (
        select distinct on (o.topic, o.partition) o.topic, o.partition, o.change, o.member_id
        from sluice.journal_ownership o
        where o.group_id = m.group_id
        order by o.topic, o.partition, o.seq desc
    ) newest
    where newest.member_id = m.member_id and newest.change <> 'released' and kafka.may_describe('topic', newest.topic)
) owned on true
where kafka.may_describe('group', m.group_id);

create or replace view kafka.lag with (security_barrier) as
select
    l.group_id, l.topic, l.partition, l.committed_offset, l.log_end_offset as end_offset, l.lag, l.committed_at, l.metadata
from sluice.consumer_lag l
where kafka.may_describe('group', l.group_id) and kafka.may_describe('topic', l.topic);

create or replace view kafka.transactions with (security_barrier) as
select
    p.transactional_id,
    p.producer_id,
    p.producer_epoch,
    p.state,
    p.started_at,
    p.timeout_ms,
    (
        select array_agg(t.name || '-' || l.partition_index order by t.name, l.partition_index)
        from sluice.open_transaction o
        join sluice.partition l using (partition_key)
        join sluice.topic t on t.topic_id = l.topic_id
        where o.producer_id = p.producer_id and kafka.may_describe('topic', t.name)
    ) as partitions
from sluice.transactional_producer p
where kafka.may_describe('cluster', 'kafka-cluster');

create or replace view kafka.nodes with (security_barrier) as
select
    n.node_id, n.name, n.listeners, n.rack, n.registered_at, n.expires_at, n.expires_at > clock_timestamp() as alive
from sluice.node n
where n.listeners <> '{}' and kafka.may_describe('cluster', 'kafka-cluster');

-- A detail is free text and writes a partition as topic-0 or topic[0]. It is null if it names a topic that the role may
-- not DESCRIBE.
create or replace view kafka.journal with (security_barrier) as
select
    e.seq, to_timestamp(e.at_ms / 1000.0) as at, e.node_id, e.group_id, e.kind, e.reason,
    case when not exists (
        select
        from regexp_matches(e.detail, '[A-Za-z0-9._-]+', 'g') found (words)
        cross join lateral (
            values (found.words[1]), (rtrim(found.words[1], '.')), (regexp_replace(found.words[1], '-[^-]*$', ''))
        ) named (topic)
        join sluice.topic t on t.name = named.topic and t.deleted_at is null
        where not kafka.may_describe('topic', t.name)
    ) then e.detail end as detail,
    e.generation_id as generation, e.state_before, e.state_after, e.member_id, e.client_id, e.client_host
from sluice.journal_event e
where kafka.may_describe('group', e.group_id);

create or replace function sluice.door_varint(p_bytes bytea, inout p_at integer, out value bigint)
language plpgsql immutable
as $$
-- Return the zigzag varint at a position, and the position behind the varint.
declare
    byte integer;
    bits integer := 0;
begin
    value := 0;
    loop
        byte := get_byte(p_bytes, p_at);
        p_at := p_at + 1;
        value := value | ((byte & 127)::bigint << bits);
        exit when byte < 128;
        bits := bits + 7;
    end loop;
    value := ((value >> 1) & 9223372036854775807) # -(value & 1);
end
$$;

create or replace function sluice.door_int(p_bytes bytea, p_at integer, p_size integer) returns bigint
language sql immutable
as $$
-- A big-endian integer.
    select ('x' || encode(substr(p_bytes, p_at + 1, p_size), 'hex'))::bit(64)::bigint
        >> 64 - 8 * p_size
$$;

create or replace function sluice.door_time(p_ms bigint) returns timestamptz
language sql immutable
as $$
-- A record's timestamp, or null: a client may have chosen one that Postgres cannot hold, for example in nanoseconds.
    select case when p_ms between -210866803200000 and 9224318015999999 then to_timestamp(p_ms / 1000.0) end
$$;

create or replace function kafka.records(topic text, partition integer, from_offset bigint default 0, max_records integer default 100)
returns table ("offset" bigint, "timestamp" timestamptz, key bytea, value bytea, headers jsonb, note text)
language plpgsql stable security definer
set search_path = sluice, pg_temp
set standard_conforming_strings = on
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set enable_sort = off
as $$
#variable_conflict use_column
-- Records from the offset on that Postgres itself holds without compression. Each range that it does not is one row, of
-- which only `offset` and `note` are set. Control records and records of transactions that are not committed are left out.
declare
    place     record;
    held      record;
    batch     bytea;
    at        integer;
    head_at   integer;
    size      integer;
    attributes integer;
    base      bigint;
    base_ms   bigint;
    append_ms bigint;
    producer  bigint;
    count     integer;
    part      record;
    header_count bigint;
    header_list jsonb[]; -- PL/pgSQL appends to an array in place
    name      text;
    returned  integer := 0;
    next_head bigint;
begin
    perform door_require(3, 2, records.topic);
    if records.from_offset < 0 or coalesce(records.max_records, 0) not between 1 and 100000 then
        raise exception using
            errcode = '22023',
            message = format('topic %s: from_offset must not be negative and max_records must be 1 to 100000, not %s and %s',
                records.topic, records.from_offset, coalesce(records.max_records::text, 'NULL')),
            hint = 'Read a long range in several calls.';
    end if;
    select l.*, coalesce(
        (select min(o.first_offset) from open_transaction o where o.partition_key = l.partition_key), l.next_offset
    ) as stable_offset
    into place
    from topic t join partition_log l on l.topic_id = t.topic_id
    where t.name = records.topic and t.deleted_at is null and l.partition_index = records.partition;
    if not found then
        raise exception using
            errcode = '42704',
            message = format('partition %s-%s does not exist', records.topic, records.partition),
            hint = 'The view of topics shows how many partitions each has.';
    end if;
    for held in
        select c.base_offset, c.last_offset, c.final_heads, c.object_id, r.records
        from chunk c left join inline_records r on r.slot = c.inline_slot and r.position = c.position
        where c.partition_key = place.partition_key and c.base_offset < place.stable_offset
            and c.base_offset >= coalesce((
                select f.base_offset from chunk f
                where f.partition_key = place.partition_key and f.base_offset <= records.from_offset
                order by f.base_offset desc limit 1
            ), 0)
        order by c.base_offset
    loop
        continue when held.last_offset < greatest(records.from_offset, place.log_start_offset);
        exit when returned >= records.max_records;
        "timestamp" := null; key := null; value := null; headers := null; note := null;
        if held.records is null then
            "offset" := greatest(held.base_offset, records.from_offset);
            note := format('offsets %s to %s lie in a segment or an object: read them with a Kafka client', "offset", held.last_offset);
            returned := returned + 1;
            return next;
            continue;
        end if;
        head_at := 0;
        next_head := held.base_offset;
        while head_at < octet_length(held.records) and returned < records.max_records loop
            size := door_int(held.records, head_at + 8, 4)::integer + 12;
            base := case when held.final_heads then door_int(held.records, head_at, 8) else next_head end;
            exit when base >= place.stable_offset; -- the batches of several producers may share a chunk
            attributes := door_int(held.records, head_at + 21, 2)::integer;
            next_head := base + door_int(held.records, head_at + 23, 4) + 1;
            base_ms := door_int(held.records, head_at + 27, 8);
            append_ms := case when attributes & 8 <> 0 then door_int(held.records, head_at + 35, 8) end;
            producer := door_int(held.records, head_at + 43, 8);
            count := door_int(held.records, head_at + 57, 4)::integer;
            batch := substr(held.records, head_at + 1, size);
            head_at := head_at + size;
            continue when next_head <= greatest(records.from_offset, place.log_start_offset) or attributes & 32 <> 0;
            continue when attributes & 16 <> 0 and exists (
                select from aborted_transaction a
                where a.partition_key = place.partition_key and a.producer_id = producer
                    and a.first_offset <= base and a.last_offset >= base
            );
            if attributes & 7 <> 0 then
                "offset" := greatest(base, records.from_offset);
                "timestamp" := null; key := null; value := null; headers := null;
                note := format('offsets %s to %s are compressed: read them with a Kafka client', "offset", next_head - 1);
                returned := returned + 1;
                return next;
                continue;
            end if;
            at := 61;
            for i in 1..count loop
                select * into part from door_varint(batch, at);
                at := part.p_at + 1; -- and the attributes
                select * into part from door_varint(batch, at);
                at := part.p_at;
                "timestamp" := door_time(coalesce(append_ms, base_ms + part.value));
                select * into part from door_varint(batch, at);
                at := part.p_at;
                "offset" := base + part.value;
                select * into part from door_varint(batch, at);
                at := part.p_at;
                key := case when part.value >= 0 then substr(batch, at + 1, part.value::integer) end;
                at := at + greatest(part.value, 0);
                select * into part from door_varint(batch, at);
                at := part.p_at;
                value := case when part.value >= 0 then substr(batch, at + 1, part.value::integer) end;
                at := at + greatest(part.value, 0);
                select * into part from door_varint(batch, at);
                at := part.p_at;
                header_count := part.value;
                header_list := '{}';
                for j in 1..header_count loop
                    select * into part from door_varint(batch, at);
                    name := door_text(substr(batch, part.p_at + 1, part.value::integer));
                    at := part.p_at + part.value;
                    select * into part from door_varint(batch, at);
                    at := part.p_at;
                    header_list := array_append(header_list, jsonb_build_array(name,
                        case when part.value >= 0 then door_text(substr(batch, at + 1, part.value::integer)) end));
                    at := at + greatest(part.value, 0);
                end loop;
                headers := case when header_count > 0 then to_jsonb(header_list) end;
                note := null;
                continue when "offset" < greatest(records.from_offset, place.log_start_offset);
                returned := returned + 1;
                return next;
                exit when returned >= records.max_records;
            end loop;
        end loop;
    end loop;
end
$$;

create or replace function sluice.door_text(p_bytes bytea) returns text
language plpgsql immutable
as $$
-- Bytes as text, or in hexadecimal with \x in front if they are no text that Postgres can hold.
begin
    if position('\x00'::bytea in p_bytes) > 0 then
        return '\x' || encode(p_bytes, 'hex');
    end if;
    return convert_from(p_bytes, 'UTF8');
exception when character_not_in_repertoire or untranslatable_character then
    return '\x' || encode(p_bytes, 'hex');
end
$$;

create or replace function kafka.wait_for(topic text, partition integer, "offset" bigint, timeout interval default '10 seconds')
returns boolean
language plpgsql volatile security definer
set search_path = sluice, pg_temp
as $$
-- Wait until the partition has the record with this offset; false after the timeout.
declare
    deadline constant timestamptz := clock_timestamp() + wait_for.timeout;
    wanted   bigint;
begin
    perform door_require(8, 2, wait_for.topic);
    if wait_for.timeout is null or not isfinite(wait_for.timeout) or wait_for."offset" is null then
        perform door_refuse_endless('wait_for', 'offset and timeout');
    end if;
    perform door_require_new_snapshots();
    select p.partition_key into wanted
    from topic t join partition p using (topic_id)
    where t.name = wait_for.topic and t.deleted_at is null and p.partition_index = wait_for.partition;
    if not found then
        raise exception using
            errcode = '42704',
            message = format('partition %s-%s does not exist', wait_for.topic, wait_for.partition),
            hint = 'The view of topics shows how many partitions each has.';
    end if;
    loop
        perform 1 from partition_log l where l.partition_key = wanted and l.next_offset > wait_for."offset";
        if found then
            return true;
        end if;
        if clock_timestamp() >= deadline then
            return false;
        end if;
        perform pg_sleep(0.005);
    end loop;
end
$$;

create or replace function kafka.flush(timeout interval default '10 seconds') returns boolean
language plpgsql volatile security definer
set search_path = sluice, pg_temp
as $$
-- Wait until every record that was committed before the call has its offset; false after the timeout.
declare
    deadline  constant timestamptz := clock_timestamp() + flush.timeout;
    committed bigint[];
begin
    if flush.timeout is null or not isfinite(flush.timeout) then
        perform door_refuse_endless('flush', 'timeout');
    end if;
    perform door_require_new_snapshots();
    committed := array(select c.seq from staged_commit c);
    loop
        perform 1 from staged_commit c where c.seq = any (committed);
        if not found then
            return true;
        end if;
        if clock_timestamp() >= deadline then
            return false;
        end if;
        perform pg_sleep(0.002);
    end loop;
end
$$;

create or replace function sluice.door_refuse_endless(p_function text, p_arguments text) returns void
language plpgsql immutable
as $$
begin
    raise exception using
        errcode = '22004',
        message = format('%s would wait without end: %s must be neither NULL nor infinite', p_function, p_arguments),
        hint = format('Leave the timeout of %s out to wait for 10 seconds.', p_function);
end
$$;

create or replace function sluice.door_require_new_snapshots() returns void
language plpgsql stable
as $$
begin
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
        raise exception using
            errcode = '25001',
            message = format('a %s transaction never sees what is committed while it waits', current_setting('transaction_isolation')),
            hint = 'Wait in a READ COMMITTED transaction, or outside of one.';
    end if;
end
$$;
