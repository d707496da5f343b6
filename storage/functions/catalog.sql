-- Changes of the catalog. Each locks the cluster row first, so revisions become visible in the order in which they are
-- assigned.

create function next_revision() returns bigint
language plpgsql volatile
as $$
-- Return the next revision, for a change in this transaction. Nodes hear of it once the transaction has been committed.
declare
    new_revision bigint;
begin
    update cluster set revision = revision + 1 returning revision into new_revision;
    perform pg_notify('sluice_revision', new_revision::text);
    return new_revision;
end
$$;

create function integers(p_list jsonb) returns integer[]
language sql immutable
as $$
-- Return a JSON list as an array; null for null.
    select case when p_list is not null then array(select jsonb_array_elements_text(p_list)::integer) end
$$;

create function still_served(p_names text[], p_node_id integer) returns text[]
language sql volatile
as $$
-- Return those of the names under which another live broker than `p_node_id` (null: any live broker) may still serve
-- records of a deleted topic. A broker serves records from memory until its registration expires, and reports the
-- revision that it follows when it renews the registration. deletion.sql keeps the row of a deleted topic that long.
    select coalesce(array_agg(distinct d.name), '{}')
    from topic d
    where d.changed_revision > (
            select min(n.catalog_revision) from node n
            where n.is_broker and n.node_id is distinct from p_node_id and n.expires_at > clock_timestamp()
        )
        and d.deleted_at is not null and d.name = any (p_names)
        and not exists (select from topic t where t.name = d.name and t.deleted_at is null)
$$;

create function create_topics(
    p_node_id          integer, -- the node of the caller; null: none
    p_names            text[], -- distinct; per topic, as are the next four
    p_partition_counts integer[],
    p_configs          text[], -- JSON
    p_internal         boolean[],
    p_replicas         text[]  -- JSON: of each partition the nodes that are to lead it; null: the caller names none
) returns table (
    topic_id uuid, name text, internal boolean, configs text, created_revision bigint, changed_revision bigint,
    partition_keys bigint[], leader_epochs integer[], assignments text
)
language plpgsql volatile
as $$
-- Create topics, all of one revision, and return them. A topic whose name a live topic has is left out. Keys rise in
-- the order given. For a name that is still served (`still_served`), return a row without an id instead.
#variable_conflict use_column
declare
    served text[];
    this_revision bigint;
begin
    perform 1 from cluster for no key update; -- no topic is deleted between the look and the creation
    served := still_served(p_names, p_node_id);
    if served <> '{}' then
        perform pg_notify('sluice_nodes', p_node_id::text); -- nodes renew their registrations at once
        return query
        select
            null::uuid, name, null::boolean, null::text, null::bigint, null::bigint, null::bigint[], null::integer[],
            null::text
        from unnest(served) name;
    end if;
    if p_names <@ served then
        return;
    end if;
    this_revision := next_revision();
    return query
    with asked as (
        select a.name, a.partition_count, a.configs, a.internal, a.replicas::jsonb as replicas, a.position
        from unnest(p_names, p_partition_counts, p_configs, p_internal, p_replicas)
            with ordinality as a (name, partition_count, configs, internal, replicas, position)
    ),
    made as (
        insert into topic (name, configs, internal, created_revision, changed_revision)
        select a.name, a.configs::jsonb, a.internal, this_revision, this_revision
        from asked a
        where a.name <> all (served)
        on conflict (name) where deleted_at is null do nothing
        returning topic_id, name, internal, configs
    ),
    held as (
        insert into partition (topic_id, partition_index, created_revision, replicas)
        select m.topic_id, i, this_revision, integers(a.replicas -> i)
        from made m
        join asked a on a.name = m.name
        cross join lateral generate_series(0, a.partition_count - 1) i
        order by a.position, i
        returning topic_id, partition_index, partition_key, leader_epoch, leader, replicas
    )
    select
        m.topic_id, m.name, m.internal, m.configs::text, this_revision, this_revision,
        array_agg(h.partition_key order by h.partition_index),
        array_agg(h.leader_epoch order by h.partition_index),
        (jsonb_object_agg(h.partition_index, jsonb_build_array(h.leader, h.replicas))
            filter (where h.replicas is not null))::text
    from made m
    join held h on h.topic_id = m.topic_id
    group by m.topic_id, m.name, m.internal, m.configs;
end
$$;

create function add_partitions(p_topic_id uuid, p_new_total integer, p_replicas jsonb) returns text
language plpgsql volatile
as $$
-- `p_replicas`: for each new partition the nodes that should lead it; null: the caller names none. Return null, or the
-- reason for a refusal: 'unknown_topic', 'invalid_partitions' (the total does not grow).
declare
    present integer;
    this_revision constant bigint := next_revision();
begin
    perform 1 from topic where topic_id = p_topic_id and deleted_at is null for no key update;
    if not found then
        return 'unknown_topic';
    end if;
    select count(*) into present from partition where topic_id = p_topic_id;
    if p_new_total <= present then
        return 'invalid_partitions';
    end if;
    if jsonb_array_length(p_replicas) <> p_new_total - present then
        -- The replicas were named for another number of new partitions: another caller has added partitions
        -- concurrently.
        return 'invalid_partitions';
    end if;
    insert into partition (topic_id, partition_index, created_revision, replicas)
    select p_topic_id, i, this_revision, integers(p_replicas -> (i - present))
    from generate_series(present, p_new_total - 1) i order by i;
    update topic set changed_revision = this_revision where topic_id = p_topic_id;
    return null;
end
$$;

create function assign_replicas(
    p_topic_ids uuid[], p_partition_indexes integer[], p_leaders integer[],
    p_replicas text[]  -- JSON; null: they stay
) returns setof uuid
language plpgsql volatile
as $$
-- Set the nodes that should lead the partitions, each partition given once; return the topics of those that exist. Rows
-- are locked in the order of their keys, as by appends.
declare
    this_revision constant bigint := next_revision();
begin
    perform 1 from topic t
    where t.topic_id = any (p_topic_ids) and t.deleted_at is null
    order by t.topic_id for no key update;
    perform 1
    from partition p
    join unnest(p_topic_ids, p_partition_indexes) given (topic_id, partition_index) using (topic_id, partition_index)
    order by p.partition_key for no key update of p;
    return query
    with placed as (
        update partition p
        set replicas = coalesce(integers(given.replicas::jsonb), p.replicas), leader = given.leader
        from unnest(p_topic_ids, p_partition_indexes, p_leaders, p_replicas)
            given (topic_id, partition_index, leader, replicas)
        where p.topic_id = given.topic_id and p.partition_index = given.partition_index
        returning p.topic_id
    )
    update topic t set changed_revision = this_revision
    from (select distinct topic_id from placed) changed
    where t.topic_id = changed.topic_id and t.deleted_at is null
    returning t.topic_id;
end
$$;

create function delete_topic(p_topic_id uuid) returns boolean
language plpgsql volatile
as $$
-- The first phase of a deletion, whose cost does not depend on the topic's size. It hides the topic and closes
-- its log, because appends and offset commits look at this row. deletion.sql has the second phase.
declare
    this_revision constant bigint := next_revision();
begin
    update topic set deleted_at = clock_timestamp(), changed_revision = this_revision
    where topic_id = p_topic_id and deleted_at is null;
    return found;
end
$$;

create function set_topic_configs(p_topic_id uuid, p_configs jsonb, p_unset text[]) returns void
language plpgsql volatile
as $$
-- Remove the keys `p_unset`, then set those of `p_configs`.
declare
    this_revision constant bigint := next_revision();
begin
    update topic
    set configs = (configs - p_unset) || p_configs, changed_revision = this_revision
    where topic_id = p_topic_id and deleted_at is null;
end
$$;

create function set_broker_configs(p_broker text, p_names text[], p_values text[], p_unset text[]) returns void
language plpgsql volatile
as $$
-- Remove `p_unset`, then set `p_names`: on one broker, or on all (the empty name).
declare
    this_revision constant bigint := next_revision();
begin
    update cluster set broker_configs_revision = this_revision;
    delete from broker_config where broker = p_broker and name = any (p_unset);
    insert into broker_config (broker, name, value)
    select p_broker, unnest(p_names), unnest(p_values)
    on conflict (broker, name) do update set value = excluded.value;
end
$$;

create function set_group_configs(p_group_id text, p_names text[], p_values text[], p_unset text[]) returns void
language plpgsql volatile
as $$
-- Remove `p_unset`, then set `p_names`, of one group.
declare
    this_revision constant bigint := next_revision();
begin
    update cluster set group_configs_revision = this_revision;
    delete from group_config where group_id = p_group_id and name = any (p_unset);
    insert into group_config (group_id, name, value)
    select p_group_id, unnest(p_names), unnest(p_values)
    on conflict (group_id, name) do update set value = excluded.value;
end
$$;

create function set_client_quotas(
    p_user_names text[], p_client_ids text[], p_addresses text[], p_names text[],
    p_values double precision[] -- null: taken away
) returns void
language plpgsql volatile
as $$
declare
    this_revision constant bigint := next_revision();
begin
    update cluster set client_quotas_revision = this_revision;
    delete from client_quota q
    using unnest(p_user_names, p_client_ids, p_addresses, p_names, p_values)
        changed (user_name, client_id, address, name, value)
    where changed.value is null
        and q.user_name = changed.user_name and q.client_id = changed.client_id and q.address = changed.address
        and q.name = changed.name;
    insert into client_quota (user_name, client_id, address, name, value)
    select changed.user_name, changed.client_id, changed.address, changed.name, changed.value
    from unnest(p_user_names, p_client_ids, p_addresses, p_names, p_values)
        changed (user_name, client_id, address, name, value)
    where changed.value is not null
    on conflict (user_name, client_id, address, name) do update set value = excluded.value;
end
$$;

create function create_acls(
    p_keys bytea[], p_resource_types smallint[], p_pattern_types smallint[], p_resource_names text[], p_principals text[],
    p_hosts text[], p_operations smallint[], p_permissions smallint[]
) returns void
language plpgsql volatile
as $$
-- Create ACLs; existing ones stay.
declare
    this_revision constant bigint := next_revision();
begin
    update cluster set acls_revision = this_revision;
    insert into acl (acl_key, resource_type, pattern_type, resource_name, principal, host, operation, permission)
    select * from unnest(
        p_keys, p_resource_types, p_pattern_types, p_resource_names, p_principals, p_hosts, p_operations, p_permissions
    )
    on conflict do nothing;
end
$$;

create function delete_acls(p_keys bytea[]) returns setof bytea
language plpgsql volatile
as $$
-- Delete ACLs; return the keys of those that existed.
declare
    this_revision constant bigint := next_revision();
begin
    update cluster set acls_revision = this_revision;
    return query delete from acl a where a.acl_key = any (p_keys) returning a.acl_key;
end
$$;

create function catalog_changes(p_since bigint)
returns table (
    revision bigint, broker_configs text, group_configs text, client_quotas text, acls_changed boolean, whole boolean, topic_id uuid, name text, internal boolean, configs text,
    created_revision bigint, changed_revision bigint, deleted boolean, partition_keys bigint[],
    leader_epochs integer[], assignments text
)
language sql stable
as $$
-- Return the present revision with the changes since `p_since`, in one snapshot: topics in the order of their changes
-- (and of their names, if one change created several), deleted ones without partitions, and changed settings by broker
-- and group and changed quotas. If no topic has changed, one row with null topic_id. `whole` is true if the rows are
-- all live topics. That is necessary if a deletion since `p_since` may have left no row.
    with since as (
        select
            c.revision, c.broker_configs_revision, c.group_configs_revision, c.client_quotas_revision,
            c.acls_revision,
            p_since < c.purged_revision or p_since <= 0 as whole,
            case when p_since < c.purged_revision then 0 else p_since end as revision_known
        from cluster c
    )
    select
        s.revision,
        case when s.broker_configs_revision > s.revision_known then
            (
                select coalesce(jsonb_object_agg(b.broker, b.configs), '{}')::text
                from (select broker, jsonb_object_agg(name, value) as configs from broker_config group by broker) b
            ) end,
        case when s.group_configs_revision > s.revision_known then
            (select coalesce(jsonb_agg(jsonb_build_array(g.group_id, g.name, g.value)), '[]')::text
            from group_config g) end,
        case when s.client_quotas_revision > s.revision_known then
            (select coalesce(jsonb_agg(jsonb_build_array(q.user_name, q.client_id, q.address, q.name, q.value)), '[]')::text
            from client_quota q) end,
        s.acls_revision > s.revision_known,
        s.whole, t.topic_id, t.name, t.internal, t.configs::text, t.created_revision, t.changed_revision,
        t.deleted_at is not null, p.partition_keys, p.leader_epochs, p.assignments
    from since s
    left join topic t
        on t.changed_revision > s.revision_known and (t.deleted_at is null or not s.whole)
    left join lateral (
        select
            array_agg(p.partition_key order by p.partition_index) as partition_keys,
            array_agg(p.leader_epoch order by p.partition_index) as leader_epochs,
            (jsonb_object_agg(p.partition_index, jsonb_build_array(p.leader, p.replicas))
                filter (where p.replicas is not null))::text as assignments
        from partition p
        where p.topic_id = t.topic_id and t.deleted_at is null
    ) p on true
    order by t.changed_revision, t.name
$$;
