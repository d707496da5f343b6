-- Replicas that are in sync, where eligible.leader.replicas.version is 0 (KIP-966).
alter table partition add column in_sync integer[];

comment on column partition.in_sync is
    'Of the replicas, who alone may lead while eligible.leader.replicas.version is 0; null: all of them.';

create index partition_out_of_sync on partition (topic_id, partition_index) where in_sync is not null;
