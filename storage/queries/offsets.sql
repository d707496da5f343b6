-- name: commit_offsets
-- One transaction: fences, then upserts; the refusal or null per commit.
select commit_offsets($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13) as refusals;

-- name: fetch_all_offsets
-- What some groups have committed for live topics. Groups and topics are looked up one by one: a join may be planned as
-- a walk through all there are.
select o.group_id, o.topic_id, o.partition_index, o.committed_offset, o.leader_epoch, o.metadata, o.commit_timestamp_ms
from (select distinct unnest($1::text[]) as group_id) wanted
cross join lateral (
    select *
    from committed_offset c
    where c.group_id = wanted.group_id and (select t.deleted_at is null from topic t where t.topic_id = c.topic_id)
    offset 0
) o
order by o.group_id, o.topic_id, o.partition_index;

-- name: fetch_offsets
-- The same for the partitions given as three arrays, each looked up by its key: `offset 0` keeps the planner from
-- turning the look-ups into a join.
select o.group_id, o.topic_id, o.partition_index, o.committed_offset, o.leader_epoch, o.metadata, o.commit_timestamp_ms
from unnest($1::text[], $2::uuid[], $3::integer[]) wanted (group_id, topic_id, partition_index)
cross join lateral (
    select *
    from committed_offset c
    where c.group_id = wanted.group_id and c.topic_id = wanted.topic_id
        and c.partition_index = wanted.partition_index
        and (select t.deleted_at is null from topic t where t.topic_id = c.topic_id)
    offset 0
) o
order by o.group_id, o.topic_id, o.partition_index;

-- name: lease_is_current
-- Locks the lease against a change of owner until the transaction ends.
select lease_is_current('groups', $1, $2, $3);

-- name: delete_offsets
-- Of one group, for the partitions given as two arrays.
delete from committed_offset o
using unnest($2::uuid[], $3::integer[]) doomed (topic_id, partition_index)
where o.group_id = $1 and o.topic_id = doomed.topic_id and o.partition_index = doomed.partition_index;

-- name: expire_offsets
-- One bounded pass over a shard.
select * from expire_offsets($1, $2, $3, $4, $5, $6, $7, $8, $9);
