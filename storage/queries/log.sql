-- name: append_chunks
-- One group commit: decide offsets, write the index, and the bytes if they are inline and given.
select * from append_chunks($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17);

-- name: append_one
-- As append_plain, for a small commit of one chunk.
select * from append_one($1, $2, $3, $4, $5, $6, $7, $8);

-- name: append_plain
-- As append_chunks, for a usual commit: one chunk per partition, and producers that continue their sequences.
select * from append_plain($1, $2, $3, $4, $5, $6);

-- name: expected_sequences
-- For each pair of partition and producer, the producer's epoch and the sequence that must come next. No row: the
-- partition does not know the producer.
select wanted.partition_key, wanted.producer_id, state.producer_epoch, state.next_sequence
from unnest($1::bigint[], $2::bigint[]) wanted (partition_key, producer_id)
cross join lateral (
    select p.producer_epoch, p.next_sequence
    from producer_state p
    where p.partition_key = wanted.partition_key and p.producer_id = wanted.producer_id
    order by p.since_offset desc
    limit 1
) state;

-- name: read_chunks
-- One fetch: states and chunks of all requested partitions, in one snapshot.
select * from read_chunks($1, $2, $3, $4, $5, $6, $7, $8);

-- name: aborted_between
-- Per request (partition, from, up to), the aborted transactions with records in that range, by first offset, or one
-- row without any; no row if the partition does not exist. The search goes by the offset of the marker, up to the first
-- marker at which everything below the end was stable. It is complete for records behind the log start. $4 limits the
-- transactions of all requests together; null: no limit. A row holds up to a thousand transactions, because a row for
-- each would cost as many more Python objects.
select
    numbered.request_position, numbered.log_start_offset,
    array_agg(numbered.producer_id order by numbered.number) as producer_ids,
    array_agg(numbered.first_offset order by numbered.number) as first_offsets,
    array_agg(numbered.last_offset order by numbered.number) as last_offsets
from (
    select found.*, row_number() over (order by found.request_position, found.first_offset) as number
    from (
        select wanted.request_position, p.log_start_offset, a.producer_id, a.first_offset, a.last_offset
        from (
            select
                unnest($1::bigint[]) as partition_key, unnest($2::bigint[]) as from_offset,
                unnest($3::bigint[]) as end_offset, generate_series(1, cardinality($1::bigint[])) as request_position
        ) wanted
        join partition p on p.partition_key = wanted.partition_key
        left join lateral (
            select a.producer_id, a.first_offset, a.last_offset
            from aborted_transaction a
            where a.partition_key = wanted.partition_key
                and a.last_offset between wanted.from_offset and coalesce(
                    (
                        select b.last_offset from aborted_transaction b
                        where b.partition_key = wanted.partition_key and b.last_offset >= wanted.from_offset
                            and b.last_stable_offset >= wanted.end_offset
                        order by b.last_offset
                        limit 1
                    ), 9223372036854775807)
                and a.first_offset < wanted.end_offset
            offset 0
        ) a on true
        order by wanted.request_position, a.first_offset
        limit $4::bigint
    ) found
) numbered
group by numbered.request_position, numbered.log_start_offset, (numbered.number - 1) / 1000
order by min(numbered.number);

-- name: chunks_between
-- The chunks of a partition that lie at least in part within offsets $2 to $3, and their bytes if they are inline.
select
    c.partition_key, c.base_offset, c.last_offset, c.object_id, c.position, c.size_bytes, c.batch_count, c.leader_epoch, c.final_heads,
    (select i.records from inline_records i where i.slot = c.inline_slot and i.position = c.position) as records
from chunk c
where c.partition_key = $1
    and c.base_offset >= coalesce(
        (
            select b.base_offset from chunk b
            where b.partition_key = $1 and b.base_offset <= $2
            order by b.base_offset desc
            limit 1
        ), $2)
    and c.last_offset >= $2
    and c.base_offset <= $3
order by c.base_offset;

-- name: partition_states
-- Live partitions among those requested. The last stable offset is where the first open transaction began.
select
    p.partition_key, p.log_start_offset, p.next_offset as high_watermark,
    greatest(
        coalesce((select min(o.first_offset) from open_transaction o where o.partition_key = p.partition_key), p.next_offset),
        p.log_start_offset
    ) as last_stable_offset,
    p.leader_epoch, p.size_bytes
from partition_log p
where p.partition_key = any ($1::bigint[]) and not p.deleted
    and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id);

-- name: chunk_at_timestamp
-- The first chunk that reaches offset $3 and whose greatest timestamp is at least $2, with its inline bytes and the log
-- start.
select
    c.partition_key, c.base_offset, c.last_offset, c.object_id, c.position, c.size_bytes, c.batch_count, c.leader_epoch, c.final_heads,
    (select i.records from inline_records i where i.slot = c.inline_slot and i.position = c.position) as records,
    p.log_start_offset
from partition p
cross join lateral chunk_at(p.partition_key, $2, $3) c
where p.partition_key = $1;

-- name: greatest_timestamp
-- The log start, and the greatest timestamp of the chunks that lie wholly behind it; null if no chunk has a timestamp.
-- It is the greatest ever appended, if a chunk that has it still exists; otherwise every chunk is read.
select
    p.log_start_offset,
    coalesce(
        (select c.max_timestamp_ms from chunk_at($1, p.max_timestamp_ms, 0) c where c.base_offset >= p.log_start_offset),
        (
            select max(c.max_timestamp_ms) from chunk c
            where c.partition_key = $1 and c.base_offset >= p.log_start_offset and c.max_timestamp_ms >= 0
        )
    ) as max_timestamp_ms
from partition_log p
where p.partition_key = $1 and not p.deleted and p.max_timestamp_ms >= 0
    and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id);

-- name: raise_log_start
-- The log start after DeleteRecords or retention: no row = unknown partition; null = $2 is not within the log. -1 = the
-- whole log.
select log_start_offset from raise_log_start($1, $2);

-- name: register_object
-- A new object, before there is a file of its name.
insert into log_object (node_id, incarnation) values ($1, $2) returning object_id;

-- name: seal_object
-- Seal an object, so that no node appends to it any more, and store its final size.
update log_object set sealed_at = clock_timestamp(), size_bytes = $2
where object_id = $1 and sealed_at is null
returning object_id;

-- name: log_store
-- The store that holds the bytes, and the database's history; no row if all bytes are inline.
select store_id, location, (select history from cluster) as history from log_store;

-- name: lock_log_store
-- Nodes that start on a new store take turns. This is no lock on the table, because every start reads it.
select pg_advisory_xact_lock(5492300418);

-- name: claimant
-- Identity of this database's tables. Another server, another database and a restored dump have another one.
select concat_ws(
    '/',
    (select system_identifier from pg_control_system()),
    (select oid from pg_database where datname = current_database()),
    'log_store'::regclass::oid
);

-- name: claim_log_store
-- The first directory or bucket becomes the database's store.
insert into log_store (store_id, location) values ($1, $2) on conflict do nothing;
