-- name: sql_door
-- The public schema that is installed. Without one there is no row.
select d.schema_name, d.version, d.digest from sql_door d;

-- name: save_sql_door
-- Note that the public schema has been installed.
insert into sql_door (schema_name, version, digest) values ($1, $2, $3)
on conflict (singleton) do update set
    schema_name = excluded.schema_name, version = excluded.version, digest = excluded.digest;

-- name: renumber_restored
-- Make the numbers of transactions negative that had them on another server, from which a backup was restored. A visible
-- row of this server has a lower number than each transaction to come. A new transaction with the number of a restored
-- one would get no place of its own.
with ahead as (
    select pg_snapshot_xmax(pg_current_snapshot())::text::bigint as xid
),
places as (
    update staged_commit c set xid = -c.xid from ahead a where c.xid >= a.xid
)
update staged_record r set xid = -r.xid from ahead a where r.xid >= a.xid;

-- name: is_sql_door
-- Return whether the schema has this role's functions of the SQL door, perhaps those of another release.
select exists (
    select from pg_proc p join pg_roles r on r.oid = p.proowner
    where p.pronamespace = $1::text::regnamespace and p.proname = 'capture_row' and r.rolname = current_user
);

-- name: sql_door_roles_lack_rights
-- Return whether a role of the schema exists that has no rights in it, for example because it was created later.
select exists (
    select from pg_roles r
    where r.rolname in ($1::text || '_writer', $1::text || '_reader') and not has_schema_privilege(r.oid, $1::text, 'usage')
);

-- name: same_views
-- Return whether both views exist and have the same definition.
select coalesce(pg_get_viewdef(to_regclass($1::text)) = pg_get_viewdef(to_regclass($2::text)), false);

-- name: sql_door_settings
-- The brokers' settings that the public functions apply.
select
    d.max_message_bytes, d.compacts, d.auto_create, d.authorizer, d.allow_if_no_acl, d.super_users, d.log_append_time,
    d.timestamp_before_max_ms, d.timestamp_after_max_ms
from sql_door d;

-- name: save_sql_door_settings
-- Store the brokers' settings that the public functions apply. Unchanged settings write nothing.
update sql_door d
set max_message_bytes = $1, compacts = $2, auto_create = $3, authorizer = $4, allow_if_no_acl = $5, super_users = $6,
    log_append_time = $7, timestamp_before_max_ms = $8, timestamp_after_max_ms = $9
where (
    d.max_message_bytes, d.compacts, d.auto_create, d.authorizer, d.allow_if_no_acl, d.super_users, d.log_append_time,
    d.timestamp_before_max_ms, d.timestamp_after_max_ms
) is distinct from (
    $1::bigint, $2::boolean, $3::boolean, $4::boolean, $5::boolean, $6::text[], $7::boolean, $8::bigint, $9::bigint
);

-- name: try_own_staged
-- Return whether this session relays staged records from now on. The lock ends with the session.
select pg_try_advisory_lock(771903215, 0);

-- name: foreign_staged_owner
-- A session that holds the relay's lock and belongs to no node. Its role may not even be allowed to delete staged
-- records.
select a.pid, a.usename::text as role
from pg_locks l
join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'advisory' and l.classid = 771903215 and l.objid = 0 and l.objsubid = 2 and l.granted
    and l.database = (select d.oid from pg_database d where d.datname = current_database())
    and not has_table_privilege(a.usesysid, 'staged_record', 'delete')
limit 1;

-- name: set_staged_awake
-- Tells committing transactions whether the relay polls (2) or waits to be notified (1).
select setval('staged_awake', $1::bigint);

-- name: staged_commits
-- Transactions of $2 that have committed since, and at most $3 transactions behind $1, in the order of their commits.
-- Each has the size of its staged records, and whether a topic may have to be created. At most $4 + 1 records of a
-- transaction are counted, so that a very large one takes no longer. `snapshot` is the statement's own, as text, which
-- costs less than an array. Without any such transaction there is one row, whose seq is null. Two branches, because the
-- index serves no "or".
select
    s.snapshot::text as snapshot, found.seq, found.xid, found.record_count, found.size_bytes, found.creates
from (select pg_current_snapshot() as snapshot) s
left join (
    select c.seq, c.xid, sized.record_count, sized.size_bytes, sized.creates
    from (
        (select c.seq, c.xid from staged_commit c where c.seq = any ($2::bigint[]))
        union all
        (select c.seq, c.xid from staged_commit c where c.seq > $1 order by c.seq limit $3)
    ) c
    cross join lateral (
        select
            count(*) as record_count,
            coalesce(sum(
                coalesce(octet_length(r.key), 0) + coalesce(octet_length(r.value), 0)
                + coalesce(r.header_bytes, octet_length(r.headers::text), 0) + 100
            ), 0)::bigint as size_bytes,
            coalesce(bool_or(r.topic_id is null), false) as creates
        from (select * from staged_record r where r.xid = c.xid limit $4 + 1) r
    ) sized
) found on true
order by found.seq;

-- name: staged_new_topics
-- Topics that did not exist when the transactions $1 staged records for them. $2 records of each transaction are looked at.
select distinct x.xid, r.topic
from unnest($1::bigint[]) x (xid)
cross join lateral (select s.topic_id, s.topic from staged_record s where s.xid = x.xid limit $2) r
where r.topic_id is null;

-- name: staged_records
-- The records of the transactions $1, in the order of each transaction. Postgres writes the headers as text, because a
-- parser in a node could refuse a number or a depth that Postgres accepts.
select
    r.xid, r.position, r.topic_id, r.topic, r.partition_index, r.key, r.value, r.timestamp_ms,
    case when r.headers is not null then array(select h.key from jsonb_each_text(r.headers) h) end as header_names,
    case when r.headers is not null then array(select h.value from jsonb_each_text(r.headers) h) end as header_values
from staged_record r where r.xid = any ($1::bigint[]) order by r.xid, r.position;

-- name: take_staged
-- Delete the records of the transactions $1, whose places are $2 and whose records are $3.
select take_staged($1, $2, $3);

-- name: append_staged
-- As take_staged, and append the batches that were built of the records, as append_chunks does. It is one statement, so
-- that its transaction needs no further round trips to begin and end.
select decided.*
from take_staged($1, $2, $3)
cross join append_chunks(
    $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20
) decided;

-- name: take_staged_piece
-- Delete the next records of the transaction $1 behind the position $2, and return them in their order. There are at
-- most $3 records. The last record is the one that completes $4 bytes.
with sized as (
    select n.position, sum(n.bytes) over (order by n.position) - n.bytes as bytes_before
    from (
        select
            r.position,
            coalesce(octet_length(r.key), 0) + coalesce(octet_length(r.value), 0)
                + coalesce(r.header_bytes, octet_length(r.headers::text), 0) + 100 as bytes
        from staged_record r where r.xid = $1 and r.position > $2 order by r.position limit $3
    ) n
),
taken as (
    -- This uses a range and no join. With statistics of an empty table, the planner would compare each record with
    -- every other.
    delete from staged_record r
    where r.xid = $1 and r.position > $2
        and r.position <= (select max(s.position) from sized s where s.bytes_before < $4)
    returning r.*
)
select
    r.xid, r.position, r.topic_id, r.topic, r.partition_index, r.key, r.value, r.timestamp_ms,
    case when r.headers is not null then array(select h.key from jsonb_each_text(r.headers) h) end as header_names,
    case when r.headers is not null then array(select h.value from jsonb_each_text(r.headers) h) end as header_values
from taken r order by r.position;

-- name: inline_slot
-- The slot that takes new inline bytes.
select r.current_slot from inline_rotation r;

-- name: inline_positions
-- Positions of $1 new rows of inline bytes, ascending.
select array(select nextval('inline_position') from generate_series(1, $1::integer)) as positions;

-- name: append_written
-- As append_chunks, for bytes that lie inline already, in the slot $18.
select * from append_chunks($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18);

-- name: place_written
-- Name the chunks that bytes in slot $1 at the positions $2 belong to, by their base offsets $3.
select place_written($1, $2, $3);

-- name: delete_staged_place
-- Delete a transaction's place and return it.
delete from staged_commit c where c.seq = $1 returning c.seq;

-- name: last_staged_place
-- The last place that any transaction has drawn.
select coalesce(pg_sequence_last_value('sluice.staged_commit_seq'), 0) as last_seq;

-- name: next_xid
-- A number greater than that of every transaction that has begun.
select pg_current_xact_id()::text::bigint as xid;
