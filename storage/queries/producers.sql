-- name: take_producer_ids
-- Take the first id of a block of $1 ids that no other node gets.
update cluster set next_producer_id = next_producer_id + $1::integer returning next_producer_id - $1::integer;

-- name: expire_producers
-- Examine the next $2 producers of single partitions behind ($3, $4) and delete those that have been idle for more than
-- $1 ms. Return how many, and the last one examined (null: there was no producer). It works in steps, because an index
-- by time would cost every append. A producer that appends at this moment is locked or no longer idle, and stays. So does
-- one with an open transaction in the partition, as upstream (ProducerStateManager.isProducerExpired).
with looked_at as materialized (
    select partition_key, producer_id
    from producer_state
    where (partition_key, producer_id) > ($3::bigint, $4::bigint)
    order by partition_key, producer_id
    limit $2
), idle as materialized (
    select s.partition_key, s.producer_id
    from producer_state s
    where (s.partition_key, s.producer_id) > ($3::bigint, $4::bigint)
        and (s.partition_key, s.producer_id) <= (
            select l.partition_key, l.producer_id from looked_at l order by 1 desc, 2 desc limit 1
        )
        and s.appended_at < clock_timestamp() - $1::bigint * interval '1 millisecond'
        and not exists (
            select from open_transaction o where o.partition_key = s.partition_key and o.producer_id = s.producer_id
        )
    order by s.partition_key, s.producer_id
    for update skip locked
), forgotten as (
    delete from producer_state s
    using idle
    where s.partition_key = idle.partition_key and s.producer_id = idle.producer_id
    returning s.producer_id
)
select
    (select count(*) from forgotten) as forgotten,
    (select partition_key from looked_at order by 1 desc, producer_id desc limit 1) as partition_key,
    (select producer_id from looked_at order by partition_key desc, 1 desc limit 1) as producer_id;
