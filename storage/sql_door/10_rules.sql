-- Rules of the SQL door that no caller may run by themselves. They live beside the tables, in the schema sluice.

create or replace function sluice.door_role() returns text
language sql stable
as $$
-- The role that called the public function. Inside a security definer function only these two settings still name it.
    select case current_setting('role') when 'none' then session_user::text else current_setting('role') end
$$;

create or replace function sluice.door_allows(p_operation integer, p_kind integer, p_name text) returns boolean
language plpgsql stable
set search_path = sluice, pg_temp
as $$
-- Whether the authorizer lets the calling role do this, by Kafka's codes: operations READ 3, WRITE 4, CREATE 5, DESCRIBE
-- 8; resources TOPIC 2, GROUP 3, CLUSTER 4. The rules are those of gateway/security/authorizer.py. Without an authorizer
-- everything is allowed to the roles that may execute the function.
declare
    door      sql_door;
    who       text;
    peer      text := coalesce(host(inet_client_addr()), '');
    verdict   record;
begin
    select d.* into door from sql_door d;
    if not door.authorizer then
        return true;
    end if;
    who := coalesce(
        (select m.principal from sql_principal m where m.role = door_role()), 'User:' || door_role());
    if who = any (door.super_users) then
        return true;
    end if;
    select
        count(*) as pattern_count,
        bool_or(a.permission = 2 and a.operation in (2, p_operation) and named) as denied,
        bool_or(
            a.permission = 3 and named
            and (a.operation in (2, p_operation) or p_operation = 8 and a.operation in (3, 4, 6, 7))
        ) as allowed
    into verdict
    from (
        select a.*,
            a.principal in (who, 'User:*') and (
                a.host in (peer, '*') or a.host ~ '[/:]' and door_names_host(a.host, peer)
            ) as named
        from acl a
        where a.resource_type = p_kind
            and case a.pattern_type when 4 then starts_with(p_name, a.resource_name)
                else a.resource_name in (p_name, '*') end
    ) a;
    if verdict.denied then
        return false;
    end if;
    return coalesce(verdict.allowed, false) or verdict.pattern_count = 0 and door.allow_if_no_acl;
end
$$;

create or replace function sluice.door_names_host(p_host text, p_peer text) returns boolean
language plpgsql immutable
as $$
-- Whether the host of an ACL names the peer: as a range, or as an IPv6 address in any spelling.
begin
    return p_peer::inet <<= p_host::inet;
exception when others then
    return false;
end
$$;

create or replace function sluice.door_require(p_operation integer, p_kind integer, p_name text) returns void
language plpgsql stable
set search_path = sluice, pg_temp
as $$
begin
    if not door_allows(p_operation, p_kind, p_name) then
        raise exception using
            errcode = '42501',
            message = format('role %s may not %s %s %s', door_role(),
                case p_operation when 3 then 'READ' when 4 then 'WRITE' when 5 then 'CREATE' else 'DESCRIBE' end,
                case p_kind when 2 then 'topic' when 3 then 'group' else 'cluster' end, p_name),
            hint = format('Give the role''s principal an ACL, for example with "sluice acls add", or map role %s to another '
                'principal in sluice.sql_principal.', door_role());
    end if;
end
$$;

drop function if exists sluice.door_is_network(text);
drop function if exists sluice.door_murmur2(bytea);

create or replace function sluice.door_varint_bytes(p_length bigint) returns integer
language sql immutable
as $$
-- Bytes of a length in a record: a varint of twice the value.
    select case when p_length < 64 then 1 when p_length < 8192 then 2 when p_length < 1048576 then 3
        when p_length < 134217728 then 4 else 5 end
$$;

create or replace function sluice.door_batch_bytes(p_key bytea, p_value bytea, p_headers jsonb) returns bigint
language plpgsql immutable
as $$
-- Bytes of a record batch that holds one record: what max.message.bytes limits.
declare
    body bigint := 3
        + coalesce(octet_length(p_key) + sluice.door_varint_bytes(octet_length(p_key)), 1)
        + coalesce(octet_length(p_value) + sluice.door_varint_bytes(octet_length(p_value)), 1);
    header_count integer := 0;
    header record;
begin
    if p_headers is not null then
        for header in select h.key, h.value from jsonb_each_text(p_headers) h loop
            header_count := header_count + 1;
            body := body + octet_length(header.key) + sluice.door_varint_bytes(octet_length(header.key))
                + coalesce(octet_length(header.value) + sluice.door_varint_bytes(octet_length(header.value)), 1);
        end loop;
    end if;
    body := body + sluice.door_varint_bytes(header_count);
    return 61 + sluice.door_varint_bytes(body) + body;
end
$$;

create or replace function sluice.door_limit(p_configs jsonb, p_default bigint) returns bigint
language sql immutable
as $$
-- The largest record that a topic takes from SQL: by its settings, and no larger than a request to Produce may be by
-- default. The relay holds a record several times in its memory, and all other records wait for it.
    select least(coalesce((p_configs ->> 'max.message.bytes')::bigint, p_default), 104857600)
$$;

create or replace function sluice.door_refuse_too_large(p_topic text, p_bytes bigint, p_limit bigint) returns void
language plpgsql immutable
as $$
begin
    raise exception using
        errcode = '54000',
        message = format('topic %s: a record of %s bytes exceeds %s, which is %s', p_topic, p_bytes,
            case p_limit when 104857600 then 'the limit of SQL' else 'max.message.bytes' end, p_limit),
        hint = case p_limit when 104857600 then 'Store the value elsewhere and produce a reference to it.'
            else format('Raise max.message.bytes of topic %s, or store the value elsewhere and produce a reference to it.', p_topic) end;
end
$$;

create or replace function sluice.door_check_timestamp(p_topic text, p_timestamp timestamptz, p_configs jsonb) returns void
language plpgsql stable
set search_path = sluice, pg_temp
as $$
-- Raise unless the topic accepts a record with this timestamp, by the rules of Produce (KIP-937). With LogAppendTime any
-- timestamp is accepted, because the relay replaces it.
declare
    door      sql_door;
    before_ms bigint;
    after_ms  bigint;
    ahead_ms  numeric;
begin
    if not isfinite(p_timestamp) then
        raise exception using
            errcode = '22008',
            message = format('topic %s: the timestamp %s is no point in time', p_topic, p_timestamp),
            hint = 'Leave the timestamp out: the record then gets the present time.';
    end if;
    select d.* into door from sql_door d;
    if coalesce(p_configs ->> 'message.timestamp.type' = 'LogAppendTime', door.log_append_time) then
        return;
    end if;
    before_ms := coalesce((p_configs ->> 'message.timestamp.before.max.ms')::bigint, door.timestamp_before_max_ms);
    after_ms := coalesce((p_configs ->> 'message.timestamp.after.max.ms')::bigint, door.timestamp_after_max_ms);
    ahead_ms := extract(epoch from p_timestamp) * 1000 - extract(epoch from clock_timestamp()) * 1000;
    if extract(epoch from p_timestamp) < 0 or ahead_ms > after_ms or -ahead_ms > before_ms then
        raise exception using
            errcode = '22008',
            message = format('topic %s: the timestamp %s is out of range', p_topic, p_timestamp),
            hint = format('Topic %s accepts timestamps since 1970, up to %s ms before the present time '
                '(message.timestamp.before.max.ms) and %s ms after it (message.timestamp.after.max.ms).',
                p_topic, before_ms, after_ms);
    end if;
end
$$;

create or replace function sluice.door_refuse_headers(p_topic text, p_kind text) returns void
language plpgsql immutable
as $$
begin
    raise exception using
        errcode = '22023',
        message = format('topic %s: headers must be a JSON object, not %s', p_topic, p_kind),
        hint = 'Pass an object whose members are the headers, such as {"source": "orders"}.';
end
$$;

create or replace function sluice.door_refuse_without_key(p_topic text) returns void
language plpgsql immutable
as $$
begin
    raise exception using
        errcode = '22004',
        message = format('topic %s is compacted, and the record has no key', p_topic),
        hint = format('Pass a key: compaction of topic %s keeps the newest record of each key.', p_topic);
end
$$;

create or replace function sluice.door_refuse_partition(p_topic text, p_partition integer, p_count integer) returns void
language plpgsql immutable
as $$
begin
    raise exception using
        errcode = '22023',
        message = case when p_partition < 0 then format('topic %s: partition %s is negative', p_topic, p_partition)
            else format('topic %s has no partition %s: it has %s', p_topic, p_partition, p_count) end,
        hint = case when p_count is null then 'Leave the partition out: the key chooses it.'
            else format('Name one of the partitions 0 to %s, or leave the partition out.', p_count - 1) end;
end
$$;

create or replace function sluice.door_check_target(p_topic text, p_topic_id uuid, p_internal boolean) returns void
language plpgsql stable
set search_path = sluice, pg_temp
as $$
-- Raise unless the caller may produce to the topic, which may be one that the relay will create.
declare
    collides text;
begin
    if p_topic is null then
        raise exception using
            errcode = '22004', message = 'the topic is NULL', hint = 'Name the topic as the first argument.';
    end if;
    perform door_require(4, 2, p_topic);
    if p_internal then
        raise exception using
            errcode = '42501',
            message = format('topic %s is internal: only the brokers write to it', p_topic),
            hint = 'Produce to a topic of your own.';
    end if;
    if p_topic_id is not null then
        return;
    end if;
    if p_topic !~ '^[a-zA-Z0-9._-]{1,249}$' or p_topic in ('.', '..') then
        raise exception using
            errcode = '42602',
            message = format('%L is no legal topic name', left(p_topic, 300)),
            hint = 'A name has 1 to 249 of the characters a-z, A-Z, 0-9, ".", "_" and "-", and is neither "." nor "..".';
    end if;
    if not (select d.auto_create from sql_door d)
        or p_topic in ('__consumer_offsets', '__transaction_state', '__share_group_state', '__cluster_metadata')
    then
        raise exception using
            errcode = '42704',
            message = format('topic %s does not exist', p_topic),
            hint = format('Create topic %s, for example with "sluice topics create %s".', p_topic, p_topic);
    end if;
    if not door_allows(5, 2, p_topic) then
        perform door_require(5, 4, 'kafka-cluster');
    end if;
    select t.name into collides from topic t
    where t.deleted_at is null and translate(t.name, '.', '_') = translate(p_topic, '.', '_') limit 1;
    if found then
        raise exception using
            errcode = '42710',
            message = format('topic %s does not exist, and its name collides with topic %s', p_topic, collides),
            hint = format('Use topic %s, or choose a name that differs in more than "." and "_".', collides);
    end if;
end
$$;

create or replace function sluice.door_refuse_prepare() returns void
language plpgsql volatile
as $$
-- The deferred trigger also runs for PREPARE TRANSACTION. If the client's text ends with this statement in one of its
-- usual forms, the error says what to do. Its other forms fail, too, because Postgres prepares no transaction that
-- holds a lock of the session and a lock of the transaction with one key. The session keeps its lock, which delays no
-- other session. The first condition is cheap, and true for every such text.
begin
    if current_query() !~* 'prepare' then
        return;
    end if;
    if current_query() ~* replace(
        '(^|;)_*prepare_+transaction_+([eu&]*''[^'']*''|\$\w*\$.*\$\w*\$)(_|;)*$',
        '_', '(\s|--[^\n]*(\n|$)|/\*([^*]|\*+[^*/])*\*+/)')
    then
        raise exception using
            errcode = '0A000',
            message = 'a transaction with staged records or offsets cannot be prepared for two-phase commit',
            hint = 'Commit the transaction with COMMIT, or produce from a transaction of its own.';
    end if;
    perform pg_try_advisory_lock_shared(771903216, pg_backend_pid()),
        pg_try_advisory_xact_lock_shared(771903216, pg_backend_pid());
end
$$;

create or replace function sluice.door_may_be_early(p_context text, p_fired_at timestamptz) returns boolean
language sql stable
as $$
-- Whether a deferred trigger may run before its transaction commits. SET CONSTRAINTS runs it early. If the call stack
-- names SET CONSTRAINTS, or a function in language SQL, as what runs the trigger, it is certain: no such function can
-- commit. Otherwise the client's text names each SET CONSTRAINTS that it has, and a function may hide one. So within one
-- statement of the client, the trigger runs early at most as often. A further time is the commit. p_fired_at is a
-- microsecond later for each time after the first one.
    select p_context ~* E'^[^\n]*\n(SQL function|[^\n]*\\s*\\mset\\M(\\s*|[^\n]*)\\mconstraints\\M)'
        or (strpos(p_context, E'\n') > 0 or current_query() ~* 'constraints')
        and coalesce(p_fired_at, '-infinity') < statement_timestamp() + interval '1 microsecond' * (
            regexp_count(coalesce(current_query(), ''), E'\\mset\\M(\\s+constraints\\M|\\s*(--|/\\*))', 1, 'i')
                + (strpos(p_context, E'\n') > 0)::integer - 1
        )
$$;

create or replace function sluice.door_commit_records() returns trigger
language plpgsql security definer
set search_path = sluice, pg_temp
set standard_conforming_strings = on
as $$
-- Give the transaction its place among the others while it commits. It holds no lock that another transaction waits for.
-- The second condition is cheap, and true whenever one of the two careful ones may be.
declare
    context text;
begin
    if new.xid <> pg_current_xact_id()::text::bigint then
        return null; -- a replica of the table receives the row of a transaction on another server
    end if;
    get diagnostics context = pg_context;
    if strpos(context, E'\n') > 0 or current_query() ~* 'constraints|prepare' then
        if door_may_be_early(context, new.fired_at) then
            set constraints sluice.staged_record_commits deferred;
            update staged_record r
            set fired_at = greatest(r.fired_at + interval '1 microsecond', statement_timestamp())
            where r.xid = new.xid and r.position = new.position;
            return null;
        end if;
        perform door_refuse_prepare();
    end if;
    insert into staged_commit (xid) values (new.xid);
    if pg_sequence_last_value('sluice.staged_awake') is distinct from 2 then
        perform pg_notify('sluice_staged', '');
    end if;
    return null;
end
$$;

do $$
-- To create a trigger waits for every transaction that has written to the table, and those behind wait for it. So a node
-- that replaces the functions leaves the trigger alone.
begin
    if not exists (select from pg_trigger t where t.tgrelid = 'sluice.staged_record'::regclass and t.tgname = 'staged_record_commits') then
        create constraint trigger staged_record_commits
            after insert or update on sluice.staged_record
            deferrable initially deferred
            for each row when (new.arms)
            execute function sluice.door_commit_records();
        -- also in sessions that apply the changes of a publication, where a trigger of the user may produce
        alter table sluice.staged_record enable always trigger staged_record_commits;
    end if;
end
$$;
