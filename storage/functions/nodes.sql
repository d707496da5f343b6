-- Nodes and leases. Time is the database's clock. A writer under a lease locks its row FOR KEY SHARE until the write
-- has ended. A change of owner locks it FOR UPDATE and so comes after that write. A renewal changes no column of a key
-- and does not wait, however long the write takes.

create function is_stood_for(p_node_id integer) returns boolean
language sql stable
as $$
-- Return whether the process that registered the node lives: then it has a session that holds a lock
-- (`stand_for_node`).
    select exists (
        select from pg_locks l
        where l.locktype = 'advisory' and l.classid = 771903214 and l.objid = p_node_id::bigint::oid and l.objsubid = 2
            and l.database = (select d.oid from pg_database d where d.datname = current_database())
    )
$$;

create function register_node(
    p_name text, p_listeners jsonb, p_rack text, p_ttl_ms bigint, p_node_id integer, p_function_schema text,
    p_authorizer text, p_is_broker boolean, p_is_controller boolean, p_controller_listeners text[]
) returns node
language plpgsql volatile
as $$
-- Return the id `p_node_id`; null if another live process has it. If the caller wants no id (null), return the id that
-- this name had, or else the lowest id that no live node holds and no settings name.
declare
    chosen_id  integer := p_node_id;
    registered node;
begin
    lock table node in share row exclusive mode;
    if p_node_id is not null then
        perform 1 from node n
        where n.node_id = p_node_id and n.name <> p_name and n.expires_at > clock_timestamp() and is_stood_for(n.node_id);
        if found then
            return null;
        end if;
        -- The id that the name had becomes free, and a process that still uses it is fenced.
        update node n
        set name = format('unregistered %s', n.node_id), listeners = '{}', rack = null, incarnation = n.incarnation + 1,
            expires_at = '-infinity'
        where n.name = p_name and n.node_id <> p_node_id;
    else
        select n.node_id into chosen_id from node n where n.name = p_name;
        if chosen_id is null then
            select min(candidate) into chosen_id
            from generate_series(1, (select count(*) + 1 from node)) candidate
            where not exists (
                select from node taken
                where taken.node_id = candidate
                    and (taken.expires_at > clock_timestamp() or taken.is_given and taken.listeners <> '{}')
            );
        end if;
    end if;
    perform pg_notify('sluice_nodes', p_name);
    insert into node as n (
        node_id, name, listeners, rack, is_given, registered_at, expires_at, function_schema, authorizer, is_broker,
        is_controller, controller_listeners
    ) values (
        chosen_id, p_name, p_listeners, p_rack, p_node_id is not null, clock_timestamp(),
        clock_timestamp() + p_ttl_ms * interval '1 millisecond', p_function_schema, p_authorizer, p_is_broker,
        p_is_controller, p_controller_listeners
    )
    on conflict (node_id) do update set
        name = excluded.name, listeners = excluded.listeners, rack = excluded.rack, is_given = excluded.is_given,
        incarnation = n.incarnation + 1, announced = 0, catalog_revision = 0, registered_at = excluded.registered_at,
        expires_at = excluded.expires_at, function_schema = excluded.function_schema,
        authorizer = excluded.authorizer, is_broker = excluded.is_broker, is_controller = excluded.is_controller,
        controller_listeners = excluded.controller_listeners
    returning n.* into registered;
    return registered;
end
$$;

create function shorten_what_is_from_the_future(p_node_id integer) returns integer
language plpgsql volatile
as $$
-- The clock may be set back, for example by a failover to a server whose clock is behind. Then a registration or lease
-- of a dead node would last until the clock has caught up. So a renewal in the future is changed to a renewal now. Live
-- nodes renew soon; rows of dead ones expire after their usual time. Return how many registrations and leases were
-- changed. The caller renews its own rows itself. Rows that another process has locked are left to that process.
declare
    margin constant interval := '1 second';
    longest constant interval := '10 minutes';
    shortened integer;
    others integer;
begin
    with ages as (
        select l.kind, l.shard,
            coalesce(
                case when isfinite(n.expires_at) then n.expires_at - greatest(n.registered_at, n.renewed_at) end, longest
            ) as ttl
        from coordinator_lease l left join node n on n.node_id = l.node_id
        where l.node_id <> p_node_id and isfinite(l.expires_at)
    ), late as (
        select l.kind, l.shard, a.ttl from coordinator_lease l join ages a on a.kind = l.kind and a.shard = l.shard
        where l.expires_at > clock_timestamp() + a.ttl + margin
        for no key update of l skip locked
    )
    update coordinator_lease l set expires_at = clock_timestamp() + late.ttl
    from late where l.kind = late.kind and l.shard = late.shard;
    get diagnostics shortened = row_count;
    with late as (
        select n.node_id, n.expires_at - greatest(n.registered_at, n.renewed_at) as ttl from node n
        where n.node_id <> p_node_id and isfinite(n.expires_at)
            and greatest(n.registered_at, n.renewed_at) > clock_timestamp() + margin
        for no key update skip locked
    )
    update node n
    set expires_at = clock_timestamp() + late.ttl, renewed_at = clock_timestamp(),
        registered_at = least(n.registered_at, clock_timestamp())
    from late where n.node_id = late.node_id;
    get diagnostics others = row_count;
    return shortened + others;
end
$$;

create function acquire_leases(
    p_node_id integer, p_incarnation bigint, p_kind text, p_shards integer[], p_spare_shards integer[],
    p_grace_ms bigint, p_ttl_ms bigint
) returns setof coordinator_lease
language plpgsql volatile
set lock_timeout = '250ms'
as $$
-- Acquire those of `p_shards` that were free, expired or this node's own, and those of `p_spare_shards` (which belong
-- to other nodes) that no node has held for `p_grace_ms`. A lease that was handed over is reserved for its successor
-- for the same time. Return no row if another process has the registration. A former owner may have a write in
-- progress. The function waits a moment for it, and leaves a lease whose write takes longer to a later call, because
-- the caller must renew its other leases.
declare
    now_ constant timestamptz := clock_timestamp();
    grace constant interval := p_grace_ms * interval '1 millisecond';
    locked integer[];
begin
    perform 1 from node n where n.node_id = p_node_id and n.incarnation = p_incarnation for share;
    if not found then
        return;
    end if;
    insert into coordinator_lease (kind, shard, node_id, incarnation, lease_epoch, expires_at)
    select distinct p_kind, shard, 0, 0, 0, '-infinity'::timestamptz
    from unnest(p_shards || p_spare_shards) shard
    order by shard
    on conflict do nothing;
    begin
        perform 1 from coordinator_lease l
        where l.kind = p_kind and l.shard = any (p_shards || p_spare_shards)
            and (l.node_id = p_node_id or l.expires_at <= now_)
        order by l.shard for update;
    exception when lock_not_available then
        -- Release the row locks: no writer may have to wait for this call while this call waits for another writer.
        null;
    end;
    select coalesce(array_agg(free.shard), '{}') into locked
    from (
        select l.shard from coordinator_lease l
        where l.kind = p_kind and l.shard = any (p_shards || p_spare_shards)
            and (l.node_id = p_node_id or l.expires_at <= now_)
        order by l.shard for update skip locked
    ) free;
    return query
    update coordinator_lease l
    set node_id = p_node_id,
        incarnation = p_incarnation,
        lease_epoch = case
            when l.node_id = p_node_id and l.incarnation = p_incarnation then l.lease_epoch
            else l.lease_epoch + 1 end,
        expires_at = clock_timestamp() + p_ttl_ms * interval '1 millisecond',
        successor = null
    where l.kind = p_kind and l.shard = any (locked)
        and case
            when l.expires_at <= now_ - grace or l.successor = p_node_id then l.expires_at <= now_
            when l.successor is not null and l.expires_at <= now_ then false
            else l.node_id = p_node_id or l.expires_at <= now_ and l.shard = any (p_shards) end
    returning l.*;
end
$$;

create function release_leases(
    p_node_id integer, p_incarnation bigint, p_kind text, p_shards integer[], p_successors integer[]
) returns void
language plpgsql volatile
as $$
-- Release each lease to its successor (null: the node that should have it) at once. The epoch stays, and rises when a
-- node acquires the lease.
begin
    perform 1 from coordinator_lease l
    where l.kind = p_kind and l.shard = any (p_shards)
    order by l.shard for no key update;
    update coordinator_lease l
    set expires_at = clock_timestamp(), successor = given.successor
    from (select unnest(p_shards) as shard, unnest(p_successors) as successor) given
    where l.kind = p_kind and l.shard = given.shard and l.node_id = p_node_id and l.incarnation = p_incarnation;
    perform pg_notify('sluice_nodes', p_node_id::text);
end
$$;

create function withdraw_node(p_node_id integer, p_incarnation bigint) returns void
language plpgsql volatile
as $$
-- End a registration with its leases, unless another one has replaced it. A renewal that was sent earlier cannot revive
-- it.
begin
    update node set expires_at = clock_timestamp(), incarnation = incarnation + 1
    where node_id = p_node_id and incarnation = p_incarnation;
    perform 1 from coordinator_lease l
    where l.node_id = p_node_id and l.incarnation = p_incarnation
    order by l.kind, l.shard for no key update;
    update coordinator_lease l set expires_at = least(l.expires_at, clock_timestamp())
    where l.node_id = p_node_id and l.incarnation = p_incarnation;
    perform pg_notify('sluice_nodes', p_node_id::text);
end
$$;

create function renew_leases(
    p_node_id integer, p_incarnation bigint, p_kind text, p_shards integer[], p_lease_epochs integer[], p_ttl_ms bigint
) returns setof coordinator_lease
language plpgsql volatile
as $$
-- Leases that this node still holds, even if they have expired: until another node acquires one, its epoch fences no
-- writer.
begin
    perform 1 from coordinator_lease l
    where l.kind = p_kind and l.shard = any (p_shards)
    order by l.shard for no key update;
    return query
    update coordinator_lease l
    set expires_at = clock_timestamp() + p_ttl_ms * interval '1 millisecond', successor = null
    from (select unnest(p_shards) as shard, unnest(p_lease_epochs) as lease_epoch) held
    where l.kind = p_kind
        and l.shard = held.shard
        and l.lease_epoch = held.lease_epoch
        and l.node_id = p_node_id
        and l.incarnation = p_incarnation
    returning l.*;
end
$$;
