-- name: retention_candidates
-- Of the partitions given (key, retention_ms, retention_bytes; -1 = no limit), those whose oldest row is below the log
-- start, past its time, or dispensable by size. One index lookup per partition; 64-bit all through, on the database's
-- clock.
select
    policy.partition_key, policy.retention_ms, policy.retention_bytes,
    p.log_start_offset, oldest.last_offset < p.log_start_offset as below_start
from (
    select
        unnest($1::bigint[]) as partition_key, unnest($2::bigint[]) as retention_ms,
        unnest($3::bigint[]) as retention_bytes
) policy
join partition_log p on p.partition_key = policy.partition_key and not p.deleted
join lateral (
    select b.last_offset, b.size_bytes, coalesce(b.append_timestamp_ms, b.max_timestamp_ms) as timestamp_ms
    from chunk b
    where b.partition_key = policy.partition_key
    order by b.base_offset
    limit 1
) oldest on true
where oldest.last_offset < p.log_start_offset
    or (
        policy.retention_ms >= 0
        and oldest.timestamp_ms < (extract(epoch from clock_timestamp()) * 1000)::bigint - policy.retention_ms
    )
    or (policy.retention_bytes >= 0 and p.size_bytes - oldest.size_bytes >= policy.retention_bytes)
order by policy.partition_key;

-- name: retention_boundary
-- The offset after the last chunk that may go, among the $4 oldest: null if no chunk may. By time: the chunks before
-- the first that is not past it. By size: as many as leave at least retention_bytes, as upstream counts. Rows below the
-- log start are gone before this query runs, so size_bytes is that of the live log.
with held as materialized (
    select p.size_bytes from partition_log p where p.partition_key = $1 and not p.deleted
)
select max(last_offset) + 1
from (
    select
        b.last_offset,
        $2::bigint >= 0 and bool_and(
            coalesce(b.append_timestamp_ms, b.max_timestamp_ms)
            < (extract(epoch from clock_timestamp()) * 1000)::bigint - $2::bigint
        ) over oldest_first as past_time,
        $3::bigint >= 0 and held.size_bytes - sum(b.size_bytes) over oldest_first >= $3::bigint as past_size
    from held
    cross join (
        select * from chunk where partition_key = $1 order by base_offset limit $4
    ) b
    window oldest_first as (order by b.base_offset rows unbounded preceding)
) judged
where past_time or past_size;

-- name: delete_below_log_start
-- Delete at most $2 chunks that lie wholly below the log start, the oldest first.
select * from delete_below_log_start($1, $2);
