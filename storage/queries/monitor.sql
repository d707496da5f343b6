-- name: now_ms
-- Postgres' clock.
select now_ms();

-- name: monitored_partitions
-- Live partitions with both ends and sizes of their logs, from where on transactions are open, and
-- the nodes that were named for them, at most $1.
select
    p.topic, p.partition, p.partition_key, p.log_start_offset, p.log_end_offset, p.size_bytes,
    case
        when undecided.first_offset is null then p.log_end_offset
        else greatest(undecided.first_offset, p.log_start_offset)
    end as last_stable_offset,
    named.replicas, named.leader, named.leader_epoch, named.topic_id, count(*) over (partition by p.topic) as partition_count
from topic_partition p
join partition named using (partition_key)
left join (
    select o.partition_key, min(o.first_offset) as first_offset from open_transaction o group by o.partition_key
) undecided using (partition_key)
order by p.topic, p.partition
limit $1;

-- name: monitored_lag
-- Committed offsets and what is left to read, at most $1, group by group.
select group_id, topic, partition, committed_offset, lag
from consumer_lag
order by group_id
limit $1;

-- name: monitored_groups
-- Groups with the number of their members, at most $1.
select g.group_id, g.state, (select count(*) from group_member m where m.group_id = g.group_id) as members
from consumer_group g
order by g.group_id
limit $1;

-- name: transaction_totals
-- How many transactions are open, and for how long the oldest has been open.
select
    count(*) as open,
    coalesce(extract(epoch from clock_timestamp() - min(started_at)), 0)::double precision as oldest_s
from transactional_producer
where started_at is not null;

-- name: deletion_totals
-- How many hidden topics still have rows, the age of the oldest, how many of them have failed.
select
    count(*) as pending,
    coalesce(extract(epoch from clock_timestamp() - min(deleted_at)), 0)::double precision as oldest_s,
    count(*) filter (where delete_failures > 0) as failing
from topic
where deleted_at is not null;
