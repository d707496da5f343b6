-- Transactions. Each function writes a decision if the producer's row still has the revision that the decision is based
-- on. Otherwise it writes nothing.

create function save_transactional_producer(
    p_transactional_id      text,
    p_revision              bigint, -- of the row that was decided by; 0: there was none
    p_producer_id           bigint,
    p_producer_epoch        integer,
    p_last_producer_epoch   integer,
    p_previous_producer_id  bigint,
    p_timeout_ms            integer,
    p_state                 text
) returns boolean
language plpgsql volatile
as $$
-- Write a row that has no open transaction before or after. Return false if another node has written it.
begin
    if p_revision = 0 then
        insert into transactional_producer (
            transactional_id, producer_id, producer_epoch, last_producer_epoch, previous_producer_id, timeout_ms, state,
            revision, updated_at
        ) values (
            p_transactional_id, p_producer_id, p_producer_epoch, p_last_producer_epoch, p_previous_producer_id,
            p_timeout_ms, p_state, 1, clock_timestamp()
        )
        on conflict (transactional_id) do nothing;
    else
        update transactional_producer t
        set producer_id          = p_producer_id,
            producer_epoch       = p_producer_epoch,
            last_producer_epoch  = p_last_producer_epoch,
            previous_producer_id = p_previous_producer_id,
            timeout_ms           = p_timeout_ms,
            state                = p_state,
            -- A transaction that is aborted before it has begun gets this moment as its beginning.
            last_started_at      = case when p_state <> 'Empty' then clock_timestamp() end,
            revision             = t.revision + 1,
            updated_at           = clock_timestamp()
        where t.transactional_id = p_transactional_id and t.revision = p_revision and t.started_at is null;
    end if;
    return found;
end
$$;

create function add_to_transaction(
    p_transactional_id  text,
    p_revision          bigint,
    p_partition_keys    bigint[],
    p_group_ids         text[],
    p_begins_at_zero    boolean,  -- whether the producer numbers its batches anew in each transaction
    p_max_size          integer   -- partitions and groups that one transaction may enlist
) returns boolean
language plpgsql volatile
as $$
-- Begin the transaction if it is not open, and enlist. Return false if another node has written the row. Return null if
-- the transaction would become too large; then nothing was added.
declare
    producer record;
    size     bigint;
begin
    -- While the revision is the same, nothing is added concurrently: the update below either finds the row, or another
    -- node has added something.
    select
        (select count(*) from open_transaction o where o.producer_id = t.producer_id)
        + (select count(*) from transaction_group g where g.producer_id = t.producer_id)
    into size
    from transactional_producer t
    where t.transactional_id = p_transactional_id and t.revision = p_revision;
    if size + cardinality(p_partition_keys) + cardinality(p_group_ids) > p_max_size then
        select
            size
            + (
                select count(distinct added.partition_key) from unnest(p_partition_keys) added (partition_key)
                where not exists (
                    select from open_transaction o
                    where o.partition_key = added.partition_key and o.producer_id = t.producer_id
                )
            )
            + (
                select count(distinct added.group_id) from unnest(p_group_ids) added (group_id)
                where not exists (
                    select from transaction_group g
                    where g.producer_id = t.producer_id and g.group_id = added.group_id
                )
            )
        into size
        from transactional_producer t
        where t.transactional_id = p_transactional_id;
        if size > p_max_size then
            return null;
        end if;
    end if;
    update transactional_producer t
    set state      = 'Ongoing',
        -- The owner of a transaction that begins knows its epoch.
        last_producer_epoch = case when t.state = 'Ongoing' then t.last_producer_epoch else -1 end,
        started_at = coalesce(t.started_at, clock_timestamp()),
        revision   = t.revision + 1,
        updated_at = clock_timestamp()
    where t.transactional_id = p_transactional_id and t.revision = p_revision
        and t.state not in ('PrepareCommit', 'PrepareAbort')
    returning t.producer_id, t.producer_epoch into producer;
    if not found then
        return false;
    end if;
    insert into open_transaction (partition_key, producer_id, producer_epoch, begins_at_zero)
    select added.partition_key, producer.producer_id, producer.producer_epoch, p_begins_at_zero
    from (select distinct unnest(p_partition_keys) as partition_key) added
    on conflict do nothing;
    insert into transaction_group (producer_id, group_id)
    select distinct producer.producer_id, unnest(p_group_ids)
    on conflict do nothing;
    return true;
end
$$;

create function commit_offsets_in_transaction(
    p_transactional_id     text,
    p_producer_id          bigint,
    p_producer_epoch       integer,
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
    p_max_pending          bigint,    -- offsets that one transaction may have
    out refusals           text[]
)
language plpgsql volatile
-- As in commit_offsets.
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off
set enable_mergejoin = off
as $$
-- Write offsets that become committed with the transaction. Nothing is written unless a transaction is open that has
-- enlisted every group. If several valid commits name one partition, the last one wins.
declare
    producer     record;
    unfit        text;
    committed_ms bigint;
begin
    -- This lock is held until the offsets are durable. A node that ends the transaction waits for it.
    select t.producer_id, t.producer_epoch into producer
    from transactional_producer t
    where t.transactional_id = p_transactional_id
    for share;
    unfit := case
        when producer.producer_id is distinct from p_producer_id then 'invalid_producer_id_mapping'
        when producer.producer_epoch <> p_producer_epoch then 'invalid_producer_epoch'
        when exists (
            select unnest(p_group_ids)
            except
            select g.group_id from transaction_group g where g.producer_id = p_producer_id
        ) then 'not_in_transaction'
        when cardinality(p_topic_ids) + (
            select count(*) from (
                select from pending_offset o where o.producer_id = p_producer_id limit p_max_pending
            ) pending
        ) > p_max_pending and (
            -- The sum above counts a partition twice if the transaction has committed an offset of it before.
            select count(*) from (
                select p_group_ids[added.fence_position], added.topic_id, added.partition_index
                from unnest(p_fence_positions, p_topic_ids, p_partition_indexes)
                    added (fence_position, topic_id, partition_index)
                union
                select o.group_id, o.topic_id, o.partition_index
                from pending_offset o where o.producer_id = p_producer_id
            ) distinct_offsets
        ) > p_max_pending then 'transaction_too_large'
    end;
    if unfit is not null then
        refusals := array_fill(unfit, array[cardinality(p_topic_ids)]);
        return;
    end if;

    select judged.refusals, judged.judged_ms into refusals, committed_ms
    from judge_commits(
        p_shards, p_node_ids, p_lease_epochs, p_group_ids, p_member_ids, p_generation_ids, p_fence_positions,
        p_topic_ids, p_partition_indexes
    ) judged;

    insert into pending_offset as o (
        group_id, topic_id, partition_index, producer_id, committed_offset, leader_epoch, metadata, commit_timestamp_ms
    )
    select distinct on (1, 2, 3)
        p_group_ids[accepted.fence_position], accepted.topic_id, accepted.partition_index, p_producer_id,
        accepted.committed_offset, accepted.leader_epoch, accepted.metadata,
        -- Later than the offset that it replaces, even if the clock has been set back.
        greatest(
            committed_ms,
            (
                select c.commit_timestamp_ms from committed_offset c
                where c.group_id = p_group_ids[accepted.fence_position]
                    and c.topic_id = accepted.topic_id
                    and c.partition_index = accepted.partition_index
            )
        )
    from (
        select
            unnest(refusals) as refusal, unnest(p_fence_positions) as fence_position, unnest(p_topic_ids) as topic_id,
            unnest(p_partition_indexes) as partition_index, unnest(p_committed_offsets) as committed_offset,
            unnest(p_leader_epochs) as leader_epoch, unnest(p_metadata) as metadata,
            generate_series(1, cardinality(p_topic_ids)) as position
    ) accepted
    where accepted.refusal is null
    order by 1, 2, 3, accepted.position desc
    on conflict (group_id, topic_id, partition_index, producer_id) do update set
        committed_offset    = excluded.committed_offset,
        leader_epoch        = excluded.leader_epoch,
        metadata            = excluded.metadata,
        commit_timestamp_ms = excluded.commit_timestamp_ms;
end
$$;

create function settle_pending_offsets(p_producer_id bigint, p_group_ids text[], p_committed boolean) returns void
language plpgsql volatile
as $$
-- Commit or remove the offsets of these groups in the producer's transaction.
begin
    if p_committed then
        -- An offset that was committed later outside the transaction stays.
        insert into committed_offset as o (
            group_id, topic_id, partition_index, committed_offset, leader_epoch, metadata, commit_timestamp_ms
        )
        select
            pending.group_id, pending.topic_id, pending.partition_index, pending.committed_offset,
            pending.leader_epoch, pending.metadata, pending.commit_timestamp_ms
        from pending_offset pending
        where pending.producer_id = p_producer_id and pending.group_id = any (p_group_ids)
            and exists (select from consumer_group g where g.group_id = pending.group_id)
            and exists (select from topic t where t.topic_id = pending.topic_id and t.deleted_at is null)
        order by 1, 2, 3
        on conflict (group_id, topic_id, partition_index) do update set
            committed_offset    = excluded.committed_offset,
            leader_epoch        = excluded.leader_epoch,
            metadata            = excluded.metadata,
            commit_timestamp_ms = excluded.commit_timestamp_ms,
            expire_timestamp_ms = excluded.expire_timestamp_ms
        where o.commit_timestamp_ms <= excluded.commit_timestamp_ms;
    end if;
    delete from pending_offset o where o.producer_id = p_producer_id and o.group_id = any (p_group_ids);
end
$$;

create function lock_what_offsets_refer_to(p_producer_id bigint, p_group_ids text[]) returns void
language plpgsql volatile
as $$
-- The foreign keys of the rows that settle_pending_offsets writes need these locks. Take them now, before partitions
-- are locked.
begin
    perform 1 from consumer_group g where g.group_id = any (p_group_ids) order by g.group_id for key share;
    perform 1 from topic t
    where t.topic_id in (
        select o.topic_id from pending_offset o where o.producer_id = p_producer_id and o.group_id = any (p_group_ids)
    )
    order by t.topic_id for key share;
end
$$;

create function end_transaction(
    p_transactional_id      text,
    p_revision              bigint,
    p_producer_id           bigint,  -- the row as it is to be
    p_producer_epoch        integer,
    p_last_producer_epoch   integer,
    p_previous_producer_id  bigint,
    p_timeout_ms            integer,
    p_state                 text,
    p_committed             boolean,
    p_marker                bytea,   -- a control batch, as it is appended to every partition
    p_marker_timestamp_ms   bigint,
    p_at_a_time             integer, -- partitions that are marked in one transaction of Postgres
    out ended                boolean,   -- false: another node has written the row, and nothing was done
    out has_more             boolean,   -- the end is decided, but not every partition is marked: see continue_end
    out partition_keys       bigint[],  -- where markers were appended, and for each:
    out base_offsets         bigint[],
    out log_start_offsets    bigint[],
    out leader_epochs        integer[],
    out last_stable_offsets  bigint[],
    out first_offsets        bigint[],  -- of what the transaction had appended; null: nothing
    out group_ids            text[],    -- whose offsets were committed
    out transaction_id       bigint,
    out written_lsn          bigint
)
language plpgsql volatile
as $$
-- End the ongoing transaction: the row, its offsets, and the marker in the first partitions. Usually these are all of
-- them, and no reader sees a part of it. For a larger transaction the row says how it ends, so that any node can
-- continue.
declare
    producer record;
    groups   text[];
begin
    -- This transaction holds the row's lock from here on. A commit of offsets in the ending transaction waits for the lock.
    select t.producer_id into producer
    from transactional_producer t
    where t.transactional_id = p_transactional_id and t.revision = p_revision and t.state = 'Ongoing'
    for no key update;
    ended := found;
    if not ended then
        return;
    end if;
    has_more := (
        select count(*) > p_at_a_time
        from (select from open_transaction o where o.producer_id = producer.producer_id limit p_at_a_time + 1) first_ones
    );
    update transactional_producer t
    set producer_id          = p_producer_id,
        producer_epoch       = p_producer_epoch,
        last_producer_epoch  = p_last_producer_epoch,
        previous_producer_id = p_previous_producer_id,
        timeout_ms           = p_timeout_ms,
        state                = case
            when not has_more then p_state
            when p_committed then 'PrepareCommit'
            else 'PrepareAbort' end,
        ending_producer_id   = case when has_more then producer.producer_id end,
        ending_marker        = case when has_more then p_marker end,
        ending_timestamp_ms  = case when has_more then p_marker_timestamp_ms end,
        ending_state         = case when has_more then p_state end,
        started_at           = case when has_more then t.started_at end,
        last_started_at      = case when p_state <> 'Empty' then t.started_at end,
        revision             = t.revision + 1,
        updated_at           = clock_timestamp()
    where t.transactional_id = p_transactional_id;

    select array_agg(g.group_id order by g.group_id) into groups
    from transaction_group g where g.producer_id = producer.producer_id;
    if groups is not null then
        delete from transaction_group g where g.producer_id = producer.producer_id;
        perform lock_what_offsets_refer_to(producer.producer_id, groups);
    end if;

    select
        m.partition_keys, m.base_offsets, m.log_start_offsets, m.leader_epochs, m.last_stable_offsets, m.first_offsets,
        m.transaction_id, m.written_lsn
    into
        partition_keys, base_offsets, log_start_offsets, leader_epochs, last_stable_offsets, first_offsets,
        transaction_id, written_lsn
    from mark_partitions(producer.producer_id, p_committed, p_marker, p_marker_timestamp_ms, p_at_a_time) m;

    if groups is not null then
        perform settle_pending_offsets(producer.producer_id, groups, p_committed);
        if p_committed then
            group_ids := groups;
        end if;
    end if;
end
$$;

create function continue_end(
    p_transactional_id      text,
    p_revision              bigint,
    p_at_a_time             integer,
    out ended                boolean,   -- these as end_transaction has them
    out has_more             boolean,
    out partition_keys       bigint[],
    out base_offsets         bigint[],
    out log_start_offsets    bigint[],
    out leader_epochs        integer[],
    out last_stable_offsets  bigint[],
    out first_offsets        bigint[],
    out group_ids            text[],
    out transaction_id       bigint,
    out written_lsn          bigint
)
language plpgsql volatile
as $$
-- Mark the next partitions of a transaction whose end is decided. With the last partition the transaction has ended.
declare
    producer record;
begin
    select t.ending_producer_id, t.ending_marker, t.ending_timestamp_ms, t.state into producer
    from transactional_producer t
    where t.transactional_id = p_transactional_id and t.revision = p_revision
        and t.state in ('PrepareCommit', 'PrepareAbort')
    for no key update;
    ended := found;
    if not ended then
        return;
    end if;
    select
        m.partition_keys, m.base_offsets, m.log_start_offsets, m.leader_epochs, m.last_stable_offsets, m.first_offsets,
        m.transaction_id, m.written_lsn
    into
        partition_keys, base_offsets, log_start_offsets, leader_epochs, last_stable_offsets, first_offsets,
        transaction_id, written_lsn
    from mark_partitions(
        producer.ending_producer_id, producer.state = 'PrepareCommit', producer.ending_marker,
        producer.ending_timestamp_ms, p_at_a_time
    ) m;
    has_more := exists (select from open_transaction o where o.producer_id = producer.ending_producer_id);
    update transactional_producer t
    set state              = case when has_more then t.state else t.ending_state end,
        ending_producer_id = case when has_more then t.ending_producer_id end,
        ending_marker      = case when has_more then t.ending_marker end,
        ending_timestamp_ms = case when has_more then t.ending_timestamp_ms end,
        ending_state       = case when has_more then t.ending_state end,
        started_at         = case when has_more then t.started_at end,
        revision           = t.revision + 1,
        updated_at         = clock_timestamp()
    where t.transactional_id = p_transactional_id;
end
$$;

create function mark_partitions(
    p_producer_id           bigint,
    p_committed             boolean,
    p_marker                bytea,
    p_marker_timestamp_ms   bigint,
    p_at_a_time             integer,
    out partition_keys       bigint[],
    out base_offsets         bigint[],
    out log_start_offsets    bigint[],
    out leader_epochs        integer[],
    out last_stable_offsets  bigint[],
    out first_offsets        bigint[],
    out transaction_id       bigint,
    out written_lsn          bigint
)
language plpgsql volatile
as $$
-- Append the marker to the next partitions of the producer's transaction. Each partition is ended as a whole.
declare
    keys     bigint[];
    appended record;
begin
    select array_agg(o.partition_key order by o.partition_key) into keys
    from (
        select o.partition_key from open_transaction o where o.producer_id = p_producer_id order by o.partition_key limit p_at_a_time
    ) o;
    if keys is null then
        return;
    end if;
    select
        a.refusals, a.base_offsets, a.log_start_offsets, a.leader_epochs, a.transaction_id, a.written_lsn
    into appended
    from (select array_agg(i order by i)::integer[] as places from generate_series(1, cardinality(keys)) i) numbered
    cross join lateral append_chunks(
        keys, true, null, numbered.places, array_fill(null::bigint, array[cardinality(keys)]),
        array_fill(p_marker, array[cardinality(keys)]), numbered.places,
        array_fill(1, array[cardinality(keys)]), array_fill(1, array[cardinality(keys)]),
        array_fill(p_marker_timestamp_ms, array[cardinality(keys)]),
        array_fill(octet_length(p_marker), array[cardinality(keys)]), '{}', '{}',
        array_fill(0, array[cardinality(keys)]), array_fill(-1, array[cardinality(keys)]),
        array_fill(-1, array[cardinality(keys)]), array_fill(false, array[cardinality(keys)])
    ) a;
    transaction_id := appended.transaction_id;
    written_lsn    := appended.written_lsn;
    -- The partitions are locked, so no append of the transaction can come after its marker.
    with closed as (
        delete from open_transaction o where o.producer_id = p_producer_id and o.partition_key = any (keys)
        returning o.partition_key, o.first_offset
    ), marked as (
        select
            m.partition_key, m.base_offset, m.log_start_offset, m.leader_epoch, closed.first_offset,
            coalesce(
                (
                    select min(other.first_offset) from open_transaction other
                    where other.partition_key = m.partition_key and other.producer_id <> p_producer_id
                ),
                m.base_offset + 1
            ) as last_stable_offset
        from unnest(
            keys, appended.refusals, appended.base_offsets, appended.log_start_offsets, appended.leader_epochs
        ) m (partition_key, refusal, base_offset, log_start_offset, leader_epoch)
        join closed using (partition_key)
        where m.refusal is null -- the partition may have been deleted
    ), aborted as (
        insert into aborted_transaction (partition_key, last_offset, producer_id, first_offset, last_stable_offset)
        select m.partition_key, m.base_offset, p_producer_id, m.first_offset, m.last_stable_offset
        from marked m
        where not p_committed and m.first_offset is not null
    )
    select
        array_agg(m.partition_key order by m.partition_key), array_agg(m.base_offset order by m.partition_key),
        array_agg(m.log_start_offset order by m.partition_key), array_agg(m.leader_epoch order by m.partition_key),
        array_agg(m.last_stable_offset order by m.partition_key), array_agg(m.first_offset order by m.partition_key)
    into partition_keys, base_offsets, log_start_offsets, leader_epochs, last_stable_offsets, first_offsets
    from marked m;
end
$$;
