-- Writes of the group coordinator, each fenced by its lease in the transaction that writes.

create function lease_is_current(p_shard integer, p_node_id integer, p_lease_epoch integer) returns boolean
language plpgsql volatile
as $$
-- Holds the lease still, so that a change of owner waits until this transaction has ended.
begin
    perform 1 from coordinator_lease l
    where l.shard = p_shard and l.node_id = p_node_id and l.lease_epoch = p_lease_epoch
    for share;
    return found;
end
$$;

create function commit_offsets(
    p_shards               integer[], -- per fence: distinct (lease, group, generation)
    p_node_ids             integer[],
    p_lease_epochs         integer[],
    p_group_ids            text[],
    p_generation_ids       integer[],
    p_fence_positions      integer[], -- per commit: position of its fence
    p_topic_ids            uuid[],    -- per commit, as are the rest
    p_partition_indexes    integer[],
    p_committed_offsets    bigint[],
    p_leader_epochs        integer[],
    p_metadata             text[],
    p_commit_timestamps_ms bigint[],
    p_expire_timestamps_ms bigint[],
    out refusals           text[]
)
language plpgsql volatile
as $$
-- Locks leases and groups against change, decides each commit, writes those that stand; of several accepted commits of
-- one partition the last wins. Group rows are locked in share mode: commits of one group do not wait for each other,
-- while a new generation waits for the commits of the old one, and a commit that comes after it is refused.
declare
    verdicts text[];
begin
    perform 1 from coordinator_lease l where l.shard = any (p_shards) order by l.shard for share;

    insert into consumer_group (group_id, shard, state, state_timestamp_ms, generation_id)
    select fence.group_id, fence.shard, 'Empty', p_commit_timestamps_ms[1], 0
    from (
        select
            unnest(p_group_ids) as group_id, unnest(p_shards) as shard, unnest(p_node_ids) as node_id,
            unnest(p_lease_epochs) as lease_epoch, unnest(p_generation_ids) as generation_id
    ) fence
    join coordinator_lease l using (shard, node_id, lease_epoch)
    where fence.generation_id < 0
        and not exists (select from consumer_group g where g.group_id = fence.group_id)
    order by fence.group_id
    on conflict (group_id) do nothing;

    perform 1 from consumer_group g where g.group_id = any (p_group_ids) order by g.group_id for share;

    select array_agg(
        case
            when l.shard is null then 'not_coordinator'
            when g.group_id is null then 'illegal_generation'
            when fence.generation_id < 0 then
                case when exists (select from group_member m where m.group_id = fence.group_id)
                    then 'illegal_generation' end
            when fence.generation_id <> g.generation_id then 'illegal_generation'
        end
        order by fence.position
    )
    into verdicts
    from (
        select
            unnest(p_group_ids) as group_id, unnest(p_shards) as shard, unnest(p_node_ids) as node_id,
            unnest(p_lease_epochs) as lease_epoch, unnest(p_generation_ids) as generation_id,
            generate_series(1, cardinality(p_group_ids)) as position
    ) fence
    left join coordinator_lease l using (shard, node_id, lease_epoch)
    left join consumer_group g on g.group_id = fence.group_id;

    select array_agg(
        coalesce(
            verdicts[wanted.fence_position],
            case when p.partition_key is not null then null
                when exists (select from topic t where t.topic_id = wanted.topic_id and t.deleted_at is null)
                    then 'unknown_partition'
                else 'unknown_topic' end
        )
        order by wanted.position
    )
    into refusals
    from (
        select
            unnest(p_fence_positions) as fence_position, unnest(p_topic_ids) as topic_id,
            unnest(p_partition_indexes) as partition_index,
            generate_series(1, cardinality(p_topic_ids)) as position
    ) wanted
    left join partition p
        on p.topic_id = wanted.topic_id and p.partition_index = wanted.partition_index and not p.deleted;

    insert into committed_offset as o (
        group_id, topic_id, partition_index, committed_offset, leader_epoch, metadata,
        commit_timestamp_ms, expire_timestamp_ms
    )
    select distinct on (1, 2, 3)
        p_group_ids[accepted.fence_position], accepted.topic_id, accepted.partition_index,
        accepted.committed_offset, accepted.leader_epoch, accepted.metadata,
        accepted.commit_timestamp_ms, accepted.expire_timestamp_ms
    from (
        select
            unnest(refusals) as refusal, unnest(p_fence_positions) as fence_position, unnest(p_topic_ids) as topic_id,
            unnest(p_partition_indexes) as partition_index, unnest(p_committed_offsets) as committed_offset,
            unnest(p_leader_epochs) as leader_epoch, unnest(p_metadata) as metadata,
            unnest(p_commit_timestamps_ms) as commit_timestamp_ms,
            unnest(p_expire_timestamps_ms) as expire_timestamp_ms,
            generate_series(1, cardinality(p_topic_ids)) as position
    ) accepted
    where accepted.refusal is null
    order by 1, 2, 3, accepted.position desc
    on conflict (group_id, topic_id, partition_index) do update set
        committed_offset    = excluded.committed_offset,
        leader_epoch        = excluded.leader_epoch,
        metadata            = excluded.metadata,
        commit_timestamp_ms = excluded.commit_timestamp_ms,
        expire_timestamp_ms = excluded.expire_timestamp_ms;
end
$$;

create function delete_group(p_group_id text, p_shard integer, p_node_id integer, p_lease_epoch integer)
returns text
language plpgsql volatile
as $$
-- 'deleted', 'missing', or 'fenced' if the lease is not current. Offsets go with the group.
begin
    if not lease_is_current(p_shard, p_node_id, p_lease_epoch) then
        return 'fenced';
    end if;
    perform 1 from consumer_group g where g.group_id = p_group_id for update;
    if not found then
        return 'missing';
    end if;
    delete from committed_offset o where o.group_id = p_group_id;
    delete from group_member m where m.group_id = p_group_id;
    delete from consumer_group g where g.group_id = p_group_id;
    return 'deleted';
end
$$;

create function expirable_offsets(
    p_shard             integer,
    p_now_ms            bigint,
    p_retention_ms      bigint,
    p_settled_groups    text[], -- Stable groups of type "consumer" whose subscriptions are known
    p_subscriptions     text[], -- their subscriptions, as group_id || '/' || topic name
    p_unsettled_groups  text[]  -- groups that nothing may expire of: rebalancing, or of another type
) returns table (group_id text, topic_id uuid, partition_index integer)
language sql stable
as $$
-- An explicit expire timestamp wins; else an offset expires retention_ms after its base: the change of state for an
-- Empty group that had members, the commit for a simple group, the commit for a topic that a settled group does not
-- subscribe to. What has no base stays.
    select o.group_id, o.topic_id, o.partition_index
    from consumer_group g
    join committed_offset o using (group_id)
    join topic t using (topic_id)
    cross join lateral (
        select case
            when g.group_id = any (p_unsettled_groups) then null
            when g.group_id = any (p_settled_groups) then
                case when g.group_id || '/' || t.name = any (p_subscriptions) then null else o.commit_timestamp_ms end
            when g.state <> 'Empty' then null
            when g.protocol_type is null then o.commit_timestamp_ms
            else g.state_timestamp_ms
        end as base_ms
    ) since
    where g.shard = p_shard
        and since.base_ms is not null
        and coalesce(o.expire_timestamp_ms, since.base_ms + p_retention_ms) <= p_now_ms
$$;

create function expire_offsets(
    p_shard             integer,
    p_node_id           integer,
    p_lease_epoch       integer,
    p_retention_ms      bigint,
    p_settled_groups    text[],
    p_subscriptions     text[],
    p_unsettled_groups  text[],
    p_group_limit       integer,
    p_offset_limit      integer,
    out fenced           boolean,
    out expired_offsets  integer,
    out deleted_groups   text[]
)
language plpgsql volatile
as $$
-- One bounded pass over a shard. Groups are locked before their offsets are judged, so that no commit slips between;
-- those that a commit holds at this moment wait for the next pass. Empty groups left without offsets are deleted.
declare
    now_ms constant bigint := (extract(epoch from clock_timestamp()) * 1000)::bigint;
    locked_groups text[];
begin
    expired_offsets := 0;
    deleted_groups := '{}';
    fenced := not lease_is_current(p_shard, p_node_id, p_lease_epoch);
    if fenced then
        return;
    end if;

    select coalesce(array_agg(locked.group_id), '{}') into locked_groups
    from (
        select g.group_id
        from consumer_group g
        where g.shard = p_shard
            and (
                g.group_id in (
                    select e.group_id
                    from expirable_offsets(
                        p_shard, now_ms, p_retention_ms, p_settled_groups, p_subscriptions, p_unsettled_groups
                    ) e
                )
                or (
                    g.state = 'Empty'
                    and g.group_id <> all (p_unsettled_groups || p_settled_groups)
                    and not exists (select from committed_offset o where o.group_id = g.group_id)
                )
            )
        order by g.group_id
        limit p_group_limit
        for update skip locked
    ) locked;

    delete from committed_offset o
    using (
        select e.*
        from expirable_offsets(
            p_shard, now_ms, p_retention_ms, p_settled_groups, p_subscriptions, p_unsettled_groups
        ) e
        where e.group_id = any (locked_groups)
        order by e.group_id, e.topic_id, e.partition_index
        limit p_offset_limit
    ) expired
    where o.group_id = expired.group_id
        and o.topic_id = expired.topic_id
        and o.partition_index = expired.partition_index;
    get diagnostics expired_offsets = row_count;

    with deleted as (
        delete from consumer_group g
        where g.group_id = any (locked_groups)
            and g.state = 'Empty'
            and g.group_id <> all (p_unsettled_groups || p_settled_groups)
            and not exists (select from committed_offset o where o.group_id = g.group_id)
            and not exists (select from group_member m where m.group_id = g.group_id)
        returning g.group_id
    )
    select coalesce(array_agg(group_id), '{}') into deleted_groups from deleted;
end
$$;

create function save_group(
    p_shard              integer,
    p_node_id            integer,
    p_lease_epoch        integer,
    p_group_id           text,
    p_state              text,
    p_state_timestamp_ms bigint,
    p_protocol_type      text,
    p_protocol_name      text,
    p_generation_id      integer,
    p_leader_id          text,
    p_member_ids         text[]
) returns boolean
language plpgsql volatile
as $$
-- Writes the group and drops members that are gone; the caller writes the present ones in the same transaction.
-- False if the lease is not current. The update of the group row waits for commits of the generation before.
begin
    if not lease_is_current(p_shard, p_node_id, p_lease_epoch) then
        return false;
    end if;
    insert into consumer_group as g (
        group_id, shard, state, state_timestamp_ms, protocol_type, protocol_name, generation_id, leader_id
    ) values (
        p_group_id, p_shard, p_state, p_state_timestamp_ms, p_protocol_type, p_protocol_name, p_generation_id,
        p_leader_id
    )
    on conflict (group_id) do update set
        shard              = excluded.shard,
        state              = excluded.state,
        state_timestamp_ms = excluded.state_timestamp_ms,
        protocol_type      = excluded.protocol_type,
        protocol_name      = excluded.protocol_name,
        generation_id      = excluded.generation_id,
        leader_id          = excluded.leader_id;
    delete from group_member m where m.group_id = p_group_id and m.member_id <> all (p_member_ids);
    return true;
end
$$;
