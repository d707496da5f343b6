-- name: lock_deletion_shared
-- Held by a backup as long as its connection lives; no segment is deleted during that time.
select pg_advisory_lock_shared(5492300417);

-- name: try_lock_deletion
-- Return whether this transaction may delete segments: not while a backup runs.
select pg_try_advisory_xact_lock(5492300417);

-- name: hold_inline
-- TRUNCATE ignores snapshots, so the backup holds it off by the lock of a reader.
lock table inline_records in access share mode;

-- name: export_snapshot
-- Export the snapshot, so that pg_dump reads the same state.
select pg_export_snapshot();

-- name: captured_tables
-- Return a user's tables among the nodes' own whose triggers call functions of another schema, such as kafka. A restore
-- does not have that schema.
select c.relname
from pg_trigger t
join pg_class c on c.oid = t.tgrelid
join pg_proc p on p.oid = t.tgfoid
where not t.tgisinternal and c.relnamespace = $1::text::regnamespace and p.pronamespace <> c.relnamespace
group by c.relname
order by c.relname;

-- name: leave_log_store
-- After a restore: the original's store is not the copy's, even if the restore ends here. psql has no search path there.
update sluice.log_store set store_id = gen_random_uuid();

-- name: forget_log_store
-- After a restore without a store: all bytes are inline. psql has no search path there.
delete from sluice.log_store;

-- name: change_log_store
-- Give a restored database a store of its own; no row if all its bytes are inline.
update log_store set store_id = $1, location = $2 returning store_id;

-- name: objects_in_use
-- Objects that hold chunks, each with the position after its last chunk and the time of its creation in microseconds.
select c.object_id, c.end_position, coalesce((extract(epoch from o.created_at) * 1000000)::bigint, 0) as created_us
from (
    select object_id, max(position + size_bytes) as end_position
    from chunk
    where object_id is not null
    group by object_id
) c
left join log_object o on o.object_id = c.object_id
order by c.object_id;

-- name: end_delegation_tokens
-- After a restore: a token that was ended since the backup must not come back. psql has no search path there.
delete from sluice.delegation_token;

-- name: change_scram_secret
-- After a restore: nodes of the original must not take the copy's nodes for their own. psql has no search path there.
update sluice.cluster set scram_secret = sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()));
