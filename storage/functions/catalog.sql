-- Changes of the catalog. Each locks the cluster row first, so versions become visible in the order they were given.

create function bump_catalog_version() returns void
language sql volatile as $$
    update cluster set catalog_version = catalog_version + 1
$$;

create function create_topic(p_name text, p_partition_count integer, p_configs jsonb, p_internal boolean)
returns uuid
language plpgsql volatile
as $$
-- The new topic's id, or null if a live topic has the name.
declare
    new_topic_id uuid;
begin
    perform bump_catalog_version();
    insert into topic (name, configs, internal) values (p_name, p_configs, p_internal)
    on conflict (name) where deleted_at is null do nothing
    returning topic_id into new_topic_id;
    if new_topic_id is not null then
        insert into partition (topic_id, partition_index)
        select new_topic_id, i from generate_series(0, p_partition_count - 1) i order by i;
    end if;
    return new_topic_id;
end
$$;

create function add_partitions(p_topic_id uuid, p_new_total integer) returns text
language plpgsql volatile
as $$
-- Null, or why not: 'unknown_topic', 'invalid_partitions' (the total does not grow).
declare
    present integer;
begin
    perform bump_catalog_version();
    perform 1 from topic where topic_id = p_topic_id and deleted_at is null for no key update;
    if not found then
        return 'unknown_topic';
    end if;
    select count(*) into present from partition where topic_id = p_topic_id;
    if p_new_total <= present then
        return 'invalid_partitions';
    end if;
    insert into partition (topic_id, partition_index)
    select p_topic_id, i from generate_series(present, p_new_total - 1) i order by i;
    return null;
end
$$;

create function delete_topic(p_topic_id uuid) returns boolean
language plpgsql volatile
as $$
-- Hides the topic, stops its log and drops its committed offsets; `purge` removes the rows of the log later. A commit
-- that is under way may leave an offset behind: readers see only offsets of live topics, and purge removes it.
begin
    perform bump_catalog_version();
    update topic set deleted_at = clock_timestamp() where topic_id = p_topic_id and deleted_at is null;
    if not found then
        return false;
    end if;
    perform 1 from partition p where p.topic_id = p_topic_id order by p.partition_key for no key update;
    update partition p set deleted = true where p.topic_id = p_topic_id;
    perform 1 from committed_offset o where o.topic_id = p_topic_id order by o.group_id, o.partition_index for update;
    delete from committed_offset o where o.topic_id = p_topic_id;
    return true;
end
$$;

create function register_node(p_name text, p_host text, p_port integer, p_rack text, p_ttl_ms bigint)
returns node
language plpgsql volatile
as $$
-- The id that this name had, else the lowest that no live node holds.
declare
    registered node;
begin
    lock table node in share row exclusive mode;
    update node n
    set host = p_host, port = p_port, rack = p_rack, incarnation = n.incarnation + 1,
        registered_at = clock_timestamp(), expires_at = clock_timestamp() + p_ttl_ms * interval '1 millisecond'
    where n.name = p_name
    returning n.* into registered;
    if found then
        return registered;
    end if;
    insert into node as n (node_id, name, host, port, rack, expires_at)
    select
        min(candidate), p_name, p_host, p_port, p_rack, clock_timestamp() + p_ttl_ms * interval '1 millisecond'
    from generate_series(1, (select count(*) + 1 from node)) candidate
    where not exists (
        select from node taken where taken.node_id = candidate and taken.expires_at > clock_timestamp()
    )
    on conflict (node_id) do update set
        name = excluded.name, host = excluded.host, port = excluded.port, rack = excluded.rack,
        incarnation = n.incarnation + 1, registered_at = excluded.registered_at, expires_at = excluded.expires_at
    returning n.* into registered;
    return registered;
end
$$;

create function acquire_leases(p_node_id integer, p_incarnation bigint, p_shards integer[], p_ttl_ms bigint)
returns setof coordinator_lease
language plpgsql volatile
as $$
-- Of the shards asked for, those that were free, expired or this node's own; null incarnation match returns nothing.
begin
    perform 1 from node n where n.node_id = p_node_id and n.incarnation = p_incarnation for share;
    if not found then
        return;
    end if;
    insert into coordinator_lease (shard, node_id, incarnation, lease_epoch, expires_at)
    select distinct shard, 0, 0, 0, '-infinity'::timestamptz from unnest(p_shards) shard order by shard
    on conflict (shard) do nothing;
    perform 1 from coordinator_lease l where l.shard = any (p_shards) order by l.shard for no key update;
    return query
    update coordinator_lease l
    set node_id = p_node_id,
        incarnation = p_incarnation,
        lease_epoch = case
            when l.node_id = p_node_id and l.incarnation = p_incarnation then l.lease_epoch
            else l.lease_epoch + 1 end,
        expires_at = clock_timestamp() + p_ttl_ms * interval '1 millisecond'
    where l.shard = any (p_shards) and (l.node_id = p_node_id or l.expires_at <= clock_timestamp())
    returning l.*;
end
$$;

create function renew_leases(
    p_node_id integer, p_incarnation bigint, p_shards integer[], p_lease_epochs integer[], p_ttl_ms bigint
) returns setof coordinator_lease
language plpgsql volatile
as $$
-- Those still held, even if the time had run out: until another owner comes, the epoch fences nobody out.
begin
    perform 1 from coordinator_lease l where l.shard = any (p_shards) order by l.shard for no key update;
    return query
    update coordinator_lease l
    set expires_at = clock_timestamp() + p_ttl_ms * interval '1 millisecond'
    from (select unnest(p_shards) as shard, unnest(p_lease_epochs) as lease_epoch) held
    where l.shard = held.shard
        and l.lease_epoch = held.lease_epoch
        and l.node_id = p_node_id
        and l.incarnation = p_incarnation
    returning l.*;
end
$$;
