-- Writes of the group coordinator, each fenced by its lease in the transaction that writes.

create function now_ms() returns bigint
language sql volatile
as $$
-- Return the time of the clock by which offsets and groups age.
    select (extract(epoch from clock_timestamp()) * 1000)::bigint
$$;

create function lease_is_current(p_kind text, p_shard integer, p_node_id integer, p_lease_epoch integer)
returns boolean
language plpgsql volatile
as $$
-- Keep the lease with its owner. A change of owner waits until this transaction has ended; a renewal does not wait.
begin
    perform 1 from coordinator_lease l
    where l.kind = p_kind and l.shard = p_shard and l.node_id = p_node_id and l.lease_epoch = p_lease_epoch
    for key share;
    return found;
end
$$;

create function judge_commits(
    p_shards               integer[], -- per fence: distinct (lease, group, member, generation)
    p_node_ids             integer[],
    p_lease_epochs         integer[],
    p_group_ids            text[],
    p_member_ids           text[],    -- whose epoch the generation is, or null: the group's
    p_generation_ids       integer[], -- null: any generation of the group, with any members
    p_fence_positions      integer[], -- per commit: position of its fence
    p_topic_ids            uuid[],    -- per commit, as is the next
    p_partition_indexes    integer[],
    out refusals           text[],    -- per commit
    out judged_ms          bigint     -- when
)
language plpgsql volatile
as $$
-- Decide for each commit whether it is valid. Lock the leases against a change of owner, and the groups against change.
-- Group rows are locked in share mode: commits of one group do not wait for each other. A new generation waits for the
-- commits of the old one, and a later commit of the old one is refused.
declare
    from_outside integer[]; -- positions of fences that name no member; their groups begin with the first commit
    verdicts     text[];
begin
    perform 1 from coordinator_lease l
    where l.kind = 'groups' and l.shard = any (p_shards)
    order by l.shard for key share;
    judged_ms := now_ms();

    select array_agg(fence.position order by fence.group_id collate "C") into from_outside
    from (
        select
            unnest(p_shards) as shard, unnest(p_node_ids) as node_id, unnest(p_lease_epochs) as lease_epoch,
            unnest(p_group_ids) as group_id, unnest(p_generation_ids) as generation_id,
            generate_series(1, cardinality(p_group_ids)) as position
    ) fence
    join coordinator_lease l using (shard, node_id, lease_epoch)
    where l.kind = 'groups' and coalesce(fence.generation_id, -1) < 0;

    loop
        if from_outside is not null then
            insert into consumer_group (group_id, shard, group_type, state, state_timestamp_ms, generation_id, document)
            select p_group_ids[position], p_shards[position], 'classic', 'Empty', judged_ms, 0, '{}'
            from unnest(from_outside) position
            where not exists (select from consumer_group g where g.group_id = p_group_ids[position])
            on conflict (group_id) do nothing;
        end if;
        perform 1 from consumer_group g where g.group_id = any (p_group_ids) order by g.group_id for share;
        -- The lock may have waited for a transaction that removed a group without members. Such a group begins anew.
        exit when from_outside is null or not exists (
            select from unnest(from_outside) position
            where not exists (select from consumer_group g where g.group_id = p_group_ids[position])
        );
    end loop;

    select array_agg(
        case
            when l.shard is null then 'not_coordinator'
            when g.group_id is null then 'illegal_generation'
            when fence.member_id is not null then
                case when m.member_id is null then 'unknown_member'
                    when m.member_epoch <> fence.generation_id then 'stale_member_epoch' end
            when fence.generation_id is null then null
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
            unnest(p_lease_epochs) as lease_epoch, unnest(p_member_ids) as member_id,
            unnest(p_generation_ids) as generation_id, generate_series(1, cardinality(p_group_ids)) as position
    ) fence
    left join coordinator_lease l
        on l.kind = 'groups' and l.shard = fence.shard and l.node_id = fence.node_id
            and l.lease_epoch = fence.lease_epoch
    left join consumer_group g on g.group_id = fence.group_id
    left join group_member m on m.group_id = fence.group_id and m.member_id = fence.member_id;

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
        on p.topic_id = wanted.topic_id and p.partition_index = wanted.partition_index and not p.deleted
            and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id);
end
$$;

create function commit_offsets(
    p_shards               integer[], -- these as judge_commits takes them
    p_node_ids             integer[],
    p_lease_epochs         integer[],
    p_group_ids            text[],
    p_member_ids           text[],
    p_generation_ids       integer[],
    p_fence_positions      integer[],
    p_topic_ids            uuid[],
    p_partition_indexes    integer[],
    p_committed_offsets    bigint[],  -- per commit, as are the rest
    p_leader_epochs        integer[],
    p_metadata             text[],
    p_retentions_ms        bigint[],  -- how long the offset is kept, or null: as the cluster is set
    out refusals           text[]
)
language plpgsql volatile
-- To plan these statements for the array lengths of each call takes longer than to run them (see append_plain).
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off
set enable_mergejoin = off
as $$
-- Decide each commit, and write the valid ones. If several valid commits name one partition, the last one wins.
declare
    committed_ms bigint;
begin
    select judged.refusals, judged.judged_ms into refusals, committed_ms
    from judge_commits(
        p_shards, p_node_ids, p_lease_epochs, p_group_ids, p_member_ids, p_generation_ids, p_fence_positions,
        p_topic_ids, p_partition_indexes
    ) judged;

    insert into committed_offset as o (
        group_id, topic_id, partition_index, committed_offset, leader_epoch, metadata,
        commit_timestamp_ms, expire_timestamp_ms
    )
    -- Rows are locked in this order, which is also that of a transaction's end.
    select distinct on (1, 2, 3)
        p_group_ids[accepted.fence_position] collate "C", accepted.topic_id, accepted.partition_index,
        accepted.committed_offset, accepted.leader_epoch, accepted.metadata,
        committed_ms, case when accepted.retention_ms is not null then
            committed_ms + least(accepted.retention_ms, 9223372036854775807 - committed_ms) end
    from (
        select
            unnest(refusals) as refusal, unnest(p_fence_positions) as fence_position, unnest(p_topic_ids) as topic_id,
            unnest(p_partition_indexes) as partition_index, unnest(p_committed_offsets) as committed_offset,
            unnest(p_leader_epochs) as leader_epoch, unnest(p_metadata) as metadata,
            unnest(p_retentions_ms) as retention_ms,
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

create function delete_group(
    p_group_id text, p_shard integer, p_node_id integer, p_lease_epoch integer, p_limit integer
) returns text
language plpgsql volatile
as $$
-- Return 'deleted', 'missing', 'fenced' if the lease is not current, or 'more' if p_limit of the group's offsets were
-- deleted and others remain. The group is deleted with its last offsets. Pending offsets of transactions are deleted, too.
declare
    removed integer;
begin
    if not lease_is_current('groups', p_shard, p_node_id, p_lease_epoch) then
        return 'fenced';
    end if;
    perform 1 from consumer_group g where g.group_id = p_group_id for update;
    if not found then
        return 'missing';
    end if;
    with doomed as materialized (
        select o.topic_id, o.partition_index
        from committed_offset o
        where o.group_id = p_group_id
        order by o.topic_id, o.partition_index
        limit p_limit
    )
    delete from committed_offset o
    using doomed d
    where o.group_id = p_group_id and o.topic_id = d.topic_id and o.partition_index = d.partition_index;
    get diagnostics removed = row_count;
    if removed = p_limit then
        return 'more';
    end if;
    with doomed as materialized (
        select o.topic_id, o.partition_index, o.producer_id
        from pending_offset o
        where o.group_id = p_group_id
        order by o.topic_id, o.partition_index, o.producer_id
        limit p_limit
    )
    delete from pending_offset o
    using doomed d
    where o.group_id = p_group_id and o.topic_id = d.topic_id and o.partition_index = d.partition_index
        and o.producer_id = d.producer_id;
    get diagnostics removed = row_count;
    if removed = p_limit then
        return 'more';
    end if;
    delete from group_member m where m.group_id = p_group_id;
    delete from consumer_group g where g.group_id = p_group_id;
    return 'deleted';
end
$$;

create function delete_offsets(
    p_group_id           text,
    p_topic_ids          uuid[],    -- per offset, as is the next
    p_partition_indexes  integer[],
    p_shard              integer,
    p_node_id            integer,
    p_lease_epoch        integer
) returns boolean
language plpgsql volatile
as $$
-- Delete the group's committed offsets, and those that wait for the end of a transaction. Return false if the lease is
-- not current. The lock on the group makes a transaction that ends wait: otherwise it could commit its pending offsets
-- after the removal.
begin
    if not lease_is_current('groups', p_shard, p_node_id, p_lease_epoch) then
        return false;
    end if;
    perform 1 from consumer_group g where g.group_id = p_group_id for update;
    delete from committed_offset o
    using unnest(p_topic_ids, p_partition_indexes) doomed (topic_id, partition_index)
    where o.group_id = p_group_id and o.topic_id = doomed.topic_id and o.partition_index = doomed.partition_index;
    delete from pending_offset o
    using unnest(p_topic_ids, p_partition_indexes) doomed (topic_id, partition_index)
    where o.group_id = p_group_id and o.topic_id = doomed.topic_id and o.partition_index = doomed.partition_index;
    return true;
end
$$;

create function expirable_offsets(
    p_shard             integer,
    p_now_ms            bigint,
    p_retention_ms      bigint,
    p_settled_groups    text[], -- Stable groups of type "consumer" whose subscriptions are known
    p_subscriptions     text[], -- their subscriptions, as group_id || '/' || topic name
    p_unsettled_groups  text[], -- groups that nothing may expire of: rebalancing, or of another type
    p_generation_ids    integer[] -- per settled group: the generation or epoch that has these subscriptions
) returns table (group_id text, topic_id uuid, partition_index integer)
language sql stable
as $$
-- An explicit expire timestamp wins. Otherwise an offset expires retention_ms after its base: the change of state for
-- an Empty group that had members, the commit for a simple group, the commit for a topic that a settled group does not
-- subscribe to. An offset without a base stays, and so does one that a transaction is about to replace. If a settled
-- group has got another generation in the meantime, its subscriptions are not known.
    select o.group_id, o.topic_id, o.partition_index
    from consumer_group g
    join committed_offset o using (group_id)
    join topic t using (topic_id)
    cross join lateral (
        select case
            when g.group_id = any (p_unsettled_groups) then null
            when g.group_id = any (p_settled_groups) then case
                when g.generation_id <> p_generation_ids[array_position(p_settled_groups, g.group_id)] then null
                when g.group_id || '/' || t.name = any (p_subscriptions) then null
                else o.commit_timestamp_ms end
            when g.state <> 'Empty' then null
            when g.protocol_type is null then o.commit_timestamp_ms
            else g.state_timestamp_ms
        end as base_ms
    ) since
    where g.shard = p_shard
        and since.base_ms is not null
        and coalesce(o.expire_timestamp_ms, since.base_ms + p_retention_ms) <= p_now_ms
        and not exists (
            select from pending_offset pending
            where pending.group_id = o.group_id and pending.topic_id = o.topic_id
                and pending.partition_index = o.partition_index
        )
$$;

create function expire_offsets(
    p_shard             integer,
    p_node_id           integer,
    p_lease_epoch       integer,
    p_retention_ms      bigint,
    p_settled_groups    text[],
    p_subscriptions     text[],
    p_unsettled_groups  text[],
    p_generation_ids    integer[],
    p_group_limit       integer,
    p_offset_limit      integer,
    out fenced           boolean,
    out expired_offsets  integer,
    out deleted_groups   text[]
)
language plpgsql volatile
as $$
-- Run one bounded pass over a shard. Groups are locked before their offsets are examined, so that no commit happens in
-- between. Groups that a commit has locked wait for the next pass. Empty groups without offsets are deleted, unless an
-- open transaction has offsets for them.
declare
    passed_ms constant bigint := now_ms();
    locked_groups text[];
begin
    expired_offsets := 0;
    deleted_groups := '{}';
    fenced := not lease_is_current('groups', p_shard, p_node_id, p_lease_epoch);
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
                        p_shard, passed_ms, p_retention_ms, p_settled_groups, p_subscriptions, p_unsettled_groups,
                        p_generation_ids
                    ) e
                )
                or (
                    g.state = 'Empty'
                    and g.group_type <> 'share'
                    and g.group_id <> all (p_unsettled_groups || p_settled_groups)
                    and not exists (select from committed_offset o where o.group_id = g.group_id)
                    and not exists (select from pending_offset o where o.group_id = g.group_id)
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
            p_shard, passed_ms, p_retention_ms, p_settled_groups, p_subscriptions, p_unsettled_groups, p_generation_ids
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
            and g.group_type <> 'share'  -- where it stands is not kept as offsets
            and g.group_id <> all (p_unsettled_groups || p_settled_groups)
            and not exists (select from committed_offset o where o.group_id = g.group_id)
            and not exists (select from pending_offset o where o.group_id = g.group_id)
            and not exists (select from group_member m where m.group_id = g.group_id)
        returning g.group_id
    )
    select coalesce(array_agg(group_id), '{}') into deleted_groups from deleted;
end
$$;

create function save_groups(
    p_wait             boolean,   -- for groups that another transaction has locked; else they are skipped
    p_shards           integer[], -- per group: its lease, then what is stored of it
    p_node_ids         integer[],
    p_lease_epochs     integer[],
    p_group_ids        text[],
    p_group_types      text[],
    p_states           text[],
    p_protocol_types   text[],
    p_generation_ids   integer[],
    p_documents        text[],
    p_all_heard        boolean[],
    p_replaced         boolean[], -- members that are not among the rows below are gone
    p_member_positions integer[], -- per member that changed: position of its group
    p_member_ids       text[],
    p_member_epochs    integer[],
    p_member_documents text[],    -- null: the member is gone
    out outcomes       text[]     -- per group: 'saved', 'fenced' or 'busy'
)
language plpgsql volatile
as $$
-- Write the changes of many groups. Locking a group's row waits for the commits of the previous generation. Groups that
-- another transaction has locked are busy, unless the caller wants to wait for them, so that one of them cannot delay
-- the others. The state's timestamp moves with the state, the generation or the type.
declare
    saved_ms bigint;
    locked   text[];
begin
    perform 1 from coordinator_lease l
    where l.kind = 'groups' and l.shard = any (p_shards)
    order by l.shard for key share;

    if p_wait then
        perform 1 from consumer_group g where g.group_id = any (p_group_ids) order by g.group_id for no key update;
        locked := p_group_ids;
    else
        select coalesce(array_agg(free.group_id), '{}') into locked
        from (
            select g.group_id from consumer_group g
            where g.group_id = any (p_group_ids)
            order by g.group_id for no key update skip locked
        ) free;
    end if;
    saved_ms := now_ms();

    select array_agg(
        case
            when l.shard is null then 'fenced'
            when change.group_id = any (locked) or g.group_id is null then 'saved'
            else 'busy'
        end
        order by change.position
    )
    into outcomes
    from unnest(p_shards, p_node_ids, p_lease_epochs, p_group_ids)
        with ordinality as change (shard, node_id, lease_epoch, group_id, position)
    left join coordinator_lease l
        on l.kind = 'groups' and l.shard = change.shard and l.node_id = change.node_id
            and l.lease_epoch = change.lease_epoch
    left join consumer_group g on g.group_id = change.group_id;

    insert into consumer_group as g (
        group_id, shard, group_type, state, state_timestamp_ms, protocol_type, generation_id, restored_at_ms, document
    )
    select
        change.group_id, change.shard, change.group_type, change.state, saved_ms, change.protocol_type,
        change.generation_id, case when change.all_heard then null else saved_ms end, change.document::jsonb
    from unnest(
        outcomes, p_group_ids, p_shards, p_group_types, p_states, p_protocol_types, p_generation_ids, p_all_heard,
        p_documents
    ) change (
        outcome, group_id, shard, group_type, state, protocol_type, generation_id, all_heard, document
    )
    where change.outcome = 'saved'
    order by change.group_id collate "C"
    on conflict (group_id) do update set
        shard              = excluded.shard,
        group_type         = excluded.group_type,
        state              = excluded.state,
        state_timestamp_ms = case
            when (g.group_type, g.state, g.generation_id)
                is distinct from (excluded.group_type, excluded.state, excluded.generation_id)
            then excluded.state_timestamp_ms else g.state_timestamp_ms end,
        protocol_type      = excluded.protocol_type,
        generation_id      = excluded.generation_id,
        restored_at_ms     = case
            when excluded.restored_at_ms is not null then coalesce(g.restored_at_ms, excluded.restored_at_ms) end,
        document           = excluded.document;

    if true = any (p_replaced) then
        delete from group_member m
        using unnest(outcomes, p_group_ids, p_replaced)
            with ordinality as change (outcome, group_id, replaced, position)
        where m.group_id = change.group_id
            and change.outcome = 'saved'
            and change.replaced
            and not exists (
                select from unnest(p_member_positions, p_member_ids) kept (position, member_id)
                where kept.position = change.position and kept.member_id = m.member_id
            );
    end if;

    delete from group_member m
    using unnest(p_member_positions, p_member_ids, p_member_documents) gone (position, member_id, document)
    where gone.document is null
        and outcomes[gone.position] = 'saved'
        and m.group_id = p_group_ids[gone.position]
        and m.member_id = gone.member_id;

    insert into group_member as m (group_id, member_id, member_epoch, document)
    select p_group_ids[changed.position], changed.member_id, changed.member_epoch, changed.document::jsonb
    from unnest(p_member_positions, p_member_ids, p_member_epochs, p_member_documents)
        changed (position, member_id, member_epoch, document)
    where changed.document is not null and outcomes[changed.position] = 'saved'
    order by 1, 2
    on conflict (group_id, member_id) do update set
        member_epoch = excluded.member_epoch,
        document     = excluded.document
    where (m.member_epoch, m.document) is distinct from (excluded.member_epoch, excluded.document);
end
$$;
