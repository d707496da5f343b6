-- name: chunks_to_check
-- The next chunks behind ($1, $2) with their inline bytes: at most $3, up to the one that reaches $4 bytes. `overlaps`:
-- the chunk before it reaches it.
select
    c.partition_key, c.base_offset, c.last_offset, c.object_id, c.position, c.size_bytes, c.batch_count, c.leader_epoch,
    c.final_heads,
    (select i.records from inline_records i where i.slot = c.inline_slot and i.position = c.position) as records,
    coalesce(
        (
            select b.last_offset from chunk b
            where b.partition_key = c.partition_key and b.base_offset < c.base_offset
            order by b.base_offset desc
            limit 1
        ) >= c.base_offset, false) as overlaps
from (
    select n.*, sum(n.size_bytes) over (order by n.partition_key, n.base_offset) - n.size_bytes as bytes_before
    from (
        select * from chunk where (partition_key, base_offset) > ($1, $2) order by partition_key, base_offset limit $3
    ) n
) c
where c.bytes_before < $4
order by c.partition_key, c.base_offset;

-- name: partitions_to_check
-- Partitions whose stored size or end differs from what their chunks add up to, in one snapshot.
select p.partition_key, p.size_bytes, p.next_offset, held.chunk_bytes, held.chunk_end
from partition_log p
cross join lateral (
    select coalesce(sum(c.size_bytes), 0) as chunk_bytes, coalesce(max(c.last_offset) + 1, p.log_start_offset) as chunk_end
    from chunk c
    where c.partition_key = p.partition_key
) held
where not p.deleted and (held.chunk_bytes <> p.size_bytes or held.chunk_end > p.next_offset)
order by p.partition_key;

-- name: transactions_to_check
-- Rows of transactions in places where they must not be, in one snapshot: a kind of mistake each, and its place.
select
    'not_under_way' as mistake, o.partition_key, o.producer_id, null::text as group_id, o.first_offset as at_offset
from open_transaction o
left join transactional_producer t
    on t.producer_id = o.producer_id and t.producer_epoch = o.producer_epoch and t.state = 'Ongoing'
where t.producer_id is null
    and not exists (select from transactional_producer e where e.ending_producer_id = o.producer_id)
union all
select 'begun_past_end', o.partition_key, o.producer_id, null, o.first_offset
from open_transaction o
join partition_log p on p.partition_key = o.partition_key and not p.deleted and o.first_offset >= p.next_offset
union all
select 'marked_past_end', a.partition_key, a.producer_id, null, a.last_offset
from partition_log p
join aborted_transaction a on a.partition_key = p.partition_key and a.last_offset >= p.next_offset
where not p.deleted
union all
select 'marked_before_begun', a.partition_key, a.producer_id, null, a.last_offset
from aborted_transaction a
where a.last_offset <= a.first_offset
union all
select 'group_not_under_way', null, g.producer_id, g.group_id, null
from transaction_group g
left join transactional_producer t on t.producer_id = g.producer_id and t.state = 'Ongoing'
where t.producer_id is null
union all
select distinct 'offsets_not_under_way', null::bigint, o.producer_id, o.group_id, null::bigint
from pending_offset o
left join transaction_group g on g.producer_id = o.producer_id and g.group_id = o.group_id
where g.producer_id is null
order by 1, 2, 3, 4, 5;
