-- name: load_groups
-- One row per member; one row with null member_id for a group without members. The reader is about to wait for the
-- members of each group. The statement stores the time since when a coordinator waits for them, and returns the time
-- that was stored before. A time in the future, because the clock has been set back since, counts as now.
with waited_for as (
    update consumer_group g
    set restored_at_ms = now_ms()
    from (
        select w.group_id from consumer_group w
        where w.group_id = any ($1) and coalesce(w.restored_at_ms > now_ms(), true)
            and exists (select from group_member m where m.group_id = w.group_id)
        order by w.group_id for no key update skip locked
    ) unmarked
    where g.group_id = unmarked.group_id
)
select
    g.group_id, g.group_type, g.state, g.protocol_type, g.generation_id, g.document,
    case when g.restored_at_ms is not null then greatest(now_ms() - g.restored_at_ms, 0) end as silent_ms,
    m.member_id, m.member_epoch, m.document as member_document
from consumer_group g left join group_member m using (group_id)
where g.group_id = any ($1)
order by g.group_id;

-- name: shards_with_groups
-- Those of the shards $1 that have a group.
select asked.shard from unnest($1::integer[]) as asked (shard)
where exists (select from consumer_group g where g.shard = asked.shard);

-- name: load_shard
-- As load_groups, for every group of a shard that has members.
with waited_for as (
    update consumer_group g
    set restored_at_ms = now_ms()
    from (
        select w.group_id from consumer_group w
        where w.shard = $1 and coalesce(w.restored_at_ms > now_ms(), true)
            and exists (select from group_member m where m.group_id = w.group_id)
        order by w.group_id for no key update skip locked
    ) unmarked
    where g.group_id = unmarked.group_id
)
select
    g.group_id, g.group_type, g.state, g.protocol_type, g.generation_id, g.document,
    case when g.restored_at_ms is not null then greatest(now_ms() - g.restored_at_ms, 0) end as silent_ms,
    m.member_id, m.member_epoch, m.document as member_document
from consumer_group g join group_member m using (group_id)
where g.shard = $1
order by g.group_id;

-- name: any_group
-- Return whether any group exists.
select exists (select from consumer_group);

-- name: group_ids_of_shard
-- The next $3 groups of a shard behind an id.
select group_id from consumer_group where shard = $1 and group_id > $2 order by group_id limit $3;

-- name: groups_as_stored
-- As load_groups, with the time of the last change of state, and without storing that a coordinator waits for the
-- members.
select
    g.group_id, g.group_type, g.state, g.protocol_type, g.generation_id, g.document, g.state_timestamp_ms,
    null::bigint as silent_ms, m.member_id, m.member_epoch, m.document as member_document
from consumer_group g left join group_member m using (group_id)
where g.group_id = any ($1)
order by g.group_id, m.member_id;

-- name: list_groups
-- Every group of the cluster.
select group_id, group_type, protocol_type, state from consumer_group order by group_id;

-- name: save_groups
-- Save the changes of many groups; per group: saved, fenced or busy.
select save_groups($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16) as outcomes;

-- name: delete_group
-- Return 'deleted', 'missing', 'fenced', or 'more' if $5 of its offsets were deleted and others remain.
select delete_group($1, $2, $3, $4, $5);
