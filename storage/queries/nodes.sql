-- name: register_node
-- The id for a process that starts under a name, calls the functions of the schema $5, uses the authorizer $7, and is a
-- broker ($8), a controller ($9) or both, reached as a controller at the listeners $10. If $6 is not null, it is the
-- wanted id: no row if another live process has it.
select node_id, incarnation
from register_node($1, $2::text::jsonb, $3, $4, $6, $5, $7, $8, $9, $10::text[])
where node_id is not null;

-- name: renew_node
-- Return whether the registration had run out, and how far the write-ahead log is on disk; no row if another process
-- superseded it. Renewals of other nodes that lie in the future, because the clock has been set back since, are
-- shortened.
with before as (
    select node_id, expires_at from node where node_id = $1 and incarnation = $2 for no key update
)
update node n
set expires_at = clock_timestamp() + $3::bigint * interval '1 millisecond', announced = $4, catalog_revision = $5,
    renewed_at = clock_timestamp(), registered_at = least(n.registered_at, clock_timestamp())
from before b
where n.node_id = b.node_id
returning
    b.expires_at <= clock_timestamp() as lapsed, (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint as flushed_lsn,
    (select history from cluster) as history, shorten_what_is_from_the_future(n.node_id) as shortened;

-- name: alive_nodes
-- Nodes whose registration has not run out, with all finalized levels of features and the time of this read.
select
    n.node_id, n.listeners, n.rack, n.incarnation, n.announced,
    (select coalesce(jsonb_object_agg(name, level), '{}') from finalized_feature)::text as levels,
    n.authorizer, n.is_broker, n.is_controller, n.controller_listeners,
    (extract(epoch from clock_timestamp()) * 1000)::bigint as read_ms
from node n
where n.expires_at > clock_timestamp()
order by n.node_id;

-- name: fenced_nodes
-- Brokers whose registration has run out and that have not been unregistered.
select n.node_id, n.listeners, n.rack, n.incarnation, n.announced
from node n
where n.expires_at <= clock_timestamp() and n.listeners <> '{}' and n.is_broker
order by n.node_id;

-- name: withdraw_node
-- End a registration, unless another one has replaced it.
select withdraw_node($1, $2);

-- name: unregister_node
-- Return whether the node was alive; no row if no node is registered under the id. Of a dead node only its incarnation
-- stays, which fences a process that was asleep during all this. Its name and its id are free.
with registered as materialized (
    select node_id, expires_at > clock_timestamp() as alive from node
    where node_id = $1 and listeners <> '{}'
    for update
), forgotten as (
    update node n
    set name = format('unregistered %s', n.node_id), listeners = '{}', rack = null, incarnation = n.incarnation + 1,
        expires_at = '-infinity'
    from registered r
    where n.node_id = r.node_id and not r.alive
)
select alive from registered;

-- name: acquire_leases
-- Acquire those of $4 that were free, and those of $5 that no node has held for $6 ms.
select kind, shard, node_id, lease_epoch from acquire_leases($1, $2, $3, $4, $5, $6, $7) order by shard;

-- name: renew_leases
-- Prolong leases, and return those that are still held.
select kind, shard, node_id, lease_epoch from renew_leases($1, $2, $3, $4, $5, $6) order by shard;

-- name: release_leases
-- Release the shards $4 of kind $3, so that the nodes $5 can take them at once.
select release_leases($1, $2, $3, $4, $5);

-- name: lease_owners
-- The node that holds each shard of a kind, of leases that have not run out.
select l.shard, n.node_id, n.listeners, n.rack, n.incarnation, n.announced
from coordinator_lease l
join node n on n.node_id = l.node_id and n.incarnation = l.incarnation
where l.kind = $1 and l.expires_at > clock_timestamp()
order by l.shard;

-- name: tell_followed
-- Listeners receive the name of an internal topic that a client reads.
with relaxed as materialized (
    select set_config('synchronous_commit', 'off', true)
)
select pg_notify('sluice_followed', $1) from relaxed;

-- name: ask_for_figures
-- Every node receives the question of a console.
with relaxed as materialized (
    select set_config('synchronous_commit', 'off', true)
)
select pg_notify('sluice_look', '') from relaxed;

-- name: tell_figures
-- Listeners receive the figures of a node.
with relaxed as materialized (
    select set_config('synchronous_commit', 'off', true)
)
select pg_notify('sluice_figures', $1) from relaxed;

-- name: announce
-- One notification per payload; listeners receive them once this has been committed. Postgres commits transactions that
-- notify one after the other, so none of them waits for the disk.
with relaxed as materialized (
    select set_config('synchronous_commit', 'off', true)
)
select pg_notify('sluice_append', payload) from relaxed, unnest($1::text[]) payload;


-- name: stand_for_node
-- As long as this session lives, other nodes see that the process that registered the node lives. The first key is an
-- arbitrary constant, as in `is_stood_for`.
select pg_advisory_lock_shared(771903214, $1::integer);

-- name: rival_nodes
-- Live nodes whose process lives, that have the name $1, the id $3 or an address of the listeners $2.
select n.node_id, n.listeners, n.rack, n.incarnation, n.announced
from node n
where n.expires_at > clock_timestamp()
    and (
        n.name = $1
        or n.node_id = $3
        or exists (
            select from jsonb_each(n.listeners) theirs, jsonb_each($2::text::jsonb) ours
            where theirs.value = ours.value
        )
    )
    and is_stood_for(n.node_id)
order by n.node_id;

-- name: node_reports
-- Live nodes: the shards of each kind that a node holds, and how far its catalog was behind at its last renewal.
select
    n.node_id, n.listeners, n.rack, n.incarnation, n.announced,
    (extract(epoch from clock_timestamp() - n.registered_at) * 1000)::bigint as registered_ms_ago,
    (
        select coalesce(jsonb_object_agg(held.kind, held.shards), '{}')::text
        from (
            select l.kind, count(*) as shards
            from coordinator_lease l
            where l.node_id = n.node_id and l.incarnation = n.incarnation and l.expires_at > clock_timestamp()
            group by l.kind
        ) held
    ) as leases,
    case when n.catalog_revision > 0 then greatest(c.revision - n.catalog_revision, 0) end as revision_lag,
    n.is_broker, n.is_controller, n.controller_listeners
from node n cross join cluster c
where n.expires_at > clock_timestamp()
order by n.node_id;

-- name: metadata_log
-- The committed revision. For each live node: the revision that it had reached at its last renewal (null: not reported),
-- the time of that renewal (Unix ms), and its epoch if it holds the lease of shard $2 of kind $1.
select
    n.node_id, n.listeners, n.rack, n.incarnation, n.announced, nullif(n.catalog_revision, 0) as node_revision,
    (extract(epoch from greatest(n.registered_at, n.renewed_at)) * 1000)::bigint as heard_ms,
    l.lease_epoch, c.revision, (extract(epoch from clock_timestamp()) * 1000)::bigint as read_ms,
    n.is_broker, n.is_controller, n.controller_listeners
from node n cross join cluster c
left join coordinator_lease l
    on l.kind = $1 and l.shard = $2 and l.expires_at > clock_timestamp()
    and l.node_id = n.node_id and l.incarnation = n.incarnation
where n.expires_at > clock_timestamp()
order by n.node_id;

-- name: finalize_features
-- Set the levels, and wake the nodes.
with finalized as (
    insert into finalized_feature (name, level)
    select unnest($1::text[]), unnest($2::smallint[])
    on conflict (name) do update set level = excluded.level
)
select pg_notify('sluice_nodes', 'features');
