-- name: lead_share_partition
-- The row, whose former leader is fenced from here on; none if nobody has read the partition.
update share_partition
set state_epoch = nextval('share_epoch')
where group_id = $1 and topic_id = $2 and partition_index = $3
returning state_epoch, start_offset, ranges::text as ranges, write_number, begun_epoch, leader_epoch;

-- name: begin_share_partition
-- The row that there is now; none if there is no such share group, topic or partition. One that was begun without an offset has
-- it from here on.
insert into share_partition as s (group_id, topic_id, partition_index, start_offset)
select g.group_id, p.topic_id, p.partition_index, $4
from consumer_group g, topic t join partition p using (topic_id)
where g.group_id = $1 and g.group_type = 'share'
    and p.topic_id = $2 and p.partition_index = $3 and t.deleted_at is null
on conflict (group_id, topic_id, partition_index) do update set
    state_epoch = nextval('share_epoch'),
    start_offset = case when s.start_offset < 0 then excluded.start_offset else s.start_offset end
returning state_epoch, start_offset, ranges::text as ranges, write_number, begun_epoch, leader_epoch;

-- name: write_share_partitions
-- Positions (from 1) of those that were written: their epochs are the rows', and no later write was faster. One whose sender has
-- had no answer may come after its repetition.
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
-- Of those of the rows that there are: positions (from 1) and epochs.
select n.position, s.state_epoch
from unnest($1::text[], $2::uuid[], $3::integer[]) with ordinality n (group_id, topic_id, partition_index, position)
join share_partition s using (group_id, topic_id, partition_index);

-- name: share_offsets
-- Where the group stands, in live topics, and how many records behind that are in one of the states $2.
select s.topic_id, s.partition_index, s.start_offset,
    (
        select coalesce(sum((r ->> 0)::bigint), 0)::bigint
        from jsonb_array_elements(s.ranges) r
        where (r ->> 1)::integer = any ($2::integer[])
    ) as settled
from share_partition s join topic t using (topic_id)
where s.group_id = $1 and s.start_offset >= 0 and t.deleted_at is null
order by s.topic_id, s.partition_index;

-- name: alter_share_offsets
-- Begins the partitions $2, $3 of a share group without members anew, at $4; how many they were. Its row is locked, so that it
-- gains none meanwhile.
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
        state_epoch = nextval('share_epoch'), start_offset = excluded.start_offset, ranges = '[]',
        begun_epoch = least(s.begun_epoch::bigint + 1, 2147483647)::integer, leader_epoch = 0
    returning 1
)
select count(*) from altered;

-- name: delete_share_offsets
-- Of which of the topics $2 an idle share group knew where it stood; that is forgotten.
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

-- name: initialize_share_partitions
-- Begins those of the partitions $2, $3 of a share group anew that were not begun by a higher epoch: at $4, by $5 (-1: by any).
-- Positions (from 1) of those that there are, and whether each was begun.
with asked as materialized (
    select *
    from unnest($2::uuid[], $3::integer[], $4::bigint[], $5::integer[])
        with ordinality n (topic_id, partition_index, start_offset, begun_epoch, position)
), begun as (
    insert into share_partition as s (group_id, topic_id, partition_index, start_offset, begun_epoch)
    select g.group_id, a.topic_id, a.partition_index, a.start_offset, a.begun_epoch
    from asked a join partition p using (topic_id, partition_index) join topic t using (topic_id),
        consumer_group g
    where g.group_id = $1 and g.group_type = 'share' and t.deleted_at is null
    order by a.topic_id, a.partition_index
    on conflict (group_id, topic_id, partition_index) do update set
        state_epoch = nextval('share_epoch'), start_offset = excluded.start_offset, ranges = '[]',
        begun_epoch = excluded.begun_epoch, leader_epoch = 0
    where excluded.begun_epoch = -1 or s.begun_epoch <= excluded.begun_epoch
    returning s.topic_id, s.partition_index
)
select a.position, b.topic_id is not null as is_begun
from asked a left join begun b using (topic_id, partition_index)
where b.topic_id is not null or exists (
    select from share_partition s
    where (s.group_id, s.topic_id, s.partition_index) = ($1, a.topic_id, a.partition_index)
);

-- name: hear_share_leaders
-- Positions (from 1) of those of the partitions $2, $3 that nobody has read as a leader of an epoch as high as $4: who led them before is
-- fenced.
with later as materialized (
    select n.position, n.leader_epoch, s.group_id, s.topic_id, s.partition_index
    from unnest($2::uuid[], $3::integer[], $4::integer[])
        with ordinality n (topic_id, partition_index, leader_epoch, position)
    join share_partition s using (topic_id, partition_index)
    where s.group_id = $1 and s.leader_epoch < n.leader_epoch
    order by s.topic_id, s.partition_index
    for update of s
), heard as (
    update share_partition s
    set state_epoch = nextval('share_epoch'), leader_epoch = later.leader_epoch
    from later
    where (s.group_id, s.topic_id, s.partition_index) = (later.group_id, later.topic_id, later.partition_index)
    returning later.position
)
select position from heard;

-- name: share_states
-- Of those of the partitions $2, $3 that there are: positions (from 1) and rows, whoever leads them.
select n.position, s.state_epoch, s.start_offset, s.ranges::text as ranges, s.write_number, s.begun_epoch, s.leader_epoch
from unnest($2::uuid[], $3::integer[]) with ordinality n (topic_id, partition_index, position)
join share_partition s using (topic_id, partition_index)
where s.group_id = $1;

-- name: share_summaries
-- As share_states, without what became of each record, and how many records behind the start are in one of the states $4.
select n.position, s.start_offset, s.begun_epoch, s.leader_epoch,
    (
        select coalesce(sum((r ->> 0)::bigint), 0)::bigint
        from jsonb_array_elements(s.ranges) r
        where (r ->> 1)::integer = any ($4::integer[])
    ) as settled
from unnest($2::uuid[], $3::integer[]) with ordinality n (topic_id, partition_index, position)
join share_partition s using (topic_id, partition_index)
where s.group_id = $1;

-- name: delete_share_partitions
-- Forgets where the group stands in the partitions $2, $3.
with asked as materialized (
    select s.group_id, s.topic_id, s.partition_index
    from unnest($2::uuid[], $3::integer[]) n (topic_id, partition_index)
    join share_partition s using (topic_id, partition_index)
    where s.group_id = $1
    order by s.topic_id, s.partition_index
    for update of s
)
delete from share_partition s
using asked
where (s.group_id, s.topic_id, s.partition_index) = (asked.group_id, asked.topic_id, asked.partition_index);
