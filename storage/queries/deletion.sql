-- name: due_deletions
-- Hidden topics whose data is to be deleted now, at most $1, the oldest first. While a live broker does not know that a
-- topic was deleted, the topic's row keeps its name from being used again (`still_served`).
select topic_id, name, delete_failures
from topic
where deleted_at is not null and (delete_retry_at is null or delete_retry_at <= clock_timestamp())
    and changed_revision <= (
        select coalesce(min(n.catalog_revision), 9223372036854775807) from node n
        where n.is_broker and n.expires_at > clock_timestamp()
    )
order by deleted_at
limit $1;

-- name: pending_deletions
-- Hidden topics that still have rows, at most $1, the oldest first.
select
    t.topic_id, t.name, t.delete_failures, t.delete_error,
    (extract(epoch from clock_timestamp() - t.deleted_at) * 1000)::bigint as deleted_ms_ago,
    greatest((extract(epoch from t.delete_retry_at - clock_timestamp()) * 1000)::bigint, 0) as retry_in_ms,
    (select count(*) from partition p where p.topic_id = t.topic_id) as partitions_left
from topic t
where t.deleted_at is not null
order by t.deleted_at
limit $1;

-- name: fence_partitions
-- Return the last index of the partitions that it marked, null if no partition was left.
select fence_partitions($1, $2, $3);

-- name: deleted_partitions
-- The first $2 partitions of a hidden topic, and the kinds of rows that still refer to each.
select
    p.partition_key,
    exists (select from chunk c where c.partition_key = p.partition_key) as has_chunks,
    exists (select from producer_state s where s.partition_key = p.partition_key) as has_producers,
    exists (select from aborted_transaction a where a.partition_key = p.partition_key) as has_aborted
from partition p
where p.topic_id = $1
order by p.partition_index
limit $2;

-- name: delete_chunks
-- Chunks of a deleted partition, oldest first, at most $2.
select * from delete_chunks($1, $2);

-- name: delete_producer_states
-- Delete producer states of a deleted partition, at most $2; return how many. It deletes up to an id for the reason in
-- delete_below_log_start.
with removed as (
    delete from producer_state
    where partition_key = $1
        and producer_id <= (
            select max(producer_id)
            from (select producer_id from producer_state where partition_key = $1 order by producer_id limit $2) lowest
        )
    returning producer_id
)
select count(*) from removed;

-- name: delete_aborted_transactions
-- Delete aborted transactions of a deleted partition, at most $2; return how many.
with removed as (
    delete from aborted_transaction
    where partition_key = $1
        and last_offset <= (
            select max(last_offset)
            from (select last_offset from aborted_transaction where partition_key = $1 order by last_offset limit $2) oldest
        )
    returning last_offset
)
select count(*) from removed;

-- name: delete_partitions
-- Delete those of the partitions to which no row refers any more; return how many.
select delete_partitions($1);

-- name: delete_offsets_of_topic
-- Delete at most $2 offsets committed for a topic, each found by its key; return their number.
with doomed as materialized (
    select group_id, partition_index
    from committed_offset
    where topic_id = $1
    order by group_id, partition_index
    limit $2
    for update
), removed as (
    delete from committed_offset o
    using doomed d
    where o.group_id = d.group_id and o.topic_id = $1 and o.partition_index = d.partition_index
    returning o.group_id
)
select count(*) from removed;

-- name: delete_pending_offsets_of_topic
-- Delete at most $2 offsets that wait for the end of a transaction, each found by its key; return how many. Pending
-- offsets that arrive later go with the transaction.
with doomed as materialized (
    select group_id, partition_index, producer_id
    from pending_offset
    where topic_id = $1
    order by group_id, partition_index, producer_id
    limit $2
    for update
), removed as (
    delete from pending_offset o
    using doomed d
    where o.group_id = d.group_id and o.topic_id = $1 and o.partition_index = d.partition_index
        and o.producer_id = d.producer_id
    returning o.group_id
)
select count(*) from removed;

-- name: confirm_deletion
-- Return whether the topic's own row is gone.
select confirm_deletion($1);

-- name: deletion_failed
-- Postpone the next try by $3 ms, doubled for each earlier failure, but by $4 ms at most. No row if the lease is not
-- current.
update topic
set delete_failures = delete_failures + 1,
    delete_error = $2,
    delete_retry_at = clock_timestamp()
        + least($3::bigint * (2::bigint ^ least(delete_failures, 30))::bigint, $4::bigint) * interval '1 millisecond'
where topic_id = $1 and deleted_at is not null and lease_is_current('jobs', $5, $6, $7)
returning delete_failures, (extract(epoch from delete_retry_at - clock_timestamp()) * 1000)::bigint as retry_in_ms;
