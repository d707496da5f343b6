-- name: commit_offsets
-- One transaction: fences, then upserts; the refusal or null per commit.
select commit_offsets($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13) as refusals;

-- name: fetch_all_offsets
-- What a group has committed for live topics.
select o.topic_id, o.partition_index, o.committed_offset, o.leader_epoch, o.metadata, o.commit_timestamp_ms
from committed_offset o
join topic t on t.topic_id = o.topic_id and t.deleted_at is null
where o.group_id = $1
order by o.topic_id, o.partition_index;

-- name: fetch_offsets
-- The same for the partitions given as two arrays.
select o.topic_id, o.partition_index, o.committed_offset, o.leader_epoch, o.metadata, o.commit_timestamp_ms
from committed_offset o
join topic t on t.topic_id = o.topic_id and t.deleted_at is null
where o.group_id = $1
    and (o.topic_id, o.partition_index) in (select unnest($2::uuid[]), unnest($3::integer[]))
order by o.topic_id, o.partition_index;

-- name: lease_is_current
-- Locks the lease against a change of owner until the transaction ends.
select lease_is_current($1, $2, $3);

-- name: delete_offsets
-- Of one group, for the partitions given as two arrays.
delete from committed_offset o
where o.group_id = $1
    and (o.topic_id, o.partition_index) in (select unnest($2::uuid[]), unnest($3::integer[]));

-- name: expire_offsets
-- One bounded pass over a shard.
select * from expire_offsets($1, $2, $3, $4, $5, $6, $7, $8, $9);
