-- name: dirty_ranges
-- Of the partitions given (key, min.cleanable.dirty.ratio, min.compaction.lag.ms, max.compaction.lag.ms), those worth
-- cleaning, dirtiest first. The range ends before the last chunk, which always stays as it is, before the first chunk
-- within the minimum lag, and before the chunk in which the first open transaction began: the range is empty if that
-- chunk is gone. Sizes come from running totals, not from the rows.
select
    judged.partition_key, judged.log_start_offset, judged.first_dirty_offset, judged.end_offset,
    judged.clean_bytes, judged.dirty_bytes
from (
    select
        policy.partition_key, policy.dirty_ratio, policy.max_lag_ms, p.log_start_offset,
        greatest(coalesce(s.first_dirty_offset, 0), p.log_start_offset) as first_dirty_offset,
        least(
            newest.base_offset,
            case when policy.min_lag_ms > 0 then first_offset_after(
                policy.partition_key, coalesce(s.first_dirty_offset, 0),
                (extract(epoch from clock_timestamp()) * 1000)::bigint - policy.min_lag_ms
            ) end,
            case when unstable.first_offset is not null then coalesce(
                (
                    select b.base_offset from chunk b
                    where b.partition_key = policy.partition_key and b.base_offset <= unstable.first_offset
                    order by b.base_offset desc
                    limit 1
                ), 0) end
        ) as end_offset,
        least(greatest(coalesce(s.clean_bytes, 0), 0), p.size_bytes) as clean_bytes,
        p.size_bytes - least(greatest(coalesce(s.clean_bytes, 0), 0), p.size_bytes) as dirty_bytes
    from (
        select
            unnest($1::bigint[]) as partition_key, unnest($2::double precision[]) as dirty_ratio,
            unnest($3::bigint[]) as min_lag_ms, unnest($4::bigint[]) as max_lag_ms
    ) policy
    join partition_log p
        on p.partition_key = policy.partition_key and not p.deleted
            and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id)
    left join compaction_state s on s.partition_key = policy.partition_key
    join lateral (
        select b.base_offset from chunk b
        where b.partition_key = policy.partition_key
        order by b.base_offset desc
        limit 1
    ) newest on true
    cross join lateral (
        select min(o.first_offset) as first_offset from open_transaction o
        where o.partition_key = policy.partition_key
    ) unstable
) judged
left join lateral (
    select coalesce(b.append_timestamp_ms, b.max_timestamp_ms) as timestamp_ms from chunk b
    where b.partition_key = judged.partition_key and b.base_offset >= judged.first_dirty_offset
    order by b.base_offset
    limit 1
) first_dirty on true
where judged.end_offset > judged.first_dirty_offset
    and judged.dirty_bytes > 0
    and (
        judged.dirty_bytes >= judged.dirty_ratio * (judged.clean_bytes + judged.dirty_bytes)
        or first_dirty.timestamp_ms
            < (extract(epoch from clock_timestamp()) * 1000)::bigint - judged.max_lag_ms
    )
order by judged.dirty_bytes::double precision / (judged.clean_bytes + judged.dirty_bytes) desc, judged.partition_key
limit $5;

-- name: cleaned_to
-- Return the offset up to which each of the given partitions has been cleaned. There is no row for a partition that was
-- never cleaned.
select s.partition_key, s.first_dirty_offset from compaction_state s
where s.partition_key = any($1::bigint[]) and s.first_dirty_offset > 0;

-- name: begin_compaction
-- A new revision, which fences every run that began before. The lock keeps the partition's row until this is committed.
insert into compaction_state as s (partition_key, revision)
select p.partition_key, 1
from partition p
where p.partition_key = $1 and not p.deleted
    and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id)
for key share of p
on conflict (partition_key) do update set revision = s.revision + 1
returning revision;

-- name: replace_chunks
-- Return null, or the reason why nothing was written.
select replace_chunks($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15);

-- name: chunk_sizes
-- For the next $4 chunks from offset $2 on, below $3: how many, their bytes, the first and the last base offset.
select
    count(*) as chunk_count, coalesce(sum(size_bytes), 0)::bigint as size_bytes, min(base_offset) as first_offset,
    max(base_offset) as last_offset
from (
    select base_offset, size_bytes from chunk
    where partition_key = $1 and base_offset >= $2 and base_offset < $3
    order by base_offset
    limit $4
) counted;

-- name: lock_compaction
-- Wait until no other transaction removes or replaces chunks of the partition.
select from compaction_state where partition_key = $1 for update;

-- name: finish_compaction
-- Store the offset up to which the log is clean, and the bytes below it. Return no row if another run has begun. Return
-- 'moved' if the oldest chunk below $3 is not $5 any more, because the bytes are then wrong.
with oldest as (
    select (
        select c.base_offset from chunk c where c.partition_key = $1 and c.base_offset < $3 order by c.base_offset limit 1
    ) is not distinct from $5::bigint as stands
), finished as (
    update compaction_state s
    set first_dirty_offset = $3, clean_bytes = $4, cleaned_at = clock_timestamp()
    from oldest
    where s.partition_key = $1 and s.revision = $2 and oldest.stands
    returning 1
)
select case when exists (select from finished) then 'finished' else 'moved' end as outcome
from compaction_state s
where s.partition_key = $1 and s.revision = $2;
