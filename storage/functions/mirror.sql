-- Appends of `sluice mirror`: batches at the offsets that they have in another cluster. The partition's row is locked
-- first, so that no other append moves the log's end.

create function begin_mirror(
    p_partition_key      bigint,
    p_source_cluster_id  text,
    p_source_topic_id    uuid,
    p_log_start_offset   bigint, -- of the source
    out refusal          text,
    out next_offset      bigint,
    out leader_epoch     integer
)
language plpgsql volatile
as $$
-- Return where the mirror continues, and the epoch for the heads of batches. A partition that was never written to
-- begins where its source begins. Refusals: 'unknown_partition', 'not_empty' (the partition has a log that no mirror
-- wrote), 'other_source' and 'written' (a client has produced since).
declare
    log_end  bigint;
    known    mirrored_partition;
begin
    select p.leader_epoch into leader_epoch
    from partition p
    where p.partition_key = p_partition_key and not p.deleted
        and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id)
    for no key update;
    if not found then
        refusal := 'unknown_partition';
        return;
    end if;
    -- A statement of its own: see append_chunks.
    select l.next_offset into log_end from partition_log l where l.partition_key = p_partition_key;
    select m.* into known from mirrored_partition m where m.partition_key = p_partition_key;
    if found then
        if known.source_cluster_id <> p_source_cluster_id or known.source_topic_id <> p_source_topic_id then
            refusal := 'other_source';
        elsif known.next_offset <> log_end then
            refusal := 'written';
        end if;
        next_offset := log_end;
        return;
    end if;
    if log_end <> 0 then
        refusal := 'not_empty';
        return;
    end if;
    next_offset := p_log_start_offset;
    update partition p
    set log_start_offset = p_log_start_offset, next_offset = p_log_start_offset
    where p.partition_key = p_partition_key;
    insert into mirrored_partition (partition_key, source_cluster_id, source_topic_id, next_offset)
    values (p_partition_key, p_source_cluster_id, p_source_topic_id, p_log_start_offset);
    perform announce_mirrored(p_partition_key, p_log_start_offset);
end
$$;

create function append_mirrored(
    p_partition_key      bigint,
    p_from_offset        bigint,    -- the end of the log, as the mirror left it
    p_leader_epoch       integer,   -- in the heads of the batches
    p_base_offsets       bigint[],  -- per chunk, ascending
    p_last_offsets       bigint[],
    p_max_timestamps_ms  bigint[],
    p_batch_counts       integer[],
    p_records            bytea[]
) returns text
language plpgsql volatile
as $$
-- Return null, or why nothing was written: 'unknown_partition', 'leader_epoch' (another one leads the partition by now)
-- or 'written' (the log does not end at p_from_offset). Offsets may be missing before, between and within chunks.
-- Afterwards the partition's row shows where the log ends, because the chunks after that position must have no gap.
declare
    held         partition_log;
    slot         smallint;
    new_position bigint;
    greatest_ms  bigint;
    grown_bytes  bigint := 0;
    expected     bigint;  -- least offset of the next chunk
    chunk_total  constant integer := cardinality(p_base_offsets);
begin
    perform 1 from partition p
    where p.partition_key = p_partition_key and not p.deleted
        and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id)
    for no key update;
    if not found then
        return 'unknown_partition';
    end if;
    -- A statement of its own: see append_chunks.
    select l.* into held from partition_log l where l.partition_key = p_partition_key;
    if held.next_offset <> p_from_offset or not exists (
        select from mirrored_partition m
        where m.partition_key = p_partition_key and m.next_offset = p_from_offset
    ) then
        return 'written';
    end if;
    if held.leader_epoch <> p_leader_epoch then
        return 'leader_epoch';
    end if;
    select r.current_slot into slot from inline_rotation r;
    greatest_ms := held.max_timestamp_ms;
    expected := p_from_offset;
    for i in 1..chunk_total loop
        if p_base_offsets[i] < expected or p_last_offsets[i] < p_base_offsets[i] then
            raise exception 'mirrored chunks overlap at offset %', p_base_offsets[i] using errcode = 'SL001';
        end if;
        expected     := p_last_offsets[i] + 1;
        greatest_ms  := greatest(greatest_ms, p_max_timestamps_ms[i]);
        grown_bytes  := grown_bytes + octet_length(p_records[i]);
        new_position := nextval('inline_position');
        insert into chunk (
            partition_key, base_offset, last_offset, max_timestamp_ms, running_max_timestamp_ms, append_timestamp_ms,
            position, size_bytes, appended_bytes, batch_count, leader_epoch, inline_slot, final_heads
        ) values (
            p_partition_key, p_base_offsets[i], p_last_offsets[i], p_max_timestamps_ms[i], greatest_ms,
            case when p_max_timestamps_ms[i] < 0 then (extract(epoch from clock_timestamp()) * 1000)::bigint end,
            new_position, octet_length(p_records[i]), held.appended_bytes + grown_bytes, p_batch_counts[i],
            p_leader_epoch, slot, true
        );
        insert into inline_records (slot, position, partition_key, base_offset, records)
        values (slot, new_position, p_partition_key, p_base_offsets[i], p_records[i]);
    end loop;
    update partition p
    set next_offset      = expected,
        size_bytes       = held.size_bytes + grown_bytes,
        appended_bytes   = held.appended_bytes + grown_bytes,
        max_timestamp_ms = greatest_ms
    where p.partition_key = p_partition_key;
    update mirrored_partition m
    set next_offset = expected, mirrored_at = clock_timestamp()
    where m.partition_key = p_partition_key;
    perform announce_mirrored(p_partition_key, expected);
    return null;
end
$$;

create function announce_mirrored(p_partition_key bigint, p_end_offset bigint) returns void
language plpgsql volatile
as $$
-- Notify every node where the log ends, as nodes notify each other (gateway/cluster/wakeups.py). The notification is
-- part of the transaction: a mirror that is killed after the commit could not send it, and a node that serves alone
-- never checks by itself. Node -1 is no node's id. Each announcement has a new incarnation and so counts as the first
-- one.
begin
    perform pg_notify('sluice_append', format('-1.%s:1:%s=%s', pg_current_xact_id(), p_partition_key, p_end_offset));
end
$$;
