-- name: console_position
-- The number that the next row of the journal will get.
select next_seq from journal_position;

-- name: console_group_position
-- The newest number of a group in each table that a timeline is drawn from.
select
    (select max(seq) from journal_event where group_id = $1) as event,
    (select max(seq) from journal_ownership where group_id = $1) as ownership,
    (select max(seq) from journal_handoff where group_id = $1) as handoff,
    (select max(seq) from journal_offset where group_id = $1 and error_code <> 0) as refusal;

-- name: console_groups
-- Groups whose id contains $1, at most $2, ordered by id: members, lag by topic, and the state that the journal wrote
-- last.
select
    g.group_id, g.group_type, g.protocol_type,
    coalesce(last.state_after, g.state) as state,
    coalesce(last.at_ms, g.state_timestamp_ms) as changed_ms,
    (select count(*) from group_member m where m.group_id = g.group_id) as members,
    (
        select coalesce(jsonb_object_agg(t.topic, t.lag), '{}')
        from (select l.topic, sum(l.lag) as lag from consumer_lag l where l.group_id = g.group_id group by l.topic) t
    )::text as lags
from (
    select * from consumer_group where $1 = '' or position($1 in group_id) > 0 order by group_id limit $2
) g
left join lateral (
    select e.state_after, e.at_ms from journal_event e where e.group_id = g.group_id order by e.seq desc limit 1
) last on true
order by g.group_id;

-- name: console_group_offsets
-- The committed offsets of a group and the bounds of the logs, at most $2.
select topic, partition, committed_offset, log_start_offset, log_end_offset, lag,
    (extract(epoch from committed_at) * 1000)::bigint as committed_ms
from consumer_lag
where group_id = $1
order by topic, partition
limit $2;

-- name: console_recent_events
-- The newest events of all groups since a time, newest first, at most $2.
select seq, at_ms, node_id, group_id, group_type, kind, reason, detail, generation_id, state_before, state_after, member_id,
    group_instance_id, client_id, client_host, protocol_name, member_count, wait_ms, row_count
from journal_event
where at_ms >= $1 and written_at >= to_timestamp(($1 - 3600000) / 1000.0)
order by seq desc
limit $2;

-- name: console_forced_handoffs
-- Handoffs that ended by a timeout since a time, for each group.
select group_id, count(*) as forced
from journal_handoff
where at_ms >= $1 and written_at >= to_timestamp(($1 - 3600000) / 1000.0) and phase = 'ended'
    and reason in ('timeout', 'client_cap')
group by group_id
limit $2;

-- name: console_refusals
-- Refused commits since a time, for each group.
select group_id, sum(commit_count)::bigint as refused
from journal_offset
where at_ms >= $1 and written_at >= to_timestamp(($1 - 3600000) / 1000.0) and error_code <> 0 and group_id <> ''
group by group_id
limit $2;

-- name: console_events
-- The events of a group between two times, newest first, at most $4.
select seq, at_ms, node_id, group_id, group_type, kind, reason, detail, generation_id, state_before, state_after, member_id,
    group_instance_id, client_id, client_host, protocol_name, member_count, wait_ms, row_count
from journal_event
where group_id in ($1, '') and at_ms >= $2 and at_ms <= $3
    and written_at >= to_timestamp(($2 - 3600000) / 1000.0) and written_at <= to_timestamp(($3 + 3600000) / 1000.0)
order by seq desc
limit $4;

-- name: console_ownership
-- Changes of ownership in a group between two times, newest first, at most $4.
select seq, at_ms, node_id, generation_id, topic, partition, change, member_id
from journal_ownership
where group_id = $1 and at_ms >= $2 and at_ms <= $3
    and written_at >= to_timestamp(($2 - 3600000) / 1000.0) and written_at <= to_timestamp(($3 + 3600000) / 1000.0)
order by seq desc
limit $4;

-- name: console_ownership_before
-- The last changes of ownership in a group before a time, newest first, at most $3.
select seq, at_ms, node_id, generation_id, topic, partition, change, member_id
from journal_ownership
where group_id = $1 and at_ms < $2 and written_at <= to_timestamp(($2 + 3600000) / 1000.0)
order by seq desc
limit $3;

-- name: console_handoffs
-- Handoffs of a group between two times, newest first, at most $4.
select seq, at_ms, node_id, generation_id, topic, partition, phase, mode, source_member_id, target_member_id, mark_offset,
    reason, wait_ms
from journal_handoff
where group_id = $1 and at_ms >= $2 and at_ms <= $3
    and written_at >= to_timestamp(($2 - 3600000) / 1000.0) and written_at <= to_timestamp(($3 + 3600000) / 1000.0)
order by seq desc
limit $4;

-- name: console_group_refusals
-- Refused commits of a group between two times, newest first, at most $4.
select seq, at_ms, node_id, generation_id, member_id, topic, partition, "offset", log_end_offset, error_code,
    commit_count, sql_role
from journal_offset
where group_id = $1 and error_code <> 0 and at_ms >= $2 and at_ms <= $3
    and written_at >= to_timestamp(($2 - 3600000) / 1000.0) and written_at <= to_timestamp(($3 + 3600000) / 1000.0)
order by seq desc
limit $4;

-- name: console_members
-- The newest name and host of members of a group.
select distinct on (member_id) member_id, client_id, client_host, group_instance_id
from journal_member
where group_id = $1 and member_id = any($2::text[])
order by member_id, seq desc;

-- name: console_lag_history
-- Commits of a group among the journal's numbers from $2 on: the greatest lag in each of 120 slots between two times.
select topic, partition, ((at_ms - $3) * 120 / greatest($4 - $3, 1))::integer as slot,
    max(greatest(log_end_offset - greatest("offset", 0), 0)) as lag
from journal_offset
where seq >= $2 and group_id = $1 and kind = 'commit' and error_code = 0 and log_end_offset is not null
    and at_ms >= $3 and at_ms <= $4
group by topic, partition, slot
order by topic, partition, slot
limit $5;

-- name: console_topics
-- Topics whose name contains $1, at most $2, ordered by name: partitions, records and bytes.
select t.name, t.internal, count(p.partition_index) as partitions,
    coalesce(sum(p.next_offset - p.log_start_offset), 0)::bigint as records,
    coalesce(sum(p.next_offset), 0)::bigint as written,
    coalesce(sum(p.size_bytes), 0)::bigint as size_bytes,
    max(p.max_timestamp_ms) as newest_ms
from (
    select * from topic
    where deleted_at is null and ($1 = '' or position($1 in name) > 0)
    order by name
    limit $2
) t
left join partition_log p using (topic_id)
group by t.name, t.internal
order by t.name;

-- name: console_partitions
-- The partitions of a topic with the bounds and sizes of their logs and the last stable offset, at most $2.
select p.partition_index as partition, p.log_start_offset, p.next_offset as log_end_offset, p.size_bytes,
    nullif(p.max_timestamp_ms, -1) as newest_ms,
    (select min(o.first_offset) from open_transaction o where o.partition_key = p.partition_key) as undecided_offset
from topic t join partition_log p using (topic_id)
where t.name = $1 and t.deleted_at is null
order by p.partition_index
limit $2;

-- name: console_consumers
-- Groups that have committed offsets of a topic, with their lag, at most $2.
select l.group_id, sum(l.lag)::bigint as lag, count(*) as partitions
from committed_offset o
join topic t on t.topic_id = o.topic_id and t.name = $1 and t.deleted_at is null
join consumer_lag l on l.group_id = o.group_id and l.topic = t.name and l.partition = o.partition_index
group by l.group_id
order by lag desc, l.group_id
limit $2;

-- name: console_transactions
-- Open transactions, the oldest first, at most $1: their age, and the partitions whose readers of committed records wait.
select p.transactional_id, p.producer_id, p.producer_epoch, p.timeout_ms,
    (extract(epoch from clock_timestamp() - p.started_at) * 1000)::bigint as age_ms,
    (
        select coalesce(jsonb_agg(jsonb_build_array(held.topic, held.partition, held.first_offset, held.log_end_offset)), '[]')
        from (
            select t.topic, t.partition, o.first_offset, t.log_end_offset
            from open_transaction o
            join topic_partition t using (partition_key)
            where o.producer_id = p.producer_id
            order by t.topic, t.partition
            limit 100
        ) held
    )::text as partitions,
    (
        select coalesce(jsonb_agg(g.group_id), '[]')
        from (select group_id from transaction_group where producer_id = p.producer_id limit 20) g
    )::text as groups
from transactional_producer p
where p.started_at is not null
order by p.started_at
limit $1;

-- name: console_share_groups
-- Positions of share groups, at most $1: the first offset whose record is not settled.
select s.group_id, t.name as topic, s.partition_index as partition, s.start_offset, p.next_offset as log_end_offset
from share_partition s
join topic t on t.topic_id = s.topic_id and t.deleted_at is null
join partition_log p on p.topic_id = s.topic_id and p.partition_index = s.partition_index
order by s.group_id, t.name, s.partition_index
limit $1;

-- name: console_totals
-- What the cluster has written and committed so far, for rates.
select
    (select coalesce(sum(next_offset), 0) from partition_log)::bigint as written,
    -- Clients may commit any offset, so the sum may be too large for an integer.
    (select coalesce(sum(committed_offset), 0) from committed_offset)::double precision as committed,
    (select coalesce(sum(size_bytes), 0) from partition_log)::bigint as size_bytes,
    (select count(*) from topic where deleted_at is null and not internal) as topics,
    (select count(*) from partition_log) as partitions,
    (select count(*) from consumer_group) as groups;

-- name: console_jobs
-- The node that holds each lease of the kind `jobs`.
select l.shard, l.node_id
from coordinator_lease l
where l.kind = 'jobs' and l.expires_at > clock_timestamp()
order by l.shard;
