-- name: register_node
-- The id for a process that starts under a name.
select node_id, incarnation from register_node($1, $2::text::jsonb, $3, $4);

-- name: renew_node
-- No row if the registration has been superseded.
update node set expires_at = clock_timestamp() + $3::bigint * interval '1 millisecond'
where node_id = $1 and incarnation = $2
returning node_id;

-- name: alive_nodes
-- Nodes whose registration has not run out.
select node_id, listeners, rack from node where expires_at > clock_timestamp() order by node_id;

-- name: withdraw_node
-- Ends a registration, unless it has been superseded.
update node set expires_at = clock_timestamp() where node_id = $1 and incarnation = $2;

-- name: acquire_leases
-- Those of $4 that were free, expired or this node's own.
select kind, shard, node_id, lease_epoch from acquire_leases($1, $2, $3, $4, $5) order by shard;

-- name: renew_leases
-- Those still held.
select kind, shard, node_id, lease_epoch from renew_leases($1, $2, $3, $4, $5, $6) order by shard;

-- name: release_leases
-- Lets other nodes take them at once; the epoch stays, and rises when one does.
update coordinator_lease l
set expires_at = clock_timestamp()
from (
    select kind, shard from coordinator_lease
    where node_id = $1 and incarnation = $2
    order by kind, shard for no key update
) own
where l.kind = own.kind and l.shard = own.shard;

-- name: lease_owners
-- Who holds each shard of a kind, of leases that have not run out.
select l.shard, n.node_id, n.listeners, n.rack
from coordinator_lease l
join node n on n.node_id = l.node_id and n.incarnation = l.incarnation
where l.kind = $1 and l.expires_at > clock_timestamp()
order by l.shard;
