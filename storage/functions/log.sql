-- The log's decisions: offsets and duplicates on append, O(result) reads.

create function append_chunks(
    p_partition_keys           bigint[],  -- distinct and ascending
    p_wait                     boolean,   -- for partitions locked by other transactions; else their entries are refused
    p_object_id                bigint,    -- where the bytes lie; null: inline
    p_chunk_partitions         integer[], -- per candidate chunk: position in p_partition_keys
    p_chunk_positions          bigint[],  -- per candidate chunk: where its bytes begin in the object or lie in the slot; null: inline
    p_chunk_records            bytea[],   -- per candidate chunk: its bytes, if inline; null: the caller inserts them
    p_entry_chunks             integer[], -- per entry: its candidate chunk, ascending
    p_batch_counts             integer[], -- per entry
    p_record_counts            integer[], -- per entry
    p_max_timestamps_ms        bigint[],  -- per entry
    p_size_bytes               integer[], -- per entry
    p_producer_partition_keys  bigint[],  -- distinct pairs (partition, producer)
    p_producer_ids             bigint[],
    p_producer_positions       integer[], -- per entry: position in p_producer_ids, 0 = not idempotent
    p_producer_epochs          integer[], -- per entry
    p_base_sequences           integer[], -- per entry
    p_transactional            boolean[], -- per entry
    p_written_slot             smallint default null, -- of the bytes, if they lie inline already, at p_chunk_positions
    out sealed             boolean,       -- nothing was written: the object takes no more appends
    out refusals           text[],        -- per entry, as are the next five
    out duplicates         boolean[],
    out base_offsets       bigint[],
    out log_start_offsets  bigint[],
    out leader_epochs      integer[],
    out last_stable_offsets bigint[],     -- null: no transaction is under way in the partition
    out inline_slot        smallint,      -- where inline bytes go, and per chunk:
    out chunk_candidates   integer[],
    out chunk_skipped      integer[],     -- bytes of the candidate before the chunk
    out chunk_sizes        integer[],
    out chunk_bases        bigint[],
    out chunk_positions    bigint[],
    out transaction_id     bigint,        -- by which this database tells later that it has what was appended,
    out written_lsn        bigint         -- and up to where its log then is on disk; both null: nothing was appended
)
language plpgsql volatile
-- To plan these statements for the array lengths of each call takes longer than to run them, so use a generic plan. The
-- generic plan must also suit a long log, so it looks rows up one by one.
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off
set enable_mergejoin = off
as $$
-- Decide, under the partitions' row locks and in the order given, which entries are appended and where, and write the
-- rows of the index. An entry is one idempotent batch, or consecutive batches without a producer. Entries of one
-- candidate chunk lie back to back. Consecutive accepted entries become one chunk: the whole candidate, unless some of
-- it is refused. Every writer locks rows in the order of partition_key, and duplicates are looked up only under the
-- locks. So of two copies of one batch in flight, the second waits here and then finds the first. The end of the log is
-- looked up under the locks as well, by a statement of its own. A lock alone makes no new version of the row, so the
-- statement that waited for the lock may have seen an older state.
declare
    entry_total      constant integer := coalesce(cardinality(p_entry_chunks), 0);
    partition_total  constant integer := coalesce(cardinality(p_partition_keys), 0);
    producer_total   constant integer := coalesce(cardinality(p_producer_ids), 0);
    sequence_limit   constant bigint  := 2147483648; -- sequences wrap from 2^31 - 1 to 0
    now_ms           constant bigint  := (extract(epoch from clock_timestamp()) * 1000)::bigint;

    any_open     boolean := false; -- whether a transaction is, in any of the partitions
    missing      bigint[]  := p_partition_keys;
    known        boolean[] := array_fill(false, array[partition_total]);
    busy         boolean[] := array_fill(false, array[partition_total]);
    changed      boolean[] := array_fill(false, array[partition_total]);
    next_offsets bigint[]  := array_fill(0::bigint, array[partition_total]);
    log_starts   bigint[]  := array_fill(0::bigint, array[partition_total]);
    epochs       integer[] := array_fill(0, array[partition_total]);
    greatest_ms  bigint[]  := array_fill(-1::bigint, array[partition_total]);
    appended     bigint[]  := array_fill(0::bigint, array[partition_total]);
    stable       bigint[]  := array_fill(null::bigint, array[partition_total]); -- where the first open transaction began

    -- For each producer, the open transaction in the partition: its epoch (null: no transaction is open), and the
    -- offset at which it began.
    open_epochs    integer[] := array_fill(null::integer, array[producer_total]);
    open_first     bigint[]  := array_fill(null::bigint, array[producer_total]);
    open_begun     boolean[] := array_fill(false, array[producer_total]); -- by this call
    open_at_zero   boolean[] := array_fill(false, array[producer_total]); -- its first batch has sequence 0

    state_known    boolean[] := array_fill(false, array[producer_total]);
    state_changed  boolean[] := array_fill(false, array[producer_total]);
    state_since    bigint[]  := array_fill(-1::bigint, array[producer_total]); -- its row; none yet: -1
    state_epochs   integer[] := array_fill(-1, array[producer_total]);
    state_next     integer[] := array_fill(0, array[producer_total]);
    state_counts   bigint[]  := array_fill(0::bigint, array[producer_total]);
    state_first    integer[] := array_fill(-1, array[producer_total, 5]);
    state_last     integer[] := array_fill(-1, array[producer_total, 5]);
    state_offsets  bigint[]  := array_fill(-1::bigint, array[producer_total, 5]);

    chunk_total      integer := 0; -- chunks to insert, and per chunk:
    chunk_lasts      bigint[];
    chunk_batches    integer[];
    chunk_max_ms     bigint[];
    chunk_running_ms bigint[];
    chunk_appended   bigint[];

    found_row       record;
    newest          record;
    c               integer := 0;     -- candidate of the entry
    skipped_bytes   integer := 0;     -- of the candidate, before the entry
    open_chunk      boolean := false; -- whether the entry before this one was accepted, in the same candidate
    k               integer := 1;     -- position of a partition
    s               integer;          -- position of a producer's state
    ring            integer;
    last_sequence   bigint;
    found_offset    bigint;
begin
    sealed            := false;
    refusals          := array_fill(null::text, array[entry_total]);
    duplicates        := array_fill(false, array[entry_total]);
    base_offsets      := array_fill(-1::bigint, array[entry_total]);
    log_start_offsets := array_fill(-1::bigint, array[entry_total]);
    leader_epochs     := array_fill(-1, array[entry_total]);
    last_stable_offsets := array_fill(null::bigint, array[entry_total]);

    if p_object_id is not null then
        -- The lock keeps the object open until the end of this transaction, however long its commit takes. Otherwise the
        -- roller could seal the object and remove it, because the roller does not see these chunks yet.
        perform 1 from log_object o where o.object_id = p_object_id and o.sealed_at is null for share;
        if not found then
            sealed := true;
            return;
        end if;
    elsif p_written_slot is not null then
        inline_slot := p_written_slot;
    else
        select r.current_slot into inline_slot from inline_rotation r;
    end if;

    if not p_wait then
        select array_agg(free.partition_key) into missing
        from (
            select p.partition_key
            from partition p
            where p.partition_key = any (p_partition_keys) and not p.deleted
                and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id)
            order by p.partition_key
            for no key update skip locked
        ) free;
    end if;
    for found_row in
        select
            p.partition_key, p.next_offset, p.log_start_offset, p.leader_epoch, p.max_timestamp_ms, p.appended_bytes
        from partition p
        where p.partition_key = any (missing) and not p.deleted
            and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id)
        order by p.partition_key
        for no key update
    loop
        while p_partition_keys[k] <> found_row.partition_key loop
            k := k + 1;
        end loop;
        known[k]        := true;
        log_starts[k]   := found_row.log_start_offset;
        epochs[k]       := found_row.leader_epoch;
        -- The same values as in partition_log. A query for one partition opens one table of chunk, not all of them.
        select c.last_offset, c.appended_bytes, c.running_max_timestamp_ms into newest
        from chunk c
        where c.partition_key = found_row.partition_key and c.base_offset >= found_row.next_offset
        order by c.base_offset desc
        limit 1;
        next_offsets[k] := coalesce(newest.last_offset + 1, found_row.next_offset);
        appended[k]     := coalesce(newest.appended_bytes, found_row.appended_bytes);
        greatest_ms[k]  := greatest(found_row.max_timestamp_ms, newest.running_max_timestamp_ms);
    end loop;
    if not p_wait and coalesce(cardinality(missing), 0) < partition_total then
        for i in 1..partition_total loop
            continue when known[i];
            perform 1 from partition p
            where p.partition_key = p_partition_keys[i] and not p.deleted
                and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id);
            busy[i] := found;
        end loop;
    end if;

    k := 1;
    for found_row in
        select o.partition_key, min(o.first_offset) as first_offset
        from open_transaction o
        where o.partition_key = any (p_partition_keys) and o.first_offset is not null
        group by o.partition_key
        order by o.partition_key
    loop
        while p_partition_keys[k] <> found_row.partition_key loop
            k := k + 1;
        end loop;
        stable[k] := found_row.first_offset;
        any_open  := true;
    end loop;
    if producer_total > 0 and (any_open or true = any (p_transactional)) then
        for found_row in
            select
                wanted.position, o.producer_epoch, o.first_offset, o.begins_at_zero
            from (
                select
                    unnest(p_producer_partition_keys) as partition_key,
                    unnest(p_producer_ids) as producer_id,
                    generate_series(1, producer_total) as position
            ) wanted
            join open_transaction o using (partition_key, producer_id)
        loop
            open_epochs[found_row.position] := found_row.producer_epoch;
            open_first[found_row.position]  := found_row.first_offset;
            open_at_zero[found_row.position] := found_row.begins_at_zero;
        end loop;
    end if;

    if producer_total > 0 then
        for found_row in
            select wanted.position, state.*
            from (
                select
                    unnest(p_producer_partition_keys) as partition_key,
                    unnest(p_producer_ids) as producer_id,
                    generate_series(1, producer_total) as position
            ) wanted
            cross join lateral (
                select p.*
                from producer_state p
                where p.partition_key = wanted.partition_key and p.producer_id = wanted.producer_id
                order by p.since_offset desc
                limit 1
            ) state
        loop
            s := found_row.position;
            state_known[s]  := true;
            state_epochs[s] := found_row.producer_epoch;
            state_next[s]   := found_row.next_sequence;
            state_counts[s] := found_row.batch_count;
            state_since[s]  := found_row.since_offset;
            for j in 1..5 loop
                state_first[s][j]   := found_row.first_sequences[j];
                state_last[s][j]    := found_row.last_sequences[j];
                state_offsets[s][j] := found_row.base_offsets[j];
            end loop;
        end loop;
    end if;

    for i in 1..entry_total loop
        if p_entry_chunks[i] <> c then
            c := p_entry_chunks[i];
            skipped_bytes := 0;
            open_chunk := false;
        else
            skipped_bytes := skipped_bytes + p_size_bytes[i - 1];
        end if;
        k := p_chunk_partitions[c];
        if not known[k] then
            refusals[i] := case when busy[k] then 'partition_busy' else 'unknown_partition' end;
            open_chunk := false;
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
                    open_chunk := false;
                    continue;
                end if;
                -- A batch of a transaction that has ended does not count as a duplicate: a client that repeats it must
                -- learn of the end.
                if p_producer_epochs[i] = state_epochs[s]
                    and (not p_transactional[i] or open_epochs[s] = p_producer_epochs[i])
                then
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
                        open_chunk := false;
                        continue;
                    end if;
                end if;
            end if;
            if p_transactional[i] then
                if open_epochs[s] is distinct from p_producer_epochs[i] then
                    refusals[i] := case
                        when open_epochs[s] > p_producer_epochs[i] or exists (
                            select from transactional_producer t
                            where t.producer_id = p_producer_ids[s] and t.producer_epoch > p_producer_epochs[i]
                        ) then 'invalid_producer_epoch'
                        -- The producer id has used up its epochs, and its transactional id has another producer id now.
                        when state_known[s] and not exists (
                            select from transactional_producer t where t.producer_id = p_producer_ids[s]
                        ) then 'invalid_producer_epoch'
                        else 'not_in_transaction' end;
                    open_chunk := false;
                    continue;
                end if;
            elsif open_first[s] is not null then
                refusals[i] := 'invalid_txn_state';
                open_chunk := false;
                continue;
            end if;
            if state_known[s] then
                if p_producer_epochs[i] = state_epochs[s] then
                    if p_base_sequences[i] <> state_next[s] then
                        refusals[i] := 'out_of_order_sequence';
                        open_chunk := false;
                        continue;
                    end if;
                elsif p_base_sequences[i] <> 0 then
                    refusals[i] := 'out_of_order_sequence';
                    open_chunk := false;
                    continue;
                else
                    state_counts[s] := 0;
                end if;
            elsif open_at_zero[s] and p_base_sequences[i] <> 0 then
                -- The producer's first batch has not arrived yet, and would be refused after this batch.
                refusals[i] := 'out_of_order_sequence';
                open_chunk := false;
                continue;
            end if;
            ring := state_counts[s] % 5 + 1;
            state_known[s]            := true;
            state_changed[s]          := true;
            state_epochs[s]           := p_producer_epochs[i];
            state_next[s]             := (last_sequence + 1) % sequence_limit;
            state_counts[s]           := state_counts[s] + 1;
            state_first[s][ring]      := p_base_sequences[i];
            state_last[s][ring]       := last_sequence;
            state_offsets[s][ring]    := next_offsets[k];
            if p_transactional[i] and open_first[s] is null then
                open_first[s] := next_offsets[k];
                open_begun[s] := true;
                stable[k]     := coalesce(stable[k], next_offsets[k]);
            end if;
        end if;

        changed[k]      := true;
        base_offsets[i] := next_offsets[k];
        next_offsets[k] := next_offsets[k] + p_record_counts[i];
        appended[k]     := appended[k] + p_size_bytes[i];
        greatest_ms[k]  := greatest(greatest_ms[k], p_max_timestamps_ms[i]);
        if open_chunk then
            chunk_lasts[chunk_total]      := next_offsets[k] - 1;
            chunk_batches[chunk_total]    := chunk_batches[chunk_total] + p_batch_counts[i];
            chunk_sizes[chunk_total]      := chunk_sizes[chunk_total] + p_size_bytes[i];
            chunk_max_ms[chunk_total]     := greatest(chunk_max_ms[chunk_total], p_max_timestamps_ms[i]);
            chunk_running_ms[chunk_total] := greatest_ms[k];
            chunk_appended[chunk_total]   := appended[k];
        else
            open_chunk  := true;
            chunk_total := chunk_total + 1;
            chunk_candidates[chunk_total] := c;
            chunk_positions[chunk_total]  := case
                when p_object_id is null and p_written_slot is null then nextval('inline_position')
                else p_chunk_positions[c] + skipped_bytes end;
            chunk_skipped[chunk_total]    := skipped_bytes;
            chunk_bases[chunk_total]      := base_offsets[i];
            chunk_lasts[chunk_total]      := next_offsets[k] - 1;
            chunk_batches[chunk_total]    := p_batch_counts[i];
            chunk_sizes[chunk_total]      := p_size_bytes[i];
            chunk_max_ms[chunk_total]     := p_max_timestamps_ms[i];
            chunk_running_ms[chunk_total] := greatest_ms[k];
            chunk_appended[chunk_total]   := appended[k];
        end if;
    end loop;

    for i in 1..entry_total loop
        last_stable_offsets[i] := stable[p_chunk_partitions[p_entry_chunks[i]]];
    end loop;
    if chunk_total = 0 then
        return;
    end if;

    insert into chunk (
        partition_key, base_offset, last_offset, max_timestamp_ms, running_max_timestamp_ms, append_timestamp_ms,
        object_id, position, size_bytes, appended_bytes, batch_count, leader_epoch, inline_slot, final_heads
    )
    select
        p_partition_keys[p_chunk_partitions[chunk_candidates[i]]], chunk_bases[i], chunk_lasts[i], chunk_max_ms[i],
        chunk_running_ms[i], case when chunk_max_ms[i] < 0 then now_ms end,
        p_object_id, chunk_positions[i], chunk_sizes[i], chunk_appended[i], chunk_batches[i],
        epochs[p_chunk_partitions[chunk_candidates[i]]], append_chunks.inline_slot, false
    from generate_series(1, chunk_total) i;

    if p_chunk_records is not null then
        insert into inline_records (slot, position, partition_key, base_offset, records)
        select
            append_chunks.inline_slot, chunk_positions[i], p_partition_keys[p_chunk_partitions[chunk_candidates[i]]],
            chunk_bases[i],
            case
                when chunk_sizes[i] = octet_length(p_chunk_records[chunk_candidates[i]]) then p_chunk_records[chunk_candidates[i]]
                else substring(p_chunk_records[chunk_candidates[i]] from chunk_skipped[i] + 1 for chunk_sizes[i])
            end
        from generate_series(1, chunk_total) i;
    end if;

    if true = any (open_begun) then
        update open_transaction o
        set first_offset = begun.first_offset
        from unnest(p_producer_partition_keys, p_producer_ids, open_begun, open_first)
            begun (partition_key, producer_id, begun, first_offset)
        where begun.begun and o.partition_key = begun.partition_key and o.producer_id = begun.producer_id;
    end if;

    if true = any (state_changed) then
        for i in 1..producer_total loop
            continue when not state_changed[i];
            update producer_state p
            set update_count    = p.update_count + 1,
                producer_epoch  = state_epochs[i],
                next_sequence   = state_next[i],
                batch_count     = state_counts[i],
                first_sequences = array(select unnest(state_first[i:i])),
                last_sequences  = array(select unnest(state_last[i:i])),
                base_offsets    = array(select unnest(state_offsets[i:i])),
                appended_at     = clock_timestamp()
            where p.partition_key = p_producer_partition_keys[i] and p.producer_id = p_producer_ids[i]
                and p.since_offset = state_since[i] and p.update_count < 32; -- versions that a look-up may have to pass
            continue when found;
            delete from producer_state p
            where p.partition_key = p_producer_partition_keys[i] and p.producer_id = p_producer_ids[i]
                and p.since_offset = state_since[i];
            ring := (state_counts[i] - 1) % 5 + 1;
            insert into producer_state (
                partition_key, producer_id, since_offset, update_count, producer_epoch, next_sequence, batch_count,
                first_sequences, last_sequences, base_offsets, appended_at
            ) values (
                p_producer_partition_keys[i], p_producer_ids[i], state_offsets[i][ring], 0, state_epochs[i], state_next[i],
                state_counts[i], array(select unnest(state_first[i:i])), array(select unnest(state_last[i:i])),
                array(select unnest(state_offsets[i:i])), clock_timestamp()
            );
        end loop;
    end if;

    if chunk_total > 0 then
        transaction_id := pg_current_xact_id()::text::bigint;
        written_lsn := (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint;
    end if;
end
$$;

create function append_one(
    p_partition_key     bigint,
    p_batch_count       integer,
    p_record_count      integer,
    p_max_timestamp_ms  bigint,
    p_records           bytea,
    p_producer_id       bigint,  -- -1 = not idempotent; else there is one batch, which is not transactional
    p_producer_epoch    integer,
    p_base_sequence     integer,
    out undecided          boolean, -- nothing was written: append_chunks has to decide
    out base_offset        bigint,
    out log_start_offset   bigint,
    out leader_epoch       integer,
    out last_stable_offset bigint,  -- null: no transaction is under way in the partition
    out transaction_id     bigint,
    out written_lsn        bigint
)
language plpgsql volatile
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
-- Append one small chunk to one partition, the smallest commit, as append_plain does. Without arrays it takes less time:
-- Postgres prepares each expression of a statement anew at each call.
declare
    sequence_limit constant bigint := 2147483648; -- sequences wrap from 2^31 - 1 to 0
    row_end      bigint;
    greatest_ms  bigint;
    appended     bigint;
    slot         smallint;
    place        tid;     -- of the producer's state
    renews       boolean;
    new_base     bigint;
    open_since   bigint;
begin
    undecided := true;
    select
        p.next_offset, p.log_start_offset, p.leader_epoch, p.max_timestamp_ms, p.appended_bytes,
        (select r.current_slot from inline_rotation r)
    into row_end, log_start_offset, leader_epoch, greatest_ms, appended, slot
    from partition p
    where p.partition_key = p_partition_key and not p.deleted
        and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id)
    for no key update skip locked;
    if not found then
        return;
    end if;
    if p_producer_id >= 0 then
        select s.place, s.update_count >= 32 -- as in append_chunks
        into place, renews
        from (
            select p.ctid as place, p.producer_epoch, p.next_sequence, p.update_count
            from producer_state p
            where p.partition_key = p_partition_key and p.producer_id = p_producer_id
            order by p.since_offset desc
            limit 1
        ) s
        where s.producer_epoch = p_producer_epoch and s.next_sequence = p_base_sequence
            and not exists (
                select from open_transaction o
                where o.partition_key = p_partition_key and o.producer_id = p_producer_id and o.first_offset is not null
            );
        if not found then
            return;
        end if;
    end if;
    undecided := false;
    -- The end of the log is looked up by a statement that begins after the lock was acquired: see append_chunks.
    with appended_chunk as (
        insert into chunk (
            partition_key, base_offset, last_offset, max_timestamp_ms, running_max_timestamp_ms,
            append_timestamp_ms, position, size_bytes, appended_bytes, batch_count, leader_epoch, inline_slot,
            final_heads
        )
        select
            p_partition_key, log_end.next_offset, log_end.next_offset + p_record_count - 1, p_max_timestamp_ms,
            greatest(greatest_ms, log_end.max_timestamp_ms, p_max_timestamp_ms),
            case when p_max_timestamp_ms < 0 then (extract(epoch from clock_timestamp()) * 1000)::bigint end,
            nextval('inline_position'), octet_length(p_records), log_end.appended_bytes + octet_length(p_records),
            p_batch_count, append_one.leader_epoch, slot, false
        from (
            select
                coalesce(newest.last_offset + 1, row_end) as next_offset,
                coalesce(newest.appended_bytes, appended) as appended_bytes,
                newest.running_max_timestamp_ms as max_timestamp_ms
            from (values (true)) one
            left join lateral (
                select c.last_offset, c.appended_bytes, c.running_max_timestamp_ms
                from chunk c
                where c.partition_key = p_partition_key and c.base_offset >= row_end
                order by c.base_offset desc
                limit 1
            ) newest on true
        ) log_end
        returning base_offset, position
    )
    insert into inline_records (slot, position, partition_key, base_offset, records)
    select slot, a.position, p_partition_key, a.base_offset, p_records
    from appended_chunk a
    returning base_offset, (select min(o.first_offset) from open_transaction o where o.partition_key = p_partition_key)
    into new_base, open_since;

    if p_producer_id >= 0 then
        if renews then
            -- The update below fills this row.
            with passed as (
                delete from producer_state p
                where p.ctid = place
                returning p.*
            )
            insert into producer_state (
                partition_key, producer_id, since_offset, update_count, producer_epoch, next_sequence, batch_count,
                first_sequences, last_sequences, base_offsets, appended_at
            )
            select
                p.partition_key, p.producer_id, new_base, -1, p.producer_epoch, p.next_sequence, p.batch_count,
                p.first_sequences, p.last_sequences, p.base_offsets, p.appended_at
            from passed p
            returning ctid into place;
        end if;
        update producer_state p
        set update_count  = p.update_count + 1,
            next_sequence = (p_base_sequence + p_record_count::bigint) % sequence_limit,
            batch_count   = p.batch_count + 1,
            first_sequences[p.batch_count % 5 + 1] = p_base_sequence,
            last_sequences[p.batch_count % 5 + 1]  = (p_base_sequence + p_record_count::bigint - 1) % sequence_limit,
            base_offsets[p.batch_count % 5 + 1]    = new_base,
            appended_at   = clock_timestamp()
        where p.ctid = place;
        if not found then
            raise exception 'a producer was idle and has been forgotten since the look-up'
                using errcode = 'serialization_failure'; -- the caller tries again
        end if;
    end if;
    base_offset        := new_base;
    last_stable_offset := open_since;
    transaction_id     := pg_current_xact_id()::text::bigint;
    written_lsn        := (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint;
end
$$;

create function append_plain(
    p_partition_keys     bigint[],  -- distinct and ascending, each with one chunk
    p_object_id          bigint,    -- where the bytes lie; null: inline
    p_position           bigint,    -- where the first chunk begins in the object, and the others behind it; null: inline
    p_chunk_records      bytea[],   -- per partition: the bytes; null if they lie in an object
    p_chunks             bigint[],  -- per partition a row: batches, records, bytes, greatest timestamp
    p_runs               bigint[],  -- a row per run of one producer's batches in one partition: 1 the partition's position
                                    -- in p_partition_keys, 2 producer id, 3 epoch, 4 whether it is transactional (1), 5
                                    -- batches (five at most), 6 next sequence. Then a value per batch, null for missing
                                    -- ones: from 7 on the first sequence, from 12 on the last sequence, from 17 on the
                                    -- number of records before it in the chunk
    out sealed             boolean,  -- nothing was written: the object takes no more appends
    out undecided          boolean,  -- nothing was written: append_chunks has to decide
    out refusals           text[],   -- per partition, as are the next four; null: none was refused
    out base_offsets       bigint[], -- of the chunk; null: refused
    out log_start_offsets  bigint[],
    out leader_epochs      integer[],
    out last_stable_offsets bigint[], -- null: no transaction is under way in the partition
    out transaction_id     bigint,
    out written_lsn        bigint
)
language plpgsql volatile
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
-- Append a usual commit as append_chunks does, in few statements for any number of partitions. In a usual commit each
-- partition that is free receives one chunk, and the batches of each producer continue its sequence. In any other case
-- nothing is written, and the caller calls append_chunks.
declare
    partition_total constant integer := cardinality(p_partition_keys);
    run_total       constant integer := coalesce(array_length(p_runs, 1), 0);

    free_keys    bigint[];
    bases        bigint[];  -- where the partition's log ends; null: it is not free
    greatest_ms  bigint[];
    appended     bigint[];
    positions    bigint[];
    slot         smallint;
    position_at  bigint := p_position; -- of the next chunk in the object
    next_offset  bigint;
    end_bytes    bigint;
    newest_ms    bigint;
    stable       bigint;

    -- Per run:
    place        tid;
    earlier      bigint;
    renews       boolean;
    begins       boolean;
    places       tid[];     -- the row of its producer's state; null: there is none
    counts       bigint[];  -- batches of its epoch before it
    renewed      boolean[]; -- whether it begins a row
    begun        boolean[]; -- whether it begins its transaction in the partition
    base         bigint;
    slot_1       integer;
    slot_2       integer;
    slot_3       integer;
    slot_4       integer;
    slot_5       integer;
begin
    sealed    := false;
    undecided := false;
    if p_object_id is not null then
        -- See append_chunks for the lock.
        perform 1 from log_object o where o.object_id = p_object_id and o.sealed_at is null for share;
        if not found then
            sealed := true;
            return;
        end if;
    end if;
    select
        array_agg(free.partition_key), array_agg(free.next_offset), array_agg(free.log_start_offset),
        array_agg(free.leader_epoch), array_agg(free.max_timestamp_ms), array_agg(free.appended_bytes),
        case when p_object_id is null then (select r.current_slot from inline_rotation r) end
    into free_keys, bases, log_start_offsets, leader_epochs, greatest_ms, appended, slot
    from (
        select
            p.partition_key, p.next_offset, p.log_start_offset, p.leader_epoch, p.max_timestamp_ms, p.appended_bytes
        from partition p
        where p.partition_key = any (p_partition_keys) and not p.deleted
            and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id)
        order by p.partition_key
        for no key update skip locked
    ) free;
    if free_keys is distinct from p_partition_keys then
        -- Put the values of the free partitions at the positions of their keys.
        select
            array_agg(bases[free.place] order by wanted.place),
            array_agg(log_start_offsets[free.place] order by wanted.place),
            array_agg(leader_epochs[free.place] order by wanted.place),
            array_agg(greatest_ms[free.place] order by wanted.place),
            array_agg(appended[free.place] order by wanted.place),
            array_agg(
                case
                    when free.place is not null then null
                    when exists (
                        select from partition p
                        where p.partition_key = wanted.partition_key and not p.deleted
                            and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id)
                    ) then 'partition_busy'
                    else 'unknown_partition'
                end
                order by wanted.place)
        into bases, log_start_offsets, leader_epochs, greatest_ms, appended, refusals
        from unnest(p_partition_keys) with ordinality wanted (partition_key, place)
        left join unnest(free_keys) with ordinality free (partition_key, place) using (partition_key);
        if free_keys is null then
            base_offsets        := bases;
            last_stable_offsets := bases; -- all null
            return;
        end if;
    end if;

    for k in 1..partition_total loop
        if p_object_id is null then
            positions[k] := nextval('inline_position');
        else
            positions[k] := position_at;
            position_at := position_at + p_chunks[k][3];
        end if;
        if bases[k] is null then
            last_stable_offsets[k] := null;
            continue;
        end if;
        -- This statement begins after the lock was acquired, and names one partition: see append_chunks.
        select newest.last_offset + 1, newest.appended_bytes, newest.running_max_timestamp_ms,
            (select min(o.first_offset) from open_transaction o where o.partition_key = p_partition_keys[k])
        into next_offset, end_bytes, newest_ms, stable
        from (values (true)) one
        left join lateral (
            select c.last_offset, c.appended_bytes, c.running_max_timestamp_ms
            from chunk c
            where c.partition_key = p_partition_keys[k] and c.base_offset >= bases[k]
            order by c.base_offset desc
            limit 1
        ) newest on true;
        last_stable_offsets[k] := stable;
        if next_offset is not null then
            bases[k]       := next_offset;
            appended[k]    := end_bytes;
            greatest_ms[k] := greatest(greatest_ms[k], newest_ms);
        end if;
    end loop;

    -- All is decided before anything is written.
    for i in 1..run_total loop
        continue when bases[p_runs[i][1]] is null;
        if p_runs[i][4] = 0 and last_stable_offsets[p_runs[i][1]] is null then
            -- No transaction is open in the partition.
            select
                s.place, case when s.producer_epoch = p_runs[i][3] then s.batch_count else 0 end,
                coalesce(s.update_count >= 32, true), false -- 32: as in append_chunks
            into place, earlier, renews, begins
            from (values (true)) one
            left join lateral (
                select p.ctid as place, p.update_count, p.producer_epoch, p.next_sequence, p.batch_count
                from producer_state p
                where p.partition_key = p_partition_keys[p_runs[i][1]] and p.producer_id = p_runs[i][2]
                order by p.since_offset desc
                limit 1
            ) s on true
            where case s.producer_epoch = p_runs[i][3]
                when true then s.next_sequence = p_runs[i][7]
                when false then s.producer_epoch < p_runs[i][3] and p_runs[i][7] = 0
                else true
            end;
        else
            select
                s.place, case when s.producer_epoch = p_runs[i][3] then s.batch_count else 0 end,
                coalesce(s.update_count >= 32, true),
                p_runs[i][4] = 1 and o.first_offset is null
            into place, earlier, renews, begins
            from (values (true)) one
            left join lateral (
                select p.ctid as place, p.update_count, p.producer_epoch, p.next_sequence, p.batch_count
                from producer_state p
                where p.partition_key = p_partition_keys[p_runs[i][1]] and p.producer_id = p_runs[i][2]
                order by p.since_offset desc
                limit 1
            ) s on true
            left join lateral (
                select o.producer_epoch, o.first_offset, o.begins_at_zero
                from open_transaction o
                where o.partition_key = p_partition_keys[p_runs[i][1]] and o.producer_id = p_runs[i][2]
            ) o on true
            where case when p_runs[i][4] = 1 then o.producer_epoch = p_runs[i][3] else o.first_offset is null end
                and case
                    when s.producer_epoch is null then p_runs[i][7] = 0 or o.begins_at_zero is not true
                    when s.producer_epoch = p_runs[i][3] then s.next_sequence = p_runs[i][7]
                    else s.producer_epoch < p_runs[i][3] and p_runs[i][7] = 0
                end;
        end if;
        if not found then
            undecided := true;
            return;
        end if;
        places[i]  := place;
        counts[i]  := earlier;
        renewed[i] := renews;
        begun[i]   := begins;
        if begins then
            -- least() ignores nulls.
            last_stable_offsets[p_runs[i][1]] := least(
                last_stable_offsets[p_runs[i][1]],
                bases[p_runs[i][1]] + p_runs[i][17]);
        end if;
    end loop;

    with appended_chunk as (
        insert into chunk (
            partition_key, base_offset, last_offset, max_timestamp_ms, running_max_timestamp_ms,
            append_timestamp_ms, object_id, position, size_bytes, appended_bytes, batch_count, leader_epoch, inline_slot,
            final_heads
        )
        select
            p_partition_keys[k], bases[k], bases[k] + p_chunks[k][2] - 1, p_chunks[k][4],
            greatest(greatest_ms[k], p_chunks[k][4]),
            case when p_chunks[k][4] < 0 then (extract(epoch from clock_timestamp()) * 1000)::bigint end,
            p_object_id, positions[k], p_chunks[k][3], appended[k] + p_chunks[k][3], p_chunks[k][1],
            leader_epochs[k], slot, false
        from generate_series(1, partition_total) k
        where bases[k] is not null
    )
    insert into inline_records (slot, position, partition_key, base_offset, records)
    select slot, positions[k], p_partition_keys[k], bases[k], p_chunk_records[k]
    from generate_series(1, partition_total) k
    where slot is not null and bases[k] is not null;

    -- Each producer's row is written where the look-up found it: the partition is locked, and no place is reused while this
    -- call's snapshot lives. A join with all runs would scan the whole index, which seems cheap to the planner: it does not
    -- count the dead rows that an open snapshot keeps.
    for i in 1..run_total loop
        base := bases[p_runs[i][1]];
        continue when base is null;
        place := places[i];
        if renewed[i] then
            -- The update below fills this row.
            with passed as (
                delete from producer_state p
                where p.ctid = place
                returning p.first_sequences, p.last_sequences, p.base_offsets
            )
            insert into producer_state (
                partition_key, producer_id, since_offset, update_count, producer_epoch, next_sequence, batch_count,
                first_sequences, last_sequences, base_offsets, appended_at
            )
            select
                p_partition_keys[p_runs[i][1]], p_runs[i][2], base + p_runs[i][16 + p_runs[i][5]], -1,
                p_runs[i][3], 0, 0, coalesce(passed.first_sequences, array_fill(-1, array[5])),
                coalesce(passed.last_sequences, array_fill(-1, array[5])),
                coalesce(passed.base_offsets, array_fill(-1::bigint, array[5])), clock_timestamp()
            from (values (true)) one
            left join passed on true
            returning ctid into place;
        end if;
        -- The next slot of a ring is batch_count % 5 + 1, and a run fills the slots from there on.
        earlier := counts[i];
        if p_runs[i][5] = 1 then
            slot_1 := (earlier % 5 + 1)::integer;
            update producer_state p
            set update_count            = p.update_count + 1,
                producer_epoch          = p_runs[i][3],
                next_sequence           = p_runs[i][6],
                batch_count             = earlier + 1,
                first_sequences[slot_1] = p_runs[i][7],
                last_sequences[slot_1]  = p_runs[i][12],
                base_offsets[slot_1]    = base + p_runs[i][17],
                appended_at             = clock_timestamp()
            where p.ctid = place;
        else
            -- Which batch of the run each slot gets; null behind the last.
            slot_1 := (4 + 1 - earlier % 5) % 5;
            slot_2 := (4 + 2 - earlier % 5) % 5;
            slot_3 := (4 + 3 - earlier % 5) % 5;
            slot_4 := (4 + 4 - earlier % 5) % 5;
            slot_5 := (4 + 5 - earlier % 5) % 5;
            update producer_state p
            set update_count    = p.update_count + 1,
                producer_epoch  = p_runs[i][3],
                next_sequence   = p_runs[i][6],
                batch_count     = earlier + p_runs[i][5],
                first_sequences = array[
                    coalesce(p_runs[i][7 + slot_1], p.first_sequences[1]),
                    coalesce(p_runs[i][7 + slot_2], p.first_sequences[2]),
                    coalesce(p_runs[i][7 + slot_3], p.first_sequences[3]),
                    coalesce(p_runs[i][7 + slot_4], p.first_sequences[4]),
                    coalesce(p_runs[i][7 + slot_5], p.first_sequences[5])
                ],
                last_sequences  = array[
                    coalesce(p_runs[i][12 + slot_1], p.last_sequences[1]),
                    coalesce(p_runs[i][12 + slot_2], p.last_sequences[2]),
                    coalesce(p_runs[i][12 + slot_3], p.last_sequences[3]),
                    coalesce(p_runs[i][12 + slot_4], p.last_sequences[4]),
                    coalesce(p_runs[i][12 + slot_5], p.last_sequences[5])
                ],
                base_offsets    = array[
                    coalesce(base + p_runs[i][17 + slot_1], p.base_offsets[1]),
                    coalesce(base + p_runs[i][17 + slot_2], p.base_offsets[2]),
                    coalesce(base + p_runs[i][17 + slot_3], p.base_offsets[3]),
                    coalesce(base + p_runs[i][17 + slot_4], p.base_offsets[4]),
                    coalesce(base + p_runs[i][17 + slot_5], p.base_offsets[5])
                ],
                appended_at     = clock_timestamp()
            where p.ctid = place;
        end if;
        if not found then
            raise exception 'a producer was idle and has been forgotten since the look-up'
                using errcode = 'serialization_failure'; -- the caller tries again
        end if;
        if begun[i] then
            update open_transaction o
            set first_offset = base + p_runs[i][17]
            where o.partition_key = p_partition_keys[p_runs[i][1]] and o.producer_id = p_runs[i][2];
        end if;
    end loop;

    base_offsets   := bases;
    transaction_id := pg_current_xact_id()::text::bigint;
    written_lsn    := (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint;
end
$$;

create function joined(p_pieces bytea[]) returns bytea
language sql immutable
as $$
select string_agg(piece, '' order by number) from unnest(p_pieces) with ordinality as each (piece, number);
$$;

create function read_chunks(
    p_partition_keys  bigint[], -- per request
    p_offsets         bigint[], -- per request
    p_max_bytes       bigint[], -- per request
    p_committed       boolean[], -- per request: nothing from the last stable offset on
    p_total_max_bytes bigint,
    p_spare_bytes     bigint,   -- how much may be returned that the limits will cut off again
    p_max_batches     bigint,   -- it ends with the chunk that reaches them
    p_joined          boolean   -- whether inline chunks that follow each other may be one row
) returns table (
    request_position      integer,
    log_start_offset      bigint,
    high_watermark        bigint,
    last_stable_offset    bigint,
    leader_epoch          integer,
    partition_size_bytes  bigint,
    any_aborted           boolean, -- whether one that was aborted may have records from the offset on
    partition_key         bigint,
    base_offset           bigint,
    last_offset           bigint,
    object_id             bigint,
    "position"            bigint,
    size_bytes            integer,
    batch_count           integer,
    final_heads           boolean,
    records               bytea
)
language plpgsql stable
set enable_sort = off -- see chunk_at
as $$
-- Per request in order: one row of state (no row: unknown partition), then one row per chunk from the one that holds
-- the offset, or the next after a gap, up to the one that reaches the limit. Stable, so all of it is one snapshot. The
-- chunk that holds the offset counts by the share of it that lies behind the offset. Small commits leave a chunk for each
-- batch until the roller merges them, and a row for each would cost the reader more than its bytes. So inline chunks that
-- follow each other are joined.
declare
    joined_max_bytes constant integer := 65536; -- of a row of several chunks
    remaining_bytes  bigint := p_total_max_bytes;
    spare_bytes      bigint := p_spare_bytes;
    spare_batches    bigint := p_max_batches;
    limit_bytes      bigint;
    counted_bytes    bigint;
    returned_any     boolean := false;
    end_offset       bigint;
    from_offset      bigint;
    holder           record;
    candidate        record;
    piece            bytea;   -- the candidate's bytes, if they are inline
    pieces           bytea[]; -- those of the row's chunks, if there are several
    pending          boolean := false; -- whether the row is still to be returned
begin
    for i in 1..coalesce(cardinality(p_partition_keys), 0) loop
        partition_key := p_partition_keys[i];
        base_offset := null; last_offset := null; object_id := null; "position" := null; size_bytes := null;
        batch_count := null; final_heads := null; records := null;
        request_position := i;
        select
            p.log_start_offset, p.next_offset, p.leader_epoch, p.size_bytes,
            (select min(o.first_offset) from open_transaction o where o.partition_key = p.partition_key)
        into log_start_offset, high_watermark, leader_epoch, partition_size_bytes, last_stable_offset
        from partition_log p
        where p.partition_key = p_partition_keys[i] and not p.deleted
            and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id);
        continue when not found;
        -- The first records of an open transaction may have been deleted.
        last_stable_offset := greatest(coalesce(last_stable_offset, high_watermark), log_start_offset);
        end_offset := case when p_committed[i] then last_stable_offset else high_watermark end;
        any_aborted := p_committed[i] and exists (
            select from aborted_transaction a
            where a.partition_key = p_partition_keys[i] and a.last_offset >= p_offsets[i]
        );
        return next;

        continue when p_offsets[i] < log_start_offset or p_offsets[i] >= end_offset;
        limit_bytes := least(p_max_bytes[i], remaining_bytes);
        continue when (limit_bytes <= 0 or spare_bytes <= 0 or spare_batches <= 0) and returned_any;

        select c.base_offset, c.last_offset into holder
        from chunk c
        where c.partition_key = p_partition_keys[i] and c.base_offset <= p_offsets[i]
        order by c.base_offset desc
        limit 1;
        from_offset := case when holder.last_offset >= p_offsets[i] then holder.base_offset else p_offsets[i] end;

        log_start_offset := null; high_watermark := null; last_stable_offset := null; partition_size_bytes := null;
        any_aborted := null;
        for candidate in
            select c.*
            from chunk c
            where c.partition_key = p_partition_keys[i] and c.base_offset >= from_offset
            order by c.base_offset
        loop
            exit when candidate.base_offset >= end_offset;
            exit when candidate.batch_count = 1 and candidate.size_bytes > limit_bytes and returned_any;
            piece := null;
            if candidate.inline_slot is not null then
                select r.records into piece
                from inline_records r
                where r.slot = candidate.inline_slot and r.position = candidate.position;
            end if;
            if p_joined and pending and records is not null and piece is not null
                and candidate.base_offset = last_offset + 1 and candidate.leader_epoch = leader_epoch
                and not candidate.final_heads and not final_heads
                and size_bytes + candidate.size_bytes <= joined_max_bytes
            then
                last_offset := candidate.last_offset;
                size_bytes  := size_bytes + candidate.size_bytes;
                batch_count := batch_count + candidate.batch_count;
                if pieces is null then
                    pieces := array[records];
                end if;
                pieces := array_append(pieces, piece); -- in place, because it assigns to its own argument
            else
                if pieces is not null then
                    records := joined(pieces);
                end if;
                if pending then
                    return next;
                end if;
                base_offset  := candidate.base_offset;
                last_offset  := candidate.last_offset;
                object_id    := candidate.object_id;
                "position"   := candidate.position;
                size_bytes   := candidate.size_bytes;
                batch_count  := candidate.batch_count;
                leader_epoch := candidate.leader_epoch;
                final_heads  := candidate.final_heads;
                records      := piece;
                pieces       := null;
                pending      := true;
            end if;
            returned_any := true;
            counted_bytes := candidate.size_bytes;
            if candidate.base_offset < p_offsets[i] then
                counted_bytes := greatest(1, (
                    candidate.size_bytes * (candidate.last_offset - p_offsets[i] + 1)::double precision
                    / (candidate.last_offset - candidate.base_offset + 1)
                )::bigint);
            end if;
            counted_bytes   := least(counted_bytes, limit_bytes);
            limit_bytes     := limit_bytes - counted_bytes;
            remaining_bytes := remaining_bytes - counted_bytes;
            spare_bytes     := spare_bytes - (candidate.size_bytes - counted_bytes);
            -- In the chunk that holds the offset, perhaps only one batch lies at or behind the offset.
            spare_batches   := spare_batches - case when candidate.base_offset < p_offsets[i] then 1 else candidate.batch_count end;
            exit when limit_bytes <= 0 or spare_bytes <= 0 or spare_batches <= 0;
        end loop;
        if pieces is not null then
            records := joined(pieces);
            pieces := null;
        end if;
        if pending then
            return next;
            pending := false;
        end if;
    end loop;
end
$$;

create function chunk_at(p_partition_key bigint, p_timestamp_ms bigint, p_from_offset bigint)
returns setof chunk
language plpgsql stable
-- The planner assumes a single row for a partition that its statistics do not know yet, and may then sort millions of
-- rows. If sorting is off, only the index with the right order remains.
set enable_sort = off
as $$
-- Return the first chunk that reaches p_from_offset and whose greatest timestamp is at least p_timestamp_ms.
-- running_max_timestamp_ms rises with the offset, so a binary search finds where it first reaches that time. If the
-- chunk with that timestamp is no longer in the log, the filter continues to the next chunk that qualifies.
declare
    low      bigint;
    high     bigint;
    middle   bigint;
    probe    record;
begin
    select greatest(p.log_start_offset, p_from_offset), p.next_offset into low, high
    from partition_log p
    where p.partition_key = p_partition_key and not p.deleted
        and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id);
    if not found then
        return;
    end if;
    p_from_offset := low;
    while low < high loop
        middle := low + (high - low) / 2;
        select c.base_offset, c.last_offset, c.running_max_timestamp_ms into probe
        from chunk c
        where c.partition_key = p_partition_key and c.base_offset <= middle
        order by c.base_offset desc
        limit 1;
        if not found then
            low := middle + 1;
        elsif probe.running_max_timestamp_ms >= p_timestamp_ms then
            high := probe.base_offset;
        else
            low := greatest(middle, probe.last_offset) + 1;
        end if;
    end loop;
    return query
        select c.*
        from chunk c
        where c.partition_key = p_partition_key
            and c.base_offset >= high
            and c.max_timestamp_ms >= p_timestamp_ms
            and c.last_offset >= p_from_offset
        order by c.base_offset
        limit 1;
end
$$;

create function first_offset_after(p_partition_key bigint, p_from_offset bigint, p_timestamp_ms bigint) returns bigint
language plpgsql stable
set enable_sort = off -- see chunk_at
as $$
-- Return the base offset of the first chunk from p_from_offset on that is younger than p_timestamp_ms; null if no chunk
-- is. A chunk without timestamps has the time of its arrival. If older chunks with timestamps follow, such a chunk may be
-- missed.
declare
    low     bigint := p_from_offset;
    high    bigint;
    middle  bigint;
    probe   record;
begin
    select p.next_offset into high from partition_log p where p.partition_key = p_partition_key;
    while low < high loop
        middle := low + (high - low) / 2;
        select c.base_offset, c.last_offset, greatest(c.running_max_timestamp_ms, c.append_timestamp_ms) as newest_ms
        into probe
        from chunk c
        where c.partition_key = p_partition_key and c.base_offset <= middle
        order by c.base_offset desc
        limit 1;
        if not found then
            low := middle + 1;
        elsif probe.newest_ms > p_timestamp_ms then
            high := probe.base_offset;
        else
            low := greatest(middle, probe.last_offset) + 1;
        end if;
    end loop;
    return (
        select c.base_offset
        from chunk c
        where c.partition_key = p_partition_key
            and c.base_offset >= greatest(high, p_from_offset)
            and coalesce(c.append_timestamp_ms, c.max_timestamp_ms) > p_timestamp_ms
        order by c.base_offset
        limit 1
    );
end
$$;

create function raise_log_start(p_partition_key bigint, p_offset bigint, out log_start_offset bigint) returns setof bigint
language plpgsql volatile
as $$
-- Move the log start up and return it; it never moves back. No row: unknown partition. Null: p_offset is outside the
-- log. -1: delete everything. The row lock keeps the comparison valid against concurrent appends and removals. Chunks
-- below the log start may be removed afterwards, so the partition's row must then show where the log ends.
declare
    held partition_log;
begin
    perform 1 from partition p
    where p.partition_key = p_partition_key and not p.deleted
        and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id)
    for no key update;
    if not found then
        return;
    end if;
    -- A statement of its own: see append_chunks.
    select l.* into held from partition_log l where l.partition_key = p_partition_key;
    if p_offset between -1 and held.next_offset then
        log_start_offset := greatest(
            held.log_start_offset, case when p_offset = -1 then held.next_offset else p_offset end);
        update partition p
        set log_start_offset = raise_log_start.log_start_offset,
            next_offset      = held.next_offset,
            size_bytes       = held.size_bytes,
            appended_bytes   = held.appended_bytes,
            max_timestamp_ms = held.max_timestamp_ms
        where p.partition_key = p_partition_key;
    end if;
    return next;
end
$$;
