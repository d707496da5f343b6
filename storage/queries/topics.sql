-- name: catalog
-- The catalog's version with every live topic, in one snapshot; one row with null topic_id where there are none.
select
    c.catalog_version, t.topic_id, t.name, t.internal, t.configs::text as configs,
    p.partition_keys, p.leader_epochs
from cluster c
left join topic t on t.deleted_at is null
left join lateral (
    select
        array_agg(partition_key order by partition_index) as partition_keys,
        array_agg(leader_epoch order by partition_index) as leader_epochs
    from partition
    where topic_id = t.topic_id
) p on true
order by t.name;

-- name: catalog_version
-- Rises with every change of the catalog or of broker settings.
select catalog_version from cluster;

-- name: topic_by_name
-- A live topic.
select
    t.topic_id, t.name, t.internal, t.configs::text as configs,
    array_agg(p.partition_key order by p.partition_index) as partition_keys,
    array_agg(p.leader_epoch order by p.partition_index) as leader_epochs
from topic t join partition p using (topic_id)
where t.name = $1 and t.deleted_at is null
group by t.topic_id;

-- name: topic_by_id
-- A live topic.
select
    t.topic_id, t.name, t.internal, t.configs::text as configs,
    array_agg(p.partition_key order by p.partition_index) as partition_keys,
    array_agg(p.leader_epoch order by p.partition_index) as leader_epochs
from topic t join partition p using (topic_id)
where t.topic_id = $1 and t.deleted_at is null
group by t.topic_id;

-- name: create_topic
-- The new id, null if the name is taken.
select create_topic($1, $2, $3::text::jsonb, $4);

-- name: add_partitions
-- Null, or the refusal.
select add_partitions($1, $2);

-- name: delete_topic
-- Whether there was such a live topic.
select delete_topic($1);

-- name: set_topic_configs
-- Removes the keys $3, then sets those of $2.
update topic
set configs = (configs - $3::text[]) || $2::text::jsonb
where topic_id = $1 and deleted_at is null;

-- name: bump_catalog_version
-- First statement of every change of the catalog: its lock serialises them.
select bump_catalog_version();

-- name: broker_configs
-- Cluster-wide dynamic settings.
select name, value from broker_config order by name;

-- name: set_broker_configs
-- Upserts settings, given as two arrays.
insert into broker_config (name, value)
select unnest($1::text[]), unnest($2::text[])
on conflict (name) do update set value = excluded.value;

-- name: unset_broker_configs
-- Back to the static value or default.
delete from broker_config where name = any ($1::text[]);

-- name: group_configs
-- Settings of single groups.
select group_id, name, value from group_config order by group_id, name;

-- name: set_group_configs
-- Upserts settings of one group, given as two arrays.
insert into group_config (group_id, name, value)
select $1, unnest($2::text[]), unnest($3::text[])
on conflict (group_id, name) do update set value = excluded.value;

-- name: unset_group_configs
-- Back to the broker's value.
delete from group_config where group_id = $1 and name = any ($2::text[]);

-- name: cluster_id
-- Made once, with the schema.
select cluster_id from cluster;
