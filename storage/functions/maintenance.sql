-- What compaction writes. Like retention it takes batch rows first and the partition's row last, for as short as can be.

create function replace_batches(
    p_partition_key         bigint,
    p_revision              bigint,
    p_end_offset            bigint,
    p_removed_base_offsets  bigint[],
    p_added_base_offsets    bigint[],
    p_added_last_offsets    bigint[],
    p_max_timestamps_ms     bigint[],
    p_records               bytea[]
) returns text
language plpgsql volatile
as $$
-- Null, or why nothing was written: 'fenced' (another run began since), 'changed' (a row to remove is gone), 'outside'
-- (an added batch does not lie within removed rows alone, or a row is not below the end of the range).
declare
    revision_now   bigint;
    removed_total  constant integer := coalesce(cardinality(p_removed_base_offsets), 0);
    added_total    constant integer := coalesce(cardinality(p_added_base_offsets), 0);
    bases          bigint[] := '{}';
    lasts          bigint[] := '{}';
    running_max_ms bigint[] := '{}';
    appended_ms    bigint[] := '{}';
    sizes          bigint[] := '{}';
    first_row      integer := 1;
    last_row       integer;
    previous_last  bigint := -1;
begin
    select revision into revision_now from compaction_state where partition_key = p_partition_key for update;
    if revision_now is distinct from p_revision then
        return 'fenced';
    end if;

    select array_agg(base_offset), array_agg(last_offset), array_agg(running_max_timestamp_ms),
        array_agg(append_timestamp_ms), array_agg(size_bytes)
    into bases, lasts, running_max_ms, appended_ms, sizes
    from (
        select b.base_offset, b.last_offset, b.running_max_timestamp_ms, b.append_timestamp_ms, b.size_bytes
        from batch b
        where b.partition_key = p_partition_key and b.base_offset = any (p_removed_base_offsets)
        order by b.base_offset
        for update
    ) held;
    if coalesce(cardinality(bases), 0) <> removed_total then
        return 'changed';
    end if;
    if lasts[removed_total] >= p_end_offset then
        return 'outside';
    end if;

    delete from batch b where b.partition_key = p_partition_key and b.base_offset = any (bases);

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
                select from batch b
                where b.partition_key = p_partition_key
                    and b.base_offset between p_added_base_offsets[i] and p_added_last_offsets[i]
            )
        then
            -- Takes back the delete as well.
            raise exception 'replaced batches do not cover offsets % to %',
                p_added_base_offsets[i], p_added_last_offsets[i] using errcode = 'SL001';
        end if;
        previous_last := p_added_last_offsets[i];
        -- The running maximum of the row that held the last offset is an upper bound and does not fall.
        insert into batch (
            partition_key, base_offset, last_offset, max_timestamp_ms, running_max_timestamp_ms, append_timestamp_ms,
            size_bytes, records
        ) values (
            p_partition_key, p_added_base_offsets[i], p_added_last_offsets[i], p_max_timestamps_ms[i],
            greatest(running_max_ms[last_row], p_max_timestamps_ms[i]), appended_ms[last_row],
            octet_length(p_records[i]), p_records[i]
        );
    end loop;

    update partition p
    set size_bytes = p.size_bytes
        - coalesce((select sum(size) from unnest(sizes) size), 0)
        + coalesce((select sum(octet_length(r)) from unnest(p_records) r), 0)
    where p.partition_key = p_partition_key;
    return null;
end
$$;
