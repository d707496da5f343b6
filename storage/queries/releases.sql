-- name: use_functions
-- Note that a process of this release has started.
insert into function_schema (name) values ($1) on conflict (name) do update set used_at = clock_timestamp();

-- name: note_used_functions
-- Record the schema that this node calls ($1) and those that live nodes call.
update function_schema f
set used_at = clock_timestamp()
where f.name = $1
    or exists (
        select from node n where n.expires_at > clock_timestamp() and n.function_schema = f.name
    );

-- name: unused_functions
-- Schemas that no node has called for $1 ms.
select name from function_schema
where used_at < clock_timestamp() - $1::bigint * interval '1 millisecond'
order by name;

-- name: forget_functions
-- Forget a schema that was dropped.
delete from function_schema where name = $1;
