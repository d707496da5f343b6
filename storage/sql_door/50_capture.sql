-- Capture: a trigger that turns row changes of a table into events in Debezium's envelope.

create or replace function sluice.door_is_safe_as_json(p_type oid) returns boolean
language plpgsql stable
set search_path = sluice, pg_temp
as $$
-- Return whether to_jsonb calls no function of an ordinary role for values of the type. It calls a cast to json, which
-- the owner of a type may create at any time. It looks for none on built-in types, and looks through domains.
declare
    looked pg_type;
begin
    if p_type < 16384 then
        return true;
    end if;
    select t.* into looked from pg_type t where t.oid = p_type;
    if looked.typtype = 'd' then
        return door_is_safe_as_json(looked.typbasetype);
    elsif looked.typcategory = 'A' then
        return door_is_safe_as_json(looked.typelem);
    end if;
    return exists (
            select from pg_roles r where r.oid = looked.typowner and (r.rolsuper or r.rolname = current_user)
        ) and not exists (
            select from pg_attribute a
            where looked.typtype = 'c' and a.attrelid = looked.typrelid and a.attnum > 0 and not a.attisdropped
                and not door_is_safe_as_json(a.atttypid)
        );
end
$$;

create or replace function sluice.door_conversion(p_relation oid) returns text
language plpgsql stable
set search_path = sluice, pg_temp
as $$
-- Return the statement that turns a row of the table into JSON, or null: to_jsonb is safe. Columns of other types become
-- strings by the output functions of the types, which only a superuser can create. A cast to text could be anyone's.
-- Virtual generated columns are left out, because they are null in every trigger.
begin
    perform 1 from pg_attribute a
    where a.attrelid = p_relation and a.attnum > 0 and not a.attisdropped
        and (a.attgenerated = 'v' or a.atttypid >= 16384 and not door_is_safe_as_json(a.atttypid));
    if not found then
        return null;
    end if;
    return (
        select format('select to_jsonb(converted.*) from (select %s from (select ($1).*) changed) converted', string_agg(
            case when door_is_safe_as_json(a.atttypid) then format('changed.%I', a.attname)
                else format('case num_nulls(changed.%1$I) when 0 then format(''%%s'', changed.%1$I) end as %1$I', a.attname) end,
            ', ' order by a.attnum))
        from pg_attribute a
        where a.attrelid = p_relation and a.attnum > 0 and not a.attisdropped and a.attgenerated <> 'v'
    );
end
$$;

drop function if exists sluice.door_primary_key(oid);

create or replace function kafka.capture_row() returns trigger
language plpgsql volatile security definer
set search_path = sluice, pg_temp
-- Without these settings, sessions with different ones would give one row different keys.
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
set intervalstyle = 'postgres'
set bytea_output = 'hex'
set extra_float_digits = 1
set quote_all_identifiers = off
as $$
-- Produce the change of one row. The trigger's arguments are the topic and the columns that were the primary key when the
-- table was captured. They are the key only while the table has no primary key, because another column may have taken the
-- name of a renamed one. As Debezium does, a deletion is followed by a tombstone, and a changed key becomes a deletion and
-- a creation. The function has the rights of its owner, so the conversion of a row must not call functions of the table's
-- owner.
declare
    columns constant text[] := coalesce((
        select array_agg(a.attname::text order by k.place)
        from pg_index i
        cross join lateral unnest(i.indkey::smallint[]) with ordinality k (attnum, place)
        join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
        where i.indrelid = tg_relid and i.indisprimary and k.place <= i.indnkeyatts
    ), tg_argv[1:]);
    topic   constant text := tg_argv[0];
    conversion constant text := door_conversion(tg_relid);
    before  jsonb;
    after   jsonb;
    old_key jsonb;
    new_key jsonb;
    now_ms  constant bigint := (extract(epoch from clock_timestamp()) * 1000)::bigint;
    source  constant jsonb := jsonb_build_object(
        'version', '1', 'connector', 'sluice', 'name', current_database(), 'ts_ms', now_ms, 'db', current_database(),
        'schema', tg_table_schema, 'table', tg_table_name, 'txId', pg_current_xact_id()::text::bigint);
begin
    if tg_op <> 'INSERT' and conversion is null then
        before := to_jsonb(old);
    elsif tg_op <> 'INSERT' then
        execute conversion into before using old;
    end if;
    if tg_op <> 'DELETE' and conversion is null then
        after := to_jsonb(new);
    elsif tg_op <> 'DELETE' then
        execute conversion into after using new;
    end if;
    if not coalesce(after, before) ?& columns then
        raise exception using
            errcode = '22023',
            message = format('table %s is captured to topic %s, and has neither the columns of the key nor a primary key',
                tg_relid::regclass, topic),
            hint = 'Give the table a primary key, or call kafka.release.';
    end if;
    old_key := (select jsonb_object_agg(k, before -> k) from unnest(columns) k where before is not null);
    new_key := (select jsonb_object_agg(k, after -> k) from unnest(columns) k where after is not null);
    -- As jsonb, 1.0 equals 1.00, but their texts are different keys.
    if tg_op = 'UPDATE' and old_key::text is not distinct from new_key::text then
        perform door_capture(topic, new_key, before, after, 'u', source, now_ms);
        return null;
    end if;
    if before is not null then
        perform door_capture(topic, old_key, before, null, 'd', source, now_ms);
        perform kafka.produce(topic, null::bytea, convert_to(old_key::text, 'UTF8'));
    end if;
    if after is not null then
        perform door_capture(topic, new_key, null, after, 'c', source, now_ms);
    end if;
    return null;
end
$$;

create or replace function sluice.door_capture(
    p_topic text, p_key jsonb, p_before jsonb, p_after jsonb, p_op text, p_source jsonb, p_ms bigint
) returns void
language plpgsql volatile
as $$
begin
    perform kafka.produce(
        p_topic,
        convert_to(jsonb_build_object(
            'before', p_before, 'after', p_after, 'source', p_source, 'op', p_op, 'ts_ms', p_ms)::text, 'UTF8'),
        convert_to(p_key::text, 'UTF8'));
end
$$;

create or replace function kafka.capture(captured regclass, topic text) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
-- Create the trigger, with the rights of the caller. The table needs a primary key, which becomes the records' key. The
-- caller's search path may name a schema in which another role has created functions, so it does not apply here.
-- Triggers fire in the order of their names. This one fires before one of the user that may change the row again.
-- Otherwise the record of that later change would come first. Former releases named it sluice_capture.
declare
    columns text;
begin
    select string_agg(quote_literal(a.attname), ', ' order by k.place) into columns
    from pg_catalog.pg_index i
    cross join lateral unnest(i.indkey::smallint[]) with ordinality k (attnum, place)
    join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
    where i.indrelid = capture.captured and i.indisprimary and k.place <= i.indnkeyatts;
    if columns is null or capture.topic is null then
        raise exception using
            errcode = '22023',
            message = format('table %s cannot be captured to topic %s', capture.captured, coalesce(capture.topic, 'NULL')),
            hint = 'The table needs a primary key, which becomes the key of the records, and the topic a name.';
    end if;
    execute format(
        'create or replace trigger "0_sluice_capture" after insert or update or delete on %s for each row '
        'execute function kafka.capture_row(%L, %s)', capture.captured, capture.topic, columns);
    if exists (
        select from pg_catalog.pg_trigger t where t.tgrelid = capture.captured and t.tgname = 'sluice_capture'
    ) then
        execute format('drop trigger sluice_capture on %s', capture.captured);
    end if;
end
$$;

create or replace function kafka.release(captured regclass) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
-- Drop the trigger of kafka.capture, by its present or its former name.
begin
    execute format('drop trigger if exists "0_sluice_capture" on %s', release.captured);
    execute format('drop trigger if exists sluice_capture on %s', release.captured);
end
$$;
