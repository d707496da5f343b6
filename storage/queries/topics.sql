-- name: catalog_changes
-- What has changed since revision $1.
select * from catalog_changes($1);

-- name: catalog_revision
-- The catalog's revision, which rises with every change of the catalog or of broker settings.
select revision from cluster;

-- name: topic_by_name
-- A live topic.
select
    t.topic_id, t.name, t.internal, t.configs::text as configs, t.created_revision, t.changed_revision,
    array_agg(p.partition_key order by p.partition_index) as partition_keys,
    array_agg(p.leader_epoch order by p.partition_index) as leader_epochs,
    (jsonb_object_agg(p.partition_index, jsonb_build_array(p.leader, p.replicas))
        filter (where p.replicas is not null))::text as assignments
from topic t join partition p using (topic_id)
where t.name = $1 and t.deleted_at is null
group by t.topic_id;

-- name: topic_by_id
-- A live topic.
select
    t.topic_id, t.name, t.internal, t.configs::text as configs, t.created_revision, t.changed_revision,
    array_agg(p.partition_key order by p.partition_index) as partition_keys,
    array_agg(p.leader_epoch order by p.partition_index) as leader_epochs,
    (jsonb_object_agg(p.partition_index, jsonb_build_array(p.leader, p.replicas))
        filter (where p.replicas is not null))::text as assignments
from topic t join partition p using (topic_id)
where t.topic_id = $1 and t.deleted_at is null
group by t.topic_id;

-- name: create_topics
-- The new topics, without those whose names ($2, distinct) are in use; without an id, if another node than $1 may still
-- serve a deleted topic of that name.
select * from create_topics($1, $2, $3, $4, $5, $6);

-- name: add_partitions
-- Add partitions. Return null, or the reason for a refusal.
select add_partitions($1, $2, $3::text::jsonb);

-- name: assign_replicas
-- For the partitions $2 of the topics $1, set the leader ($3) and the replicas ($4, JSON; null: they stay); return the
-- changed topics.
select topic_id from assign_replicas($1, $2, $3, $4) topic_id;

-- name: topics_by_id
-- Live topics of the ids $1.
select
    t.topic_id, t.name, t.internal, t.configs::text as configs, t.created_revision, t.changed_revision,
    array_agg(p.partition_key order by p.partition_index) as partition_keys,
    array_agg(p.leader_epoch order by p.partition_index) as leader_epochs,
    (jsonb_object_agg(p.partition_index, jsonb_build_array(p.leader, p.replicas))
        filter (where p.replicas is not null))::text as assignments
from topic t join partition p using (topic_id)
where t.topic_id = any ($1) and t.deleted_at is null
group by t.topic_id;

-- name: delete_topic
-- Hide a topic. Return whether a live topic had the id.
select delete_topic($1);

-- name: set_topic_configs
-- Remove the keys $3, then set those of $2.
select set_topic_configs($1, $2::text::jsonb, $3);

-- name: broker_configs
-- Dynamic settings of one broker, or of all (the empty name).
select name, value from broker_config where broker = $1 order by name;

-- name: set_broker_configs
-- Remove the names $4, then set the names $2 to the values $3, for the broker $1.
select set_broker_configs($1, $2, $3, $4);

-- name: set_group_configs
-- Remove the names $4 of group $1, then set the names $2 to the values $3.
select set_group_configs($1, $2, $3, $4);

-- name: set_client_quotas
-- Set the quotas $4 of users $1, client ids $2 and addresses $3 to the values $5, or remove them.
select set_client_quotas($1, $2, $3, $4, $5);

-- name: create_acls
-- Create ACLs with the keys $1, resource types $2, pattern types $3, names $4, principals $5, hosts $6, operations $7
-- and permissions $8.
select create_acls($1, $2, $3, $4, $5, $6, $7, $8);

-- name: delete_acls
-- Delete ACLs, and return the keys of $1 that existed.
select delete_acls($1) as acl_key;

-- name: acls
-- All ACLs.
select resource_type, pattern_type, resource_name, principal, host, operation, permission from acl;

-- name: cluster_id
-- The cluster's id, created once with the schema.
select cluster_id from cluster;
