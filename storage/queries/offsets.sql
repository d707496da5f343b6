-- name: commit_offsets
-- Write commits in one transaction: fences first, then the offsets. Return the refusal or null per commit.
select commit_offsets($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13) as refusals;

-- name: commit_offsets_in_transaction
-- As commit_offsets, for offsets that become committed with a transaction.
select commit_offsets_in_transaction($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16) as refusals;

-- name: fetch_all_offsets
-- Committed offsets of some groups for live topics. If $2 is true, each is followed by a row if an open transaction has
-- an offset for the partition. Groups and topics are looked up one by one, because Postgres may plan a join as a scan
-- of all of them. If nothing is pending for any of the groups, one look-up finds that out.
select
    o.group_id, o.topic_id, o.partition_index, o.committed_offset, o.leader_epoch, o.metadata, o.commit_timestamp_ms,
    false as is_pending
from (select distinct unnest($1::text[]) as group_id) wanted
cross join lateral (
    select *
    from committed_offset c
    where c.group_id = wanted.group_id and (select t.deleted_at is null from topic t where t.topic_id = c.topic_id)
    offset 0
) o
union all
select o.group_id, o.topic_id, o.partition_index, -1, -1, '', o.commit_timestamp_ms, true
from (select distinct unnest($1::text[]) as group_id) wanted
cross join lateral (
    select *
    from pending_offset p
    where p.group_id = wanted.group_id and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id)
    offset 0
) o
where $2::boolean and exists (select from pending_offset p where p.group_id = any ($1::text[]))
order by group_id, topic_id, partition_index, is_pending;

-- name: fetch_offsets
-- As fetch_all_offsets, for the partitions given as three arrays. Each is looked up by its key: `offset 0` keeps the
-- planner from turning the look-ups into a join.
select
    o.group_id, o.topic_id, o.partition_index, o.committed_offset, o.leader_epoch, o.metadata, o.commit_timestamp_ms,
    false as is_pending
from unnest($1::text[], $2::uuid[], $3::integer[]) wanted (group_id, topic_id, partition_index)
cross join lateral (
    select *
    from committed_offset c
    where c.group_id = wanted.group_id and c.topic_id = wanted.topic_id
        and c.partition_index = wanted.partition_index
        and (select t.deleted_at is null from topic t where t.topic_id = c.topic_id)
    offset 0
) o
union all
select o.group_id, o.topic_id, o.partition_index, -1, -1, '', o.commit_timestamp_ms, true
from unnest($1::text[], $2::uuid[], $3::integer[]) wanted (group_id, topic_id, partition_index)
cross join lateral (
    select *
    from pending_offset p
    where p.group_id = wanted.group_id and p.topic_id = wanted.topic_id
        and p.partition_index = wanted.partition_index
        and (select t.deleted_at is null from topic t where t.topic_id = p.topic_id)
    offset 0
) o
where $4::boolean and exists (select from pending_offset p where p.group_id = any ($1::text[]))
order by group_id, topic_id, partition_index, is_pending;

-- name: delete_offsets
-- Delete offsets of one group, for the partitions given as two arrays. Return whether the lease is current.
select delete_offsets($1, $2, $3, $4, $5, $6);

-- name: expire_offsets
-- One bounded pass over a shard.
select * from expire_offsets($1, $2, $3, $4, $5, $6, $7, $8, $9, $10);

-- name: offsets_as_stored
-- Committed offsets of the groups, of live topics: $2 rows at most.
select
    o.group_id, t.name as topic, o.topic_id, o.partition_index, o.committed_offset, o.leader_epoch, o.metadata,
    o.commit_timestamp_ms, o.expire_timestamp_ms
from committed_offset o
join topic t on t.topic_id = o.topic_id and t.deleted_at is null
where o.group_id = any ($1::text[])
order by o.group_id, t.name, o.partition_index
limit $2;

-- name: offsets_behind
-- At most $4 of the group's committed offsets, behind a topic's partition. `topic` is null if the topic was deleted.
select
    t.name as topic, o.topic_id, o.partition_index, o.committed_offset, o.leader_epoch, o.metadata,
    o.commit_timestamp_ms, o.expire_timestamp_ms
from committed_offset o
left join topic t on t.topic_id = o.topic_id and t.deleted_at is null
where o.group_id = $1 and (o.topic_id, o.partition_index) > ($2, $3)
order by o.topic_id, o.partition_index
limit $4;
