-- name: append_batches
-- Small groups: decides offsets and inserts the accepted batches in one statement, the bytes as its last parameter.
-- Base offset (bytes 0-7) and leader epoch (12-15) are written into what is stored. The sets are unnested side by side
-- in the select list because a function in the from clause would first copy all bytes into a work table.
with decided as materialized (
    select * from assign_offsets($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
), appended as (
    insert into batch (
        partition_key, base_offset, last_offset, max_timestamp_ms, running_max_timestamp_ms, append_timestamp_ms,
        size_bytes, records
    )
    select
        ($1::bigint[])[b.partition_position], b.base_offset, b.base_offset + b.record_count - 1,
        b.max_timestamp_ms, b.running_max_timestamp_ms,
        case when b.max_timestamp_ms < 0 then (extract(epoch from clock_timestamp()) * 1000)::bigint end,
        b.size_bytes,
        int8send(b.base_offset) || (substring(b.records from 9 for 4) || int4send(b.leader_epoch))
            || substring(b.records from 17)
    from (
        select
            unnest(d.refusals) as refusal, unnest(d.duplicates) as duplicate, unnest(d.base_offsets) as base_offset,
            unnest(d.leader_epochs) as leader_epoch,
            unnest(d.running_max_timestamps_ms) as running_max_timestamp_ms,
            unnest($2::integer[]) as partition_position, unnest($3::integer[]) as record_count,
            unnest($4::bigint[]) as max_timestamp_ms, unnest($5::integer[]) as size_bytes,
            unnest($11::bytea[]) as records
        from decided d
    ) b
    where b.refusal is null and not b.duplicate
)
select refusals, duplicates, base_offsets, log_start_offsets, leader_epochs from decided;

-- name: assign_offsets
-- Large groups: only decides offsets; the accepted batches follow by COPY in the same transaction.
select
    refusals, duplicates, base_offsets, log_start_offsets, leader_epochs, running_max_timestamps_ms,
    (extract(epoch from clock_timestamp()) * 1000)::bigint as now_ms
from assign_offsets($1, $2, $3, $4, $5, $6, $7, $8, $9, $10);

-- name: read_batches
-- One fetch: states and batches of all requested partitions, in one snapshot.
select * from read_batches($1, $2, $3, $4);

-- name: partition_states
-- Live partitions among those asked for.
select partition_key, log_start_offset, next_offset, leader_epoch, size_bytes
from partition
where partition_key = any ($1::bigint[]) and not deleted;

-- name: batch_at_timestamp
-- The first batch from offset $3 on whose greatest timestamp is at least $2.
select base_offset, last_offset, max_timestamp_ms, records from first_batch_at($1, $2, $3);

-- name: batch_of_greatest_timestamp
-- The first batch with the greatest timestamp ever appended to the partition, if it is still in the log.
select b.base_offset, b.last_offset, b.max_timestamp_ms, b.records
from partition p
cross join lateral first_batch_at(p.partition_key, p.max_timestamp_ms, 0) b
where p.partition_key = $1 and not p.deleted and p.max_timestamp_ms >= 0;

-- name: batch_of_greatest_remaining_timestamp
-- The same by looking at every batch of the partition (never at its bytes), for when that one is gone.
select b.base_offset, b.last_offset, b.max_timestamp_ms, b.records
from partition p
join batch b on b.partition_key = p.partition_key and b.last_offset >= p.log_start_offset
where p.partition_key = $1 and not p.deleted and b.max_timestamp_ms >= 0
order by b.max_timestamp_ms desc, b.base_offset
limit 1;

-- name: raise_log_start
-- DeleteRecords: no row = unknown partition; null = $2 is not within the log. -1 = all that is there. The row lock makes
-- the comparison hold against appends and retention.
update partition p
set log_start_offset = case
    when $2::bigint = -1 then p.next_offset
    when $2::bigint between 0 and p.next_offset then greatest(p.log_start_offset, $2::bigint)
    else p.log_start_offset end
where p.partition_key = $1 and not p.deleted
returning case when $2::bigint between -1 and p.next_offset then p.log_start_offset end as log_start_offset;
