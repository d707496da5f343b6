-- Writes of maintenance. Each locks compaction_state first, then rows of chunk, and the partition's row last, for as
-- short a time as possible.

create function rewrite_chunks(
    p_partition_key         bigint,
    p_end_offset            bigint,   -- what reaches it stays; null: no such bound
    p_removed_base_offsets  bigint[], -- ascending
    p_removed_objects       bigint[], -- where their bytes were when they were read
    p_removed_positions     bigint[],
    p_added_base_offsets    bigint[], -- ascending
    p_added_last_offsets    bigint[],
    p_max_timestamps_ms     bigint[],
    p_batch_counts          integer[],
    p_leader_epochs         integer[],
    p_size_bytes            integer[],
    p_object_id             bigint,   -- null: inline
    p_positions             bigint[], -- in the object
    p_records               bytea[],  -- inline
    out refusal             text,
    out grown_bytes         bigint,
    out end_offset          bigint,   -- of the rows removed, and what is known of the log up to there:
    out end_appended_bytes  bigint,
    out end_timestamp_ms    bigint
)
language plpgsql volatile
as $$
-- Return why nothing was written, null if the rows were written. 'changed': a row to remove is gone, or its bytes lie
-- elsewhere by now. 'sealed': the object accepts no more. 'outside': a row is not below the end of the range, and the
-- new rows do not end where it ends, because the mover has merged it with later chunks since the range was chosen. An
-- added chunk must lie within removed rows. Its batches have their final heads. The caller must settle the partition
-- afterwards.
declare
    slot_now       smallint;
    removed_total  constant integer := coalesce(cardinality(p_removed_base_offsets), 0);
    added_total    constant integer := coalesce(cardinality(p_added_base_offsets), 0);
    bases          bigint[];
    lasts          bigint[];
    running_max_ms bigint[];
    appended       bigint[];
    appended_ms    bigint[];
    sizes          bigint[];
    objects        bigint[];
    positions      bigint[];
    new_position   bigint;
    first_row      integer := 1;
    last_row       integer;
    previous_last  bigint := -1;
begin
    if p_object_id is not null then
        -- See append_chunks for the lock.
        perform 1 from log_object o where o.object_id = p_object_id and o.sealed_at is null for share;
        if not found then
            refusal := 'sealed';
            return;
        end if;
    else
        select r.current_slot into slot_now from inline_rotation r;
    end if;

    select array_agg(held.base_offset), array_agg(held.last_offset), array_agg(held.running_max_timestamp_ms),
        array_agg(held.append_timestamp_ms), array_agg(held.size_bytes), array_agg(held.object_id),
        array_agg(held.position), array_agg(held.appended_bytes)
    into bases, lasts, running_max_ms, appended_ms, sizes, objects, positions, appended
    from (
        select c.*
        from chunk c
        where c.partition_key = p_partition_key and c.base_offset = any (p_removed_base_offsets)
        order by c.base_offset
        for update
    ) held;
    if coalesce(cardinality(bases), 0) <> removed_total
        or objects is distinct from p_removed_objects
        or positions is distinct from p_removed_positions
    then
        refusal := 'changed';
        return;
    end if;
    if lasts[removed_total] >= p_end_offset
        and lasts[removed_total] is distinct from p_added_last_offsets[added_total]
    then
        refusal := 'outside';
        return;
    end if;

    delete from chunk c where c.partition_key = p_partition_key and c.base_offset = any (bases);

    for i in 1..added_total loop
        while first_row <= removed_total and lasts[first_row] < p_added_base_offsets[i] loop
            first_row := first_row + 1;
        end loop;
        last_row := first_row;
        while last_row < removed_total and lasts[last_row] < p_added_last_offsets[i] loop
            last_row := last_row + 1;
        end loop;
        if first_row > removed_total
            or p_added_base_offsets[i] <= previous_last
            or p_added_last_offsets[i] < p_added_base_offsets[i]
            or p_added_base_offsets[i] < bases[first_row]
            or p_added_last_offsets[i] > lasts[last_row]
            or exists (
                select from chunk c
                where c.partition_key = p_partition_key
                    and c.base_offset between p_added_base_offsets[i] and p_added_last_offsets[i]
            )
        then
            -- This error rolls back the delete, too.
            raise exception 'replaced chunks do not cover offsets % to %',
                p_added_base_offsets[i], p_added_last_offsets[i] using errcode = 'SL001';
        end if;
        previous_last := p_added_last_offsets[i];
        new_position := case when p_object_id is null then nextval('inline_position') else p_positions[i] end;
        -- The running maximum of the row that held the last offset is an upper bound and does not fall.
        insert into chunk (
            partition_key, base_offset, last_offset, max_timestamp_ms, running_max_timestamp_ms, append_timestamp_ms,
            object_id, position, size_bytes, batch_count, leader_epoch, inline_slot, final_heads
        ) values (
            p_partition_key, p_added_base_offsets[i], p_added_last_offsets[i], p_max_timestamps_ms[i],
            greatest(running_max_ms[last_row], p_max_timestamps_ms[i]), appended_ms[last_row],
            p_object_id, new_position, p_size_bytes[i], p_batch_counts[i], p_leader_epochs[i], slot_now, true
        );
        if p_object_id is null then
            insert into inline_records (slot, position, partition_key, base_offset, records)
            values (slot_now, new_position, p_partition_key, p_added_base_offsets[i], p_records[i]);
        end if;
    end loop;

    grown_bytes := coalesce((select sum(size) from unnest(p_size_bytes) size), 0)
        - coalesce((select sum(size) from unnest(sizes) size), 0);
    end_offset         := lasts[removed_total] + 1;
    end_appended_bytes := appended[removed_total];
    end_timestamp_ms   := running_max_ms[removed_total];
end
$$;

create function settle_partitions(
    p_partition_keys     bigint[], -- per rewriting, in any order
    p_grown_bytes        bigint[],
    p_end_offsets        bigint[],
    p_end_appended_bytes bigint[],
    p_end_timestamps_ms  bigint[]
) returns void
language plpgsql volatile
as $$
-- Finish rewritings. The row of each partition then shows where its log ends, if no chunk shows it any more, and how
-- large the log is. Rows that need no change are not locked, because next_offset never falls.
declare
    keys bigint[];
begin
    select array_agg(held.partition_key) into keys
    from (
        select p.partition_key
        from partition p
        where p.partition_key = any (p_partition_keys)
            and exists (
                select from unnest(p_partition_keys, p_grown_bytes, p_end_offsets) w (partition_key, grown_bytes, end_offset)
                where w.partition_key = p.partition_key and (w.grown_bytes <> 0 or w.end_offset > p.next_offset)
            )
        order by p.partition_key
        for no key update
    ) held;
    if keys is null then
        return;
    end if;
    update partition p
    set next_offset      = greatest(p.next_offset, rewritten.end_offset),
        size_bytes       = p.size_bytes + rewritten.grown_bytes
            + case when rewritten.end_offset > p.next_offset then rewritten.appended_bytes - p.appended_bytes else 0 end,
        appended_bytes   = case
            when rewritten.end_offset > p.next_offset then rewritten.appended_bytes
            else p.appended_bytes end,
        max_timestamp_ms = case
            when rewritten.end_offset > p.next_offset then greatest(p.max_timestamp_ms, rewritten.timestamp_ms)
            else p.max_timestamp_ms end
    from (
        select
            w.partition_key, sum(w.grown_bytes) as grown_bytes, max(w.end_offset) as end_offset,
            max(w.appended_bytes) as appended_bytes, max(w.timestamp_ms) as timestamp_ms
        from unnest(p_partition_keys, p_grown_bytes, p_end_offsets, p_end_appended_bytes, p_end_timestamps_ms)
            w (partition_key, grown_bytes, end_offset, appended_bytes, timestamp_ms)
        group by w.partition_key
    ) rewritten
    where p.partition_key = rewritten.partition_key and p.partition_key = any (keys);
end
$$;

create function replace_chunks(
    p_partition_key         bigint,
    p_revision              bigint, -- of a compaction run; null: the same batches, their bytes elsewhere
    p_end_offset            bigint,
    p_removed_base_offsets  bigint[],
    p_removed_objects       bigint[],
    p_removed_positions     bigint[],
    p_added_base_offsets    bigint[],
    p_added_last_offsets    bigint[],
    p_max_timestamps_ms     bigint[],
    p_batch_counts          integer[],
    p_leader_epochs         integer[],
    p_size_bytes            integer[],
    p_object_id             bigint,
    p_positions             bigint[],
    p_records               bytea[]
) returns text
language plpgsql volatile
as $$
-- Rewrite chunks of one partition as rewrite_chunks does. Return null, or why nothing was written: a reason of
-- rewrite_chunks, or 'fenced' (another run began since).
declare
    revision_now  bigint;
    rewritten     record;
begin
    if p_revision is not null then
        select revision into revision_now from compaction_state where partition_key = p_partition_key for update;
        if revision_now is distinct from p_revision then
            return 'fenced';
        end if;
    end if;
    rewritten := rewrite_chunks(
        p_partition_key, p_end_offset, p_removed_base_offsets, p_removed_objects, p_removed_positions,
        p_added_base_offsets, p_added_last_offsets, p_max_timestamps_ms, p_batch_counts, p_leader_epochs, p_size_bytes,
        p_object_id, p_positions, p_records
    );
    if rewritten.refusal is null then
        perform settle_partitions(
            array[p_partition_key], array[rewritten.grown_bytes], array[rewritten.end_offset],
            array[rewritten.end_appended_bytes], array[rewritten.end_timestamp_ms]
        );
    end if;
    return rewritten.refusal;
end
$$;

create function move_chunks(
    p_shard               integer,   -- of the lease for jobs under which this is done; null: under none
    p_node_id             integer,
    p_lease_epoch         integer,
    p_object_id           bigint,    -- where the bytes are now
    p_object_size_bytes   bigint,    -- the object takes no more, and has so many; null: more may come
    p_partition_keys      bigint[],  -- per run of neighbours that become one chunk, in the order of the log
    p_chunk_counts        integer[],
    p_max_timestamps_ms   bigint[],
    p_batch_counts        integer[],
    p_leader_epochs       integer[],
    p_size_bytes          integer[],
    p_positions           bigint[],
    p_base_offsets        bigint[],  -- per chunk, run by run
    p_last_offsets        bigint[],
    p_old_objects         bigint[],  -- where their bytes were when they were read
    p_old_positions       bigint[],
    out refusal           text,
    out moved_bytes       bigint
)
language plpgsql volatile
as $$
-- Record the new place of everything that was copied into an object, at once: 'fenced' if another node has the lease by
-- now, 'sealed' if the object accepts no more. A run with a changed chunk stays at its old place.
declare
    first_chunk integer := 1;
    last_chunk  integer;
    rewritten   record;
    keys        bigint[];
    grown       bigint[];
    ends        bigint[];
    appended    bigint[];
    greatest_ms bigint[];
begin
    moved_bytes := 0;
    if p_shard is not null and not lease_is_current('jobs', p_shard, p_node_id, p_lease_epoch) then
        refusal := 'fenced';
        return;
    end if;
    for run in 1..cardinality(p_partition_keys) loop
        last_chunk := first_chunk + p_chunk_counts[run] - 1;
        rewritten := rewrite_chunks(
            p_partition_keys[run], null, p_base_offsets[first_chunk:last_chunk],
            p_old_objects[first_chunk:last_chunk], p_old_positions[first_chunk:last_chunk],
            array[p_base_offsets[first_chunk]], array[p_last_offsets[last_chunk]], array[p_max_timestamps_ms[run]],
            array[p_batch_counts[run]], array[p_leader_epochs[run]], array[p_size_bytes[run]], p_object_id,
            array[p_positions[run]], null
        );
        if rewritten.refusal = 'sealed' then
            refusal := rewritten.refusal;
            exit;
        end if;
        if rewritten.refusal is null then
            moved_bytes := moved_bytes + p_size_bytes[run];
            keys        := keys || p_partition_keys[run];
            grown       := grown || rewritten.grown_bytes;
            ends        := ends || rewritten.end_offset;
            appended    := appended || rewritten.end_appended_bytes;
            greatest_ms := greatest_ms || rewritten.end_timestamp_ms;
        end if;
        first_chunk := last_chunk + 1;
    end loop;
    perform settle_partitions(keys, grown, ends, appended, greatest_ms);
    if refusal is null and p_object_size_bytes is not null then
        update log_object set sealed_at = clock_timestamp(), size_bytes = p_object_size_bytes
        where object_id = p_object_id and sealed_at is null;
    end if;
end
$$;

create function delete_below_log_start(
    p_partition_key bigint,
    p_limit         integer,
    out chunk_count bigint,
    out batch_count bigint,
    out size_bytes  bigint,
    out has_more    boolean -- a bound was reached
)
language plpgsql volatile
as $$
-- Remove whole chunks below the log start, oldest first, at most p_limit. Aborted transactions are forgotten before, so
-- that chunks show what is left to do. The delete names an offset and uses no join. If the planner assumed that the
-- partition is small, it could reverse such a join, and would search the rows to delete again for each row of the
-- partition.
declare
    aborted_limit    constant integer := 1000;
    aborted_count    integer;
    first_dirty      bigint;
    log_start        bigint;
    last_base        bigint;
    clean_size_bytes bigint;
begin
    select s.first_dirty_offset into first_dirty
    from compaction_state s where s.partition_key = p_partition_key for update;
    select p.log_start_offset into log_start from partition p where p.partition_key = p_partition_key;
    delete from aborted_transaction a
    where a.partition_key = p_partition_key and a.last_offset <= (
        select max(oldest.last_offset)
        from (
            select b.last_offset
            from aborted_transaction b
            where b.partition_key = p_partition_key and b.last_offset < log_start
            order by b.last_offset
            limit aborted_limit
        ) oldest
    );
    get diagnostics aborted_count = row_count;
    has_more := aborted_count = aborted_limit;
    select max(oldest.base_offset) into last_base
    from (
        select c.base_offset, c.last_offset
        from chunk c
        where c.partition_key = p_partition_key and c.base_offset < log_start
        order by c.base_offset
        limit case when has_more then 0 else p_limit end
    ) oldest
    where oldest.last_offset < log_start;
    with removed as (
        delete from chunk c
        where c.partition_key = p_partition_key and c.base_offset <= last_base
            and c.last_offset < log_start -- the mover may have put one together since that reaches it
        returning c.base_offset, c.batch_count, c.size_bytes
    )
    select
        count(*), coalesce(sum(r.batch_count), 0), coalesce(sum(r.size_bytes), 0),
        coalesce(sum(r.size_bytes) filter (where r.base_offset < first_dirty), 0)
    into chunk_count, batch_count, size_bytes, clean_size_bytes
    from removed r;
    if clean_size_bytes > 0 then
        update compaction_state s set clean_bytes = s.clean_bytes - clean_size_bytes
        where s.partition_key = p_partition_key;
    end if;
    if chunk_count > 0 then
        update partition p set size_bytes = p.size_bytes - delete_below_log_start.size_bytes
        where p.partition_key = p_partition_key;
    end if;
    has_more := has_more or chunk_count = p_limit;
end
$$;

create function delete_chunks(
    p_partition_key bigint, p_limit integer, out chunk_count bigint, out batch_count bigint, out size_bytes bigint
)
language plpgsql volatile
as $$
-- Remove rows of a deleted partition, oldest first, at most p_limit. See delete_below_log_start for why it deletes up
-- to an offset.
declare
    last_base bigint;
begin
    select max(oldest.base_offset) into last_base
    from (
        select c.base_offset from chunk c where c.partition_key = p_partition_key order by c.base_offset limit p_limit
    ) oldest;
    with removed as (
        delete from chunk c
        where c.partition_key = p_partition_key and c.base_offset <= last_base
        returning c.batch_count, c.size_bytes
    )
    select count(*), coalesce(sum(r.batch_count), 0), coalesce(sum(r.size_bytes), 0)
    into chunk_count, batch_count, size_bytes
    from removed r;
end
$$;

create function rotate_inline(p_max_bytes bigint, p_max_age_ms bigint) returns boolean
language plpgsql volatile
as $$
-- Direct new inline bytes to the next empty slot, if the current one has grown to p_max_bytes or holds bytes that may
-- be older than p_max_age_ms (-1: at any age). Return whether it did; it does not if no slot is empty.
declare
    rotation  inline_rotation;
    next_slot smallint;
begin
    select * into rotation from inline_rotation for update;
    if pg_relation_size(format('inline_records_%s', rotation.current_slot)::regclass) = 0
        or not (
            pg_table_size(format('inline_records_%s', rotation.current_slot)::regclass) >= p_max_bytes
            or (
                p_max_age_ms >= 0
                and extract(epoch from clock_timestamp() - rotation.rotated_at) * 1000 >= p_max_age_ms
            )
        )
    then
        return false;
    end if;
    select slot into next_slot
    from generate_series(0, 7) as slot
    where slot <> rotation.current_slot and pg_relation_size(format('inline_records_%s', slot)::regclass) = 0
    order by (slot - rotation.current_slot + 8) % 8
    limit 1;
    if not found then
        return false;
    end if;
    update inline_rotation set current_slot = next_slot, rotated_at = clock_timestamp();
    return true;
end
$$;

create function lock_inline(p_slot smallint) returns boolean
language plpgsql volatile
set lock_timeout = '200ms'
as $$
-- Keep writers from a slot until the end of the transaction. Return false if it is the current slot. An append that took
-- this slot for the current one has ended then, or it waits and fills the emptied slot. Readers do not wait.
begin
    execute format('lock table inline_records_%s in share row exclusive mode', p_slot);
    return not exists (select from inline_rotation r where r.current_slot = p_slot);
end
$$;

create function truncate_inline(p_slot smallint) returns void
language plpgsql volatile
set lock_timeout = '200ms'
as $$
-- Empty a slot that is locked, and in which no row is alive since then. Readers wait for it.
begin
    execute format('truncate table inline_records_%s', p_slot);
end
$$;
