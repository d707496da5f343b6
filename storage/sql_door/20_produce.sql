-- Produce: kafka.produce and kafka.produce_many.

create or replace function sluice.door_produce(
    p_topic text, p_value bytea, p_key bytea, p_headers jsonb, p_partition integer, p_timestamp timestamptz
) returns void
language plpgsql volatile
set search_path = sluice, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
-- Stage one record, or raise the reason why the record is refused.
declare
    target     record;
    me         constant bigint := pg_current_xact_id()::text::bigint;
    size_limit bigint;
begin
    select d.authorizer, d.max_message_bytes, d.compacts, t.topic_id, t.internal, t.configs,
        (
            select p.partition_index + 1 from partition p
            where p.topic_id = t.topic_id order by p.partition_index desc limit 1
        ) as partition_count
    into target
    from sql_door d left join topic t on t.name = p_topic and t.deleted_at is null;
    if target.topic_id is null or target.internal or target.authorizer then
        perform door_check_target(p_topic, target.topic_id, target.internal);
    end if;
    if p_timestamp is not null then
        perform door_check_timestamp(p_topic, p_timestamp, target.configs);
    end if;
    if jsonb_typeof(p_headers) <> 'object' then
        perform door_refuse_headers(p_topic, jsonb_typeof(p_headers));
    end if;
    size_limit := door_limit(target.configs, target.max_message_bytes);
    if door_batch_bytes(p_key, p_value, p_headers) > size_limit then
        perform door_refuse_too_large(p_topic, door_batch_bytes(p_key, p_value, p_headers), size_limit);
    end if;
    if p_key is null and coalesce(target.configs ->> 'cleanup.policy' like '%compact%', target.compacts) then
        perform door_refuse_without_key(p_topic);
    end if;
    if p_partition < 0 or p_partition >= coalesce(target.partition_count, 2147483647) then
        perform door_refuse_partition(p_topic, p_partition, target.partition_count);
    end if;
    insert into staged_record (
        xid, topic_id, topic, partition_index, key, value, headers, header_bytes, timestamp_ms, arms
    )
    values (
        me, target.topic_id, case when target.topic_id is null then p_topic end, p_partition, p_key, p_value,
        p_headers, octet_length(p_headers::text), (extract(epoch from coalesce(p_timestamp, clock_timestamp())) * 1000)::bigint,
        current_setting('sluice.armed', true) is distinct from set_config('sluice.armed', me::text, true)
    );
end
$$;

create or replace function kafka.produce(
    topic        text,
    value        bytea,
    key          bytea default null,
    headers      jsonb default null,
    partition    integer default null,
    "timestamp"  timestamptz default null
) returns integer
language plpgsql volatile security definer parallel unsafe
set search_path = sluice, pg_temp
-- Postgres may make the plan while the staging tables are empty. The plan must also suit full tables. A scan by bitmap would
-- read all records of the transaction for each further one.
-- Before 18, Postgres gives a plan with a scan that is switched off such a cost that it would compile the plan at each call.
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
-- Stage one record and return the partition that the call names. The relay places the other records. One statement both
-- checks and stages a plain record. It stages nothing in doubt, and door_produce decides: each further statement or
-- expression of PL/pgSQL would cost the caller one to ten microseconds.
-- The first record of a transaction arms the trigger. A setting of the transaction remembers this, and is rolled back with
-- a savepoint as the record is. If the statement looked for that record in the table instead, concurrent SERIALIZABLE
-- transactions would fail each other.
begin
    if produce.partition is null and produce."timestamp" is null then
        insert into staged_record (xid, topic_id, key, value, headers, header_bytes, timestamp_ms, arms)
        select
            pg_current_xact_id()::text::bigint, t.topic_id, produce.key, produce.value, produce.headers,
            octet_length(produce.headers::text), (extract(epoch from clock_timestamp()) * 1000)::bigint,
            current_setting('sluice.armed', true)
                is distinct from set_config('sluice.armed', pg_current_xact_id()::text, true)
        from topic t, sql_door d
        where t.name = produce.topic and t.deleted_at is null and not t.internal and not d.authorizer
            and coalesce(jsonb_typeof(produce.headers) = 'object', true)
            and coalesce(octet_length(produce.key), 0) + coalesce(octet_length(produce.value), 0)
                + coalesce(octet_length(produce.headers::text), 0) + 100
                <= door_limit(t.configs, d.max_message_bytes)
            and (produce.key is not null or not coalesce(t.configs ->> 'cleanup.policy' like '%compact%', d.compacts));
        if found then
            return null;
        end if;
    end if;
    perform door_produce(
        produce.topic, produce.value, produce.key, produce.headers, produce.partition, produce."timestamp");
    return produce.partition;
end
$$;

-- The variants for text and JSON convert and are inlined. Only one variant of each type of value gives `key` a default,
-- because a call without a key would otherwise fit two.

create or replace function kafka.produce(
    topic        text,
    value        bytea,
    key          text,
    headers      jsonb default null,
    partition    integer default null,
    "timestamp"  timestamptz default null
) returns integer
language sql volatile parallel unsafe
as $$
    select kafka.produce(topic, value, pg_catalog.convert_to(key, 'UTF8'), headers, partition, "timestamp")
$$;

create or replace function kafka.produce(
    topic        text,
    value        text,
    key          text default null,
    headers      jsonb default null,
    partition    integer default null,
    "timestamp"  timestamptz default null
) returns integer
language sql volatile parallel unsafe
as $$
    select kafka.produce(topic, pg_catalog.convert_to(value, 'UTF8'), pg_catalog.convert_to(key, 'UTF8'), headers, partition, "timestamp")
$$;

create or replace function kafka.produce(
    topic        text,
    value        text,
    key          bytea,
    headers      jsonb default null,
    partition    integer default null,
    "timestamp"  timestamptz default null
) returns integer
language sql volatile parallel unsafe
as $$
    select kafka.produce(topic, pg_catalog.convert_to(value, 'UTF8'), key, headers, partition, "timestamp")
$$;

create or replace function kafka.produce(
    topic        text,
    value        jsonb,
    key          text default null,
    headers      jsonb default null,
    partition    integer default null,
    "timestamp"  timestamptz default null
) returns integer
language sql volatile parallel unsafe
as $$
    select kafka.produce(topic, pg_catalog.convert_to(value::pg_catalog.text, 'UTF8'), pg_catalog.convert_to(key, 'UTF8'), headers, partition, "timestamp")
$$;

create or replace function kafka.produce(
    topic        text,
    value        jsonb,
    key          bytea,
    headers      jsonb default null,
    partition    integer default null,
    "timestamp"  timestamptz default null
) returns integer
language sql volatile parallel unsafe
as $$
    select kafka.produce(topic, pg_catalog.convert_to(value::pg_catalog.text, 'UTF8'), key, headers, partition, "timestamp")
$$;

create or replace function kafka.produce_many(
    topic        text,
    "values"     bytea[],
    keys         bytea[] default null,
    headers      jsonb[] default null,
    partition    integer default null,
    "timestamp"  timestamptz default null
) returns integer
language plpgsql volatile security definer parallel unsafe
set search_path = sluice, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
-- Stage one record for each element of `values`, in their order; return how many. All are checked before any is staged.
declare
    target     record;
    me         constant bigint := pg_current_xact_id()::text::bigint;
    total      constant integer := coalesce(cardinality(produce_many."values"), 0);
    produced_ms bigint;
    size_limit bigint;
    worst      record;
begin
    if produce_many."values" is null then
        raise exception using
            errcode = '22004',
            message = format('topic %s: values must be an array', coalesce(produce_many.topic, 'NULL')),
            hint = 'Pass an array, in which NULL elements are tombstones.';
    end if;
    if cardinality(produce_many.keys) <> total or cardinality(produce_many.headers) <> total then
        raise exception using
            errcode = '2202E',
            message = format(
                'topic %s: %s values need as many keys and headers, not %s and %s', produce_many.topic, total,
                coalesce(cardinality(produce_many.keys)::text, 'none'),
                coalesce(cardinality(produce_many.headers)::text, 'none')),
            hint = 'Pass arrays of one length, or leave keys or headers out.';
    end if;
    select d.authorizer, d.max_message_bytes, d.compacts, t.topic_id, t.internal, t.configs,
        (
            select p.partition_index + 1 from partition p
            where p.topic_id = t.topic_id order by p.partition_index desc limit 1
        ) as partition_count
    into target
    from sql_door d left join topic t on t.name = produce_many.topic and t.deleted_at is null;
    if target.topic_id is null or target.internal or target.authorizer then
        perform door_check_target(produce_many.topic, target.topic_id, target.internal);
    end if;
    if produce_many."timestamp" is not null then
        perform door_check_timestamp(produce_many.topic, produce_many."timestamp", target.configs);
    end if;
    if produce_many.partition < 0 or produce_many.partition >= coalesce(target.partition_count, 2147483647) then
        perform door_refuse_partition(produce_many.topic, produce_many.partition, target.partition_count);
    end if;
    size_limit := door_limit(target.configs, target.max_message_bytes);
    for worst in
        select each.key is null as keyless, jsonb_typeof(each.headers) as kind,
            case when coalesce(octet_length(each.key), 0) + coalesce(octet_length(each.value), 0)
                + coalesce(octet_length(each.headers::text), 0) + 100 > size_limit
            then door_batch_bytes(each.key, each.value, each.headers) else 0 end as bytes
        from unnest(produce_many."values", produce_many.keys, produce_many.headers) each (value, key, headers)
    loop
        if worst.kind <> 'object' then
            perform door_refuse_headers(produce_many.topic, worst.kind);
        elsif worst.bytes > size_limit then
            perform door_refuse_too_large(produce_many.topic, worst.bytes, size_limit);
        elsif worst.keyless and coalesce(target.configs ->> 'cleanup.policy' like '%compact%', target.compacts) then
            perform door_refuse_without_key(produce_many.topic);
        end if;
    end loop;
    produced_ms := (extract(epoch from coalesce(produce_many."timestamp", clock_timestamp())) * 1000)::bigint;
    insert into staged_record (
        xid, topic_id, topic, partition_index, key, value, headers, header_bytes, timestamp_ms, arms
    )
    select
        me, target.topic_id, case when target.topic_id is null then produce_many.topic end,
        produce_many.partition, each.key, each.value, each.headers, octet_length(each.headers::text), produced_ms,
        each.place = 1 and current_setting('sluice.armed', true) is distinct from set_config('sluice.armed', me::text, true)
    from unnest(produce_many."values", produce_many.keys, produce_many.headers)
        with ordinality each (value, key, headers, place)
    order by each.place;
    return total;
end
$$;

create or replace function kafka.produce_many(
    topic        text,
    "values"     text[],
    keys         text[] default null,
    headers      jsonb[] default null,
    partition    integer default null,
    "timestamp"  timestamptz default null
) returns integer
language sql volatile parallel unsafe
as $$
    select kafka.produce_many(
        topic,
        case when "values" is not null then array(
            select pg_catalog.convert_to(u.v, 'UTF8')
            from pg_catalog.unnest("values") with ordinality u (v, n) order by u.n
        ) end,
        case when keys is not null then array(
            select pg_catalog.convert_to(u.v, 'UTF8') from pg_catalog.unnest(keys) with ordinality u (v, n) order by u.n
        ) end,
        headers, partition, "timestamp"
    )
$$;

create or replace function kafka.produce_many(
    topic        text,
    "values"     jsonb[],
    keys         text[] default null,
    headers      jsonb[] default null,
    partition    integer default null,
    "timestamp"  timestamptz default null
) returns integer
language sql volatile parallel unsafe
as $$
    select kafka.produce_many(topic, "values"::pg_catalog.text[], keys, headers, partition, "timestamp")
$$;
