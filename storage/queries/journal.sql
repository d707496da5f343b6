-- name: journal_writes_lazily
-- Commits of the journal need not wait for the disk: a crash of Postgres loses only the journal's end.
set local synchronous_commit = off;

-- name: journal_reserve
-- Return the first of $1 numbers for rows that this transaction inserts. Other writers wait until it has ended.
select journal_reserve($1);

-- name: journal_sql_commits
-- Move at most $2 offsets that SQL transactions have committed to the journal, as node $1; return their number. Two
-- nodes that do this at once move different offsets.
with taken as (
    delete from staged_offset s
    where (s.xid, s.position) in (
        select o.xid, o.position from staged_offset o
        where o.committed_ms is not null order by o.committed_ms limit $2 for update skip locked
    )
    returning s.*
),
reserved as (
    select journal_reserve(count(*)) as first_seq from taken having count(*) > 0
),
numbered as (
    select t.*, row_number() over (order by t.committed_ms, t.xid, t.position) - 1 as place from taken t
),
written as (
    insert into journal_offset (
        seq, at_ms, node_id, group_id, kind, generation_id, member_id, topic_id, topic, partition, "offset",
        log_start_offset, log_end_offset, sql_role
    )
    select
        r.first_seq + n.place, n.committed_ms, $1, n.group_id, 'commit', coalesce(n.generation_id, -1), n.member_id,
        n.topic_id, coalesce(t.name, n.topic_id::text), n.partition_index, n.committed_offset, l.log_start_offset,
        l.next_offset, n.role_name
    from numbered n
    cross join reserved r
    left join topic t on t.topic_id = n.topic_id
    left join partition_log l on l.topic_id = n.topic_id and l.partition_index = n.partition_index
)
select count(*) from taken;

-- name: journal_sql_refusals
-- Move the fenced commits of SQL transactions to the journal, as node $1; return their number.
select journal_sql_refusals($1);

-- name: journal_make_partitions
-- Create the tables of today and of $1 days ahead; return their number.
select journal_make_partitions($1);

-- name: journal_retain
-- Drop the days all of whose rows are older than $1 ms, and the oldest days while all days take more than $2 bytes.
-- Return how many.
select journal_retain($1, $2);

-- name: journal_recent_events
-- The newest events of a group, newest first.
select seq, at_ms, node_id, group_id, group_type, kind, reason, detail, generation_id, state_before, state_after, member_id,
    group_instance_id, client_id, protocol_name, member_count, wait_ms, row_count
from journal_event
where group_id in ($1, '')
order by seq desc
limit $2;

-- name: journal_recent_groups
-- The groups of the newest events.
select distinct group_id
from (select group_id from journal_event order by seq desc limit $1) newest
where group_id <> ''
order by group_id;

-- name: journal_recent_ownership
-- Changes of ownership in the group from a number on, newest first.
select seq, at_ms, node_id, generation_id, topic, partition, change, member_id
from journal_ownership
where group_id = $1 and seq >= $2
order by seq desc
limit $3;

-- name: journal_recent_refusals
-- The group's refused commits from a number on, newest first.
select seq, at_ms, node_id, generation_id, member_id, topic, partition, "offset", log_end_offset, error_code,
    commit_count, sql_role
from journal_offset
where group_id = $1 and seq >= $2 and error_code <> 0
order by seq desc
limit $3;

-- name: journal_recent_handoffs
-- The group's handoffs from a number on, newest first.
select seq, at_ms, node_id, generation_id, topic, partition, phase, mode, source_member_id, target_member_id, mark_offset,
    reason, wait_ms
from journal_handoff
where group_id = $1 and seq >= $2
order by seq desc
limit $3;
