-- name: load_group
-- One row per member in order of joining; one row with null member_id for a group without members.
select
    g.group_id, g.state, g.state_timestamp_ms, g.protocol_type, g.protocol_name, g.generation_id, g.leader_id,
    m.member_id, m.group_instance_id, m.client_id, m.client_host, m.session_timeout_ms, m.rebalance_timeout_ms,
    m.protocol_names, m.protocol_metadata, m.assignment
from consumer_group g left join group_member m using (group_id)
where g.group_id = $1
order by m.position;

-- name: load_shard
-- The same for every group of a shard.
select
    g.group_id, g.state, g.state_timestamp_ms, g.protocol_type, g.protocol_name, g.generation_id, g.leader_id,
    m.member_id, m.group_instance_id, m.client_id, m.client_host, m.session_timeout_ms, m.rebalance_timeout_ms,
    m.protocol_names, m.protocol_metadata, m.assignment
from consumer_group g left join group_member m using (group_id)
where g.shard = $1
order by g.group_id, m.position;

-- name: list_groups
-- Every group of the cluster.
select group_id, protocol_type, state from consumer_group order by group_id;

-- name: save_group
-- False if the lease is not current; members that are gone are removed.
select save_group($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11);

-- name: save_member
-- Writes a member unless it is stored just so.
insert into group_member as m (
    group_id, member_id, position, group_instance_id, client_id, client_host, session_timeout_ms,
    rebalance_timeout_ms, protocol_names, protocol_metadata, assignment
) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
on conflict (group_id, member_id) do update set
    position             = excluded.position,
    group_instance_id    = excluded.group_instance_id,
    client_id            = excluded.client_id,
    client_host          = excluded.client_host,
    session_timeout_ms   = excluded.session_timeout_ms,
    rebalance_timeout_ms = excluded.rebalance_timeout_ms,
    protocol_names       = excluded.protocol_names,
    protocol_metadata    = excluded.protocol_metadata,
    assignment           = excluded.assignment
where (
    m.position, m.group_instance_id, m.client_id, m.client_host, m.session_timeout_ms, m.rebalance_timeout_ms,
    m.protocol_names, m.protocol_metadata, m.assignment
) is distinct from (
    excluded.position, excluded.group_instance_id, excluded.client_id, excluded.client_host,
    excluded.session_timeout_ms, excluded.rebalance_timeout_ms, excluded.protocol_names, excluded.protocol_metadata,
    excluded.assignment
);

-- name: delete_group
-- 'deleted', 'missing' or 'fenced'.
select delete_group($1, $2, $3, $4);
