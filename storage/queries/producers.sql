-- name: take_producer_ids
-- The first id of a block of $1 that nobody else gets.
update cluster set next_producer_id = next_producer_id + $1::integer returning next_producer_id - $1::integer;

-- name: expire_producers
-- Forgets producers of single partitions that have been idle since before $1 (Unix ms), at most $2 of them. One that
-- appends at this moment is locked or no longer idle, and stays.
delete from producer_state state
using (
    select partition_key, producer_id
    from producer_state
    where appended_at < to_timestamp($1::bigint / 1000.0)
    order by partition_key, producer_id
    limit $2
    for update skip locked
) idle
where state.partition_key = idle.partition_key
    and state.producer_id = idle.producer_id;
