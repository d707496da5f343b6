-- name: use_functions
-- A process of this release has begun.
insert into function_schema (name) values ($1) on conflict (name) do update set used_at = clock_timestamp();

-- name: note_function_schemas
-- Schemas of a release that did not record its use count as used now.
insert into function_schema (name)
select nspname from pg_namespace where nspname ~ '^sluice_[0-9a-f]{12}$'
on conflict (name) do nothing;

-- name: note_used_functions
-- Record the schemas that live nodes call: all of them, as long as the schema of any live node is unknown.
update function_schema f
set used_at = clock_timestamp()
where f.name = $1
    or exists (
        select from node n
        left join node_release r on r.node_id = n.node_id and r.incarnation = n.incarnation
        where n.expires_at > clock_timestamp() and (r.node_id is null or r.function_schema = f.name)
    );

-- name: unused_functions
-- Schemas that no node has called for $1 ms.
select name from function_schema
where used_at < clock_timestamp() - $1::bigint * interval '1 millisecond'
order by name;

-- name: forget_functions
-- The schema is gone.
delete from function_schema where name = $1;

-- name: forget_former_releases
-- Delete releases for which nothing needs to be written any more, even if another node dropped their functions.
delete from former_release f where not exists (select from pg_namespace n where n.nspname = f.function_schema);

-- name: forget_releases_without_transactions
-- Delete releases whose functions no node can call any more.
delete from release_without_transactions w
where not exists (select from pg_namespace n where n.nspname = w.function_schema);

-- name: forget_former_transaction_versions
-- Delete releases whose functions no node can call any more.
delete from former_transaction_version f
where not exists (select from pg_namespace n where n.nspname = f.function_schema);
