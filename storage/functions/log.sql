-- The log's decisions: offsets and duplicates on append, O(result) reads.

create function assign_offsets(
    p_partition_keys           bigint[],  -- distinct and ascending
    p_partition_positions      integer[], -- per batch: position in p_partition_keys
    p_record_counts            integer[], -- per batch
    p_max_timestamps_ms        bigint[],  -- per batch
    p_size_bytes               integer[], -- per batch
    p_producer_partition_keys  bigint[],  -- distinct pairs (partition, producer)
    p_producer_ids             bigint[],
    p_producer_positions       integer[], -- per batch: position in p_producer_ids, 0 = not idempotent
    p_producer_epochs          integer[], -- per batch
    p_base_sequences           integer[], -- per batch
    out refusals                   text[],
    out duplicates                 boolean[],
    out base_offsets               bigint[],
    out log_start_offsets          bigint[],
    out leader_epochs              integer[],
    out running_max_timestamps_ms  bigint[]
)
language plpgsql volatile
as $$
-- Decides, under the partitions' row locks and in the order given, which batches are appended and where.
--
-- The caller inserts the accepted batches (refusal null, duplicate false) in the same transaction. Row locks are taken
-- in the order of partition_key by every writer, and duplicates are looked up only once they are held: of two copies of
-- one batch in flight, the second waits here and then finds the first.
declare
    batch_total      constant integer := coalesce(cardinality(p_partition_positions), 0);
    partition_total  constant integer := coalesce(cardinality(p_partition_keys), 0);
    producer_total   constant integer := coalesce(cardinality(p_producer_ids), 0);
    sequence_limit   constant bigint  := 2147483648; -- sequences wrap from 2^31 - 1 to 0

    known        boolean[] := array_fill(false, array[partition_total]);
    changed      boolean[] := array_fill(false, array[partition_total]);
    next_offsets bigint[]  := array_fill(0::bigint, array[partition_total]);
    log_starts   bigint[]  := array_fill(0::bigint, array[partition_total]);
    epochs       integer[] := array_fill(0, array[partition_total]);
    greatest_ms  bigint[]  := array_fill(-1::bigint, array[partition_total]);
    added_bytes  bigint[]  := array_fill(0::bigint, array[partition_total]);

    state_known    boolean[] := array_fill(false, array[producer_total]);
    state_changed  boolean[] := array_fill(false, array[producer_total]);
    state_epochs   integer[] := array_fill(-1, array[producer_total]);
    state_next     integer[] := array_fill(0, array[producer_total]);
    state_counts   bigint[]  := array_fill(0::bigint, array[producer_total]);
    state_first    integer[] := array_fill(-1, array[producer_total, 5]);
    state_last     integer[] := array_fill(-1, array[producer_total, 5]);
    state_offsets  bigint[]  := array_fill(-1::bigint, array[producer_total, 5]);

    found_row       record;
    k               integer := 1; -- position of a partition
    s               integer;      -- position of a producer's state
    slot            integer;
    last_sequence   bigint;
    found_offset    bigint;
begin
    refusals                  := array_fill(null::text, array[batch_total]);
    duplicates                := array_fill(false, array[batch_total]);
    base_offsets              := array_fill(-1::bigint, array[batch_total]);
    log_start_offsets         := array_fill(-1::bigint, array[batch_total]);
    leader_epochs             := array_fill(-1, array[batch_total]);
    running_max_timestamps_ms := array_fill(-1::bigint, array[batch_total]);

    for found_row in
        select p.partition_key, p.next_offset, p.log_start_offset, p.leader_epoch, p.max_timestamp_ms
        from partition p
        where p.partition_key = any (p_partition_keys) and not p.deleted
        order by p.partition_key
        for no key update
    loop
        while p_partition_keys[k] <> found_row.partition_key loop
            k := k + 1;
        end loop;
        known[k]        := true;
        next_offsets[k] := found_row.next_offset;
        log_starts[k]   := found_row.log_start_offset;
        epochs[k]       := found_row.leader_epoch;
        greatest_ms[k]  := found_row.max_timestamp_ms;
    end loop;

    if producer_total > 0 then
        for found_row in
            select wanted.position, state.*
            from (
                select
                    unnest(p_producer_partition_keys) as partition_key,
                    unnest(p_producer_ids) as producer_id,
                    generate_series(1, producer_total) as position
            ) wanted
            join producer_state state using (partition_key, producer_id)
        loop
            s := found_row.position;
            state_known[s]  := true;
            state_epochs[s] := found_row.producer_epoch;
            state_next[s]   := found_row.next_sequence;
            state_counts[s] := found_row.batch_count;
            for j in 1..5 loop
                state_first[s][j]   := found_row.first_sequences[j];
                state_last[s][j]    := found_row.last_sequences[j];
                state_offsets[s][j] := found_row.base_offsets[j];
            end loop;
        end loop;
    end if;

    for i in 1..batch_total loop
        k := p_partition_positions[i];
        if not known[k] then
            refusals[i] := 'unknown_partition';
            continue;
        end if;
        log_start_offsets[i] := log_starts[k];
        leader_epochs[i]     := epochs[k];

        s := p_producer_positions[i];
        if s > 0 then
            last_sequence := (p_base_sequences[i]::bigint + p_record_counts[i] - 1) % sequence_limit;
            if state_known[s] then
                if p_producer_epochs[i] < state_epochs[s] then
                    refusals[i] := 'invalid_producer_epoch';
                    continue;
                end if;
                if p_producer_epochs[i] = state_epochs[s] then
                    found_offset := null;
                    for j in 1..least(state_counts[s], 5) loop
                        if state_first[s][j] = p_base_sequences[i] and state_last[s][j] = last_sequence then
                            found_offset := state_offsets[s][j];
                            exit;
                        end if;
                    end loop;
                    if found_offset is not null then
                        duplicates[i]   := true;
                        base_offsets[i] := found_offset;
                        continue;
                    end if;
                    if p_base_sequences[i] <> state_next[s] then
                        refusals[i] := 'out_of_order_sequence';
                        continue;
                    end if;
                elsif p_base_sequences[i] <> 0 then
                    refusals[i] := 'out_of_order_sequence';
                    continue;
                else
                    state_counts[s] := 0;
                end if;
            end if;
            slot := state_counts[s] % 5 + 1;
            state_known[s]            := true;
            state_changed[s]          := true;
            state_epochs[s]           := p_producer_epochs[i];
            state_next[s]             := (last_sequence + 1) % sequence_limit;
            state_counts[s]           := state_counts[s] + 1;
            state_first[s][slot]      := p_base_sequences[i];
            state_last[s][slot]       := last_sequence;
            state_offsets[s][slot]    := next_offsets[k];
        end if;

        changed[k]                   := true;
        base_offsets[i]              := next_offsets[k];
        next_offsets[k]              := next_offsets[k] + p_record_counts[i];
        added_bytes[k]               := added_bytes[k] + p_size_bytes[i];
        greatest_ms[k]               := greatest(greatest_ms[k], p_max_timestamps_ms[i]);
        running_max_timestamps_ms[i] := greatest_ms[k];
    end loop;

    update partition p
    set next_offset      = grown.next_offset,
        size_bytes       = p.size_bytes + grown.added_bytes,
        max_timestamp_ms = grown.max_timestamp_ms
    from (
        select
            unnest(p_partition_keys) as partition_key,
            unnest(changed) as changed,
            unnest(next_offsets) as next_offset,
            unnest(added_bytes) as added_bytes,
            unnest(greatest_ms) as max_timestamp_ms
    ) grown
    where p.partition_key = grown.partition_key and grown.changed;

    if true = any (state_changed) then
        insert into producer_state as state (
            partition_key, producer_id, producer_epoch, next_sequence, batch_count,
            first_sequences, last_sequences, base_offsets, appended_at
        )
        select
            p_producer_partition_keys[position], p_producer_ids[position], state_epochs[position],
            state_next[position], state_counts[position],
            array(select unnest(state_first[position:position])),
            array(select unnest(state_last[position:position])),
            array(select unnest(state_offsets[position:position])),
            clock_timestamp()
        from generate_series(1, producer_total) as position
        where state_changed[position]
        order by 1, 2
        on conflict (partition_key, producer_id) do update set
            producer_epoch  = excluded.producer_epoch,
            next_sequence   = excluded.next_sequence,
            batch_count     = excluded.batch_count,
            first_sequences = excluded.first_sequences,
            last_sequences  = excluded.last_sequences,
            base_offsets    = excluded.base_offsets,
            appended_at     = excluded.appended_at;
    end if;
end
$$;

create function read_batches(
    p_partition_keys  bigint[], -- per request
    p_offsets         bigint[], -- per request
    p_max_bytes       bigint[], -- per request
    p_total_max_bytes bigint
) returns table (
    request_position      integer,
    log_start_offset      bigint,
    high_watermark        bigint,
    leader_epoch          integer,
    partition_size_bytes  bigint,
    base_offset           bigint,
    last_offset           bigint,
    max_timestamp_ms      bigint,
    records               bytea
)
language plpgsql stable
set enable_sort = off -- see first_batch_at
as $$
-- Per request in order: one row of state (no row: unknown partition), then one row per batch from the one that holds
-- the offset, or the next after a gap. Stable, so all of it is one snapshot. Sizes are counted from size_bytes: the
-- bytes of a batch that is not returned are never fetched from TOAST.
declare
    remaining_bytes  bigint := p_total_max_bytes;
    limit_bytes      bigint;
    returned_any     boolean := false;
    end_offset       bigint;
    from_offset      bigint;
    holder           record;
    candidate        record;
begin
    for i in 1..coalesce(cardinality(p_partition_keys), 0) loop
        base_offset := null; last_offset := null; max_timestamp_ms := null; records := null;
        request_position := i;
        select p.log_start_offset, p.next_offset, p.leader_epoch, p.size_bytes
        into log_start_offset, high_watermark, leader_epoch, partition_size_bytes
        from partition p
        where p.partition_key = p_partition_keys[i] and not p.deleted;
        continue when not found;
        end_offset := high_watermark;
        return next;

        continue when p_offsets[i] < log_start_offset or p_offsets[i] >= end_offset;
        limit_bytes := least(p_max_bytes[i], remaining_bytes);
        continue when limit_bytes <= 0 and returned_any;

        select b.base_offset, b.last_offset into holder
        from batch b
        where b.partition_key = p_partition_keys[i] and b.base_offset <= p_offsets[i]
        order by b.base_offset desc
        limit 1;
        from_offset := case when holder.last_offset >= p_offsets[i] then holder.base_offset else p_offsets[i] end;

        log_start_offset := null; high_watermark := null; leader_epoch := null; partition_size_bytes := null;
        for candidate in
            select b.base_offset, b.last_offset, b.max_timestamp_ms, b.size_bytes, b.records
            from batch b
            where b.partition_key = p_partition_keys[i] and b.base_offset >= from_offset
            order by b.base_offset
        loop
            exit when candidate.size_bytes > limit_bytes and returned_any;
            base_offset      := candidate.base_offset;
            last_offset      := candidate.last_offset;
            max_timestamp_ms := candidate.max_timestamp_ms;
            records          := candidate.records;
            return next;
            returned_any    := true;
            limit_bytes     := limit_bytes - candidate.size_bytes;
            remaining_bytes := remaining_bytes - candidate.size_bytes;
            exit when limit_bytes <= 0;
        end loop;
    end loop;
end
$$;

create function first_batch_at(p_partition_key bigint, p_timestamp_ms bigint, p_from_offset bigint) returns table (
    base_offset       bigint,
    last_offset       bigint,
    max_timestamp_ms  bigint,
    records           bytea
)
language plpgsql stable
-- The planner takes a partition that its statistics do not know yet for one of a single row, and may then sort a whole
-- partition of millions. Without sorting, only the index that has the order is left to it.
set enable_sort = off
as $$
-- The first batch from p_from_offset on whose greatest timestamp is at least p_timestamp_ms. running_max_timestamp_ms rises
-- with the offset, so the index leads to where it first reaches that time; if the batch that did so is no longer in the
-- log, the filter goes on to the next that has it.
begin
    return query
        select b.base_offset, b.last_offset, b.max_timestamp_ms, b.records
        from batch b
        where b.partition_key = p_partition_key
            and b.running_max_timestamp_ms >= p_timestamp_ms
            and b.max_timestamp_ms >= p_timestamp_ms
            and b.base_offset >= p_from_offset
            and b.last_offset >= (
                select p.log_start_offset from partition p where p.partition_key = p_partition_key and not p.deleted
            )
        order by b.running_max_timestamp_ms, b.base_offset
        limit 1;
end
$$;

create function first_offset_after(p_partition_key bigint, p_from_offset bigint, p_timestamp_ms bigint) returns bigint
language plpgsql stable
set enable_sort = off -- see first_batch_at
as $$
-- Base offset of the first batch from p_from_offset on that is younger than p_timestamp_ms, by its own time or else by
-- that of its arrival; null if there is none.
begin
    return (
        select b.base_offset
        from batch b
        where b.partition_key = p_partition_key
            and b.running_max_timestamp_ms > p_timestamp_ms
            and coalesce(b.append_timestamp_ms, b.max_timestamp_ms) > p_timestamp_ms
            and b.base_offset >= p_from_offset
        order by b.running_max_timestamp_ms, b.base_offset
        limit 1
    );
end
$$;
