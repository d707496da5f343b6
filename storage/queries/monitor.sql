-- name: now_ms
-- Postgres' clock.
select now_ms();

-- name: monitored_partitions
-- Live partitions with both ends of their logs, at most $1.
select topic, partition, partition_key, log_start_offset, log_end_offset
from topic_partition
order by topic, partition
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

-- name: deletion_totals
-- How many hidden topics still have rows, the age of the oldest, how many of them have failed.
select
    count(*) as pending,
    coalesce(extract(epoch from clock_timestamp() - min(deleted_at)), 0)::double precision as oldest_s,
    count(*) filter (where delete_failures > 0) as failing
from topic
where deleted_at is not null;
