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
