-- name: transactional_producers
-- Those of the ids that exist, with what their transactions have enlisted. Times in Unix milliseconds.
select
    t.transactional_id, t.producer_id, t.producer_epoch, t.last_producer_epoch, t.previous_producer_id, t.timeout_ms,
    t.state, t.revision, (extract(epoch from t.started_at) * 1000)::bigint as started_ms,
    (extract(epoch from t.last_started_at) * 1000)::bigint as last_started_ms,
    (extract(epoch from t.updated_at) * 1000)::bigint as updated_ms, t.ending_producer_id, t.ending_marker
from transactional_producer t
where t.transactional_id = any ($1::text[]);

-- name: all_transactional_producers
-- The next $2 producers behind a transactional id, in the order of these ids, and how long ago each producer's last
-- transaction began.
select
    t.transactional_id, t.producer_id, t.state,
    (extract(epoch from clock_timestamp() - coalesce(t.started_at, t.last_started_at)) * 1000)::bigint as begun_ms
from transactional_producer t
where t.transactional_id > $1
order by t.transactional_id
limit $2;

-- name: partitions_in_transaction
-- Live partitions that the producers' transactions have enlisted.
select o.producer_id, t.name as topic, p.topic_id, p.partition_index, o.partition_key, o.first_offset
from open_transaction o
join partition p using (partition_key)
join topic t on t.topic_id = p.topic_id and t.deleted_at is null
where o.producer_id = any ($1::bigint[])
order by o.producer_id, t.name, p.partition_index;

-- name: groups_in_transaction
-- Groups whose offsets the producers' transactions have enlisted.
select producer_id, group_id from transaction_group where producer_id = any ($1::bigint[]) order by producer_id, group_id;

-- name: save_transactional_producer
-- Return whether the row was as the caller had read it, and has been written.
select save_transactional_producer($1, $2, $3, $4, $5, $6, $7, $8);

-- name: confirm_transactional_producer
-- Return whether the row is as the caller had read it (no row: it is not). The lock makes this statement a commit, which
-- waits for a synchronous standby.
select true from transactional_producer where transactional_id = $1 and revision = $2 for key share;

-- name: add_to_transaction
-- Return whether the row was as the caller had read it, and its transaction has enlisted the given elements; null: it
-- would be too large.
select add_to_transaction($1, $2, $3, $4, $5, $6);

-- name: end_transaction
-- End a transaction: write markers to the first partitions, the offsets, and the row. Write nothing if the row is not
-- as the caller had read it.
select * from end_transaction($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12);

-- name: continue_end
-- Write markers to the next partitions of a transaction whose end is decided. Write nothing if the row is not as the
-- caller had read it.
select * from continue_end($1, $2, $3);

-- name: overdue_transactions
-- Transactions that have exceeded their timeout, or whose decided end no node has continued for two seconds: the oldest
-- first, at most $3, behind the one that began at $1 and has the id $2.
select t.transactional_id, t.started_at, (extract(epoch from t.started_at) * 1000)::bigint as started_ms
from transactional_producer t
where t.started_at is not null and (t.started_at, t.transactional_id) > ($1::timestamptz, $2::text)
    and case
        when t.state = 'Ongoing' then t.started_at + t.timeout_ms * interval '1 millisecond' < clock_timestamp()
        else t.updated_at + interval '2 seconds' < clock_timestamp()
    end
order by t.started_at, t.transactional_id
limit $3;

-- name: expire_transactional_producers
-- Forget at most $2 ids that have begun no transaction for $1 ms, and return their number.
with idle as materialized (
    select t.transactional_id
    from transactional_producer t
    where t.started_at is null and t.updated_at < clock_timestamp() - $1::bigint * interval '1 millisecond'
    order by t.transactional_id
    limit $2
    for update skip locked
), forgotten as (
    delete from transactional_producer t using idle where t.transactional_id = idle.transactional_id returning 1
)
select count(*) from forgotten;

-- name: producer_in_partition
-- One row: the transactional id of producer $1, if it has one; whether its transaction has enlisted partition $2; and
-- the epoch with which the partition remembers the producer.
select
    t.transactional_id, t.producer_id, t.producer_epoch, t.last_producer_epoch, t.previous_producer_id, t.timeout_ms,
    t.state, t.revision, (extract(epoch from t.started_at) * 1000)::bigint as started_ms,
    (extract(epoch from t.last_started_at) * 1000)::bigint as last_started_ms, t.ending_producer_id, t.ending_marker,
    o.producer_id is not null as is_enlisted,
    (
        select s.producer_epoch from producer_state s
        where s.partition_key = $2 and s.producer_id = asked.producer_id
    ) as remembered_epoch
from (select $1::bigint as producer_id) asked
left join transactional_producer t using (producer_id)
left join open_transaction o on o.partition_key = $2 and o.producer_id = asked.producer_id;

-- name: producers_of
-- The next $3 producers behind id $2 that a partition remembers, each with the transaction that it has open there, and
-- whether it is a transactional id's.
select
    s.producer_id, s.producer_epoch, s.next_sequence,
    (extract(epoch from s.appended_at) * 1000)::bigint as appended_ms, o.first_offset,
    exists (select from transactional_producer t where t.producer_id = s.producer_id) as is_transactional
from producer_state s
left join open_transaction o using (partition_key, producer_id)
where s.partition_key = $1 and s.producer_id > $2
order by s.producer_id
limit $3;
