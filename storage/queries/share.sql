-- name: lead_share_partition
-- Take the row over, which fences its former leader. No row if no node has read the partition.
update share_partition
set state_epoch = nextval('share_epoch')
where group_id = $1 and topic_id = $2 and partition_index = $3
returning state_epoch, start_offset, ranges::text as ranges, write_number;

-- name: begin_share_partition
-- Begin a share partition and return its row; none if the share group, topic or partition does not exist. A row that
-- another node began first keeps its offset.
insert into share_partition (group_id, topic_id, partition_index, start_offset)
select g.group_id, p.topic_id, p.partition_index, $4
from consumer_group g, topic t join partition p using (topic_id)
where g.group_id = $1 and g.group_type = 'share'
    and p.topic_id = $2 and p.partition_index = $3 and t.deleted_at is null
on conflict (group_id, topic_id, partition_index) do update set state_epoch = nextval('share_epoch')
returning state_epoch, start_offset, ranges::text as ranges, write_number;

-- name: write_share_partitions
-- Write rows. Return the positions (from 1) of the written ones: those with the epoch of the stored row, unless a later
-- write has arrived before. If a sender got no answer, its first attempt may arrive after its repetition.
with mine as materialized (
    select n.position, s.group_id, s.topic_id, s.partition_index
    from unnest($1::text[], $2::uuid[], $3::integer[], $4::bigint[], $7::bigint[])
        with ordinality n (group_id, topic_id, partition_index, state_epoch, write_number, position)
    join share_partition s using (group_id, topic_id, partition_index)
    where s.state_epoch = n.state_epoch and s.write_number <= n.write_number
    order by s.group_id, s.topic_id, s.partition_index
    for update of s
), written as (
    update share_partition s
    set start_offset = ($5::bigint[])[mine.position], ranges = ($6::text[])[mine.position]::jsonb,
        write_number = ($7::bigint[])[mine.position]
    from mine
    where (s.group_id, s.topic_id, s.partition_index) = (mine.group_id, mine.topic_id, mine.partition_index)
    returning mine.position
)
select position from written;

-- name: share_epochs
-- Positions (from 1) and epochs of the rows that exist.
select n.position, s.state_epoch
from unnest($1::text[], $2::uuid[], $3::integer[]) with ordinality n (group_id, topic_id, partition_index, position)
join share_partition s using (group_id, topic_id, partition_index);

-- name: share_offsets
-- The group's positions in live topics, and how many records behind each are in one of the states $2.
select s.topic_id, s.partition_index, s.start_offset,
    (
        select coalesce(sum((r ->> 0)::bigint), 0)::bigint
        from jsonb_array_elements(s.ranges) r
        where (r ->> 1)::integer = any ($2::integer[])
    ) as settled
from share_partition s join topic t using (topic_id)
where s.group_id = $1 and t.deleted_at is null
order by s.topic_id, s.partition_index;

-- name: alter_share_offsets
-- Restart the partitions $2, $3 of a share group without members at $4; return how many. The group's row is locked, so
-- that it gains no member concurrently.
with idle as materialized (
    select g.group_id
    from consumer_group g
    where g.group_id = $1 and g.group_type = 'share' and g.state = 'Empty'
        and not exists (select from group_member m where m.group_id = g.group_id)
    for update
), altered as (
    insert into share_partition as s (group_id, topic_id, partition_index, start_offset)
    select idle.group_id, n.topic_id, n.partition_index, n.start_offset
    from idle, unnest($2::uuid[], $3::integer[], $4::bigint[]) n (topic_id, partition_index, start_offset)
    order by n.topic_id, n.partition_index
    on conflict (group_id, topic_id, partition_index) do update set
        state_epoch = nextval('share_epoch'), start_offset = excluded.start_offset, ranges = '[]'
    returning 1
)
select count(*) from altered;

-- name: delete_share_offsets
-- Delete the positions of an idle share group in the topics $2; return the topics in which it had any.
with idle as materialized (
    select g.group_id
    from consumer_group g
    where g.group_id = $1 and g.group_type = 'share' and g.state = 'Empty'
        and not exists (select from group_member m where m.group_id = g.group_id)
    for update
), gone as (
    delete from share_partition s
    using idle
    where s.group_id = idle.group_id and s.topic_id = any ($2::uuid[])
    returning s.topic_id
)
select distinct topic_id from gone;
