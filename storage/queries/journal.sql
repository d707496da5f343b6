-- name: journal_writes_lazily
-- What a crash of Postgres loses of the journal is its end, so its commits need not wait for the disk.
set local synchronous_commit = off;

-- name: journal_reserve
-- The first of $1 numbers for rows that this transaction inserts; other writers wait until it has ended.
select journal_reserve($1);

-- name: journal_make_partitions
-- Makes the tables of today and of $1 days ahead; how many were made.
select journal_make_partitions($1);

-- name: journal_retain
-- Drop days whose every row is older than $1 ms, and the oldest while all take more than $2 bytes. Returns how many.
select journal_retain($1, $2);

-- name: journal_recent_events
-- The newest events of a group, newest first.
select seq, at_ms, node_id, group_id, group_type, kind, reason, detail, generation_id, state_before, state_after, member_id,
    group_instance_id, client_id, protocol_name, member_count, wait_ms, row_count
from journal_event
where group_id in ($1, '')
order by seq desc
limit $2;

-- name: journal_recent_ownership
-- What the group's assignments changed from a number on, newest first.
select seq, at_ms, node_id, generation_id, topic, partition, change, member_id
from journal_ownership
where group_id = $1 and seq >= $2
order by seq desc
limit $3;

-- name: journal_recent_refusals
-- The group's refused commits from a number on, newest first.
select seq, at_ms, node_id, generation_id, member_id, topic, partition, "offset", log_end_offset, error_code,
    commit_count
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
