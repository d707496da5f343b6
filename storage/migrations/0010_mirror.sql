-- Partitions that `sluice mirror` fills from another cluster.

create table mirrored_partition (
    partition_key      bigint primary key references partition on delete cascade,
    source_cluster_id  text   not null,
    source_topic_id    uuid   not null,
    next_offset        bigint not null,
    mirrored_at        timestamptz not null default clock_timestamp()
);

comment on table mirrored_partition is
    'How far each partition has been copied from its source. The position and the records change in one transaction.';
comment on column mirrored_partition.source_topic_id is
    'Zero if the source has no topic ids. A topic that was made anew has another id, and its records do not follow the old ones.';
comment on column mirrored_partition.next_offset is
    'The end of the log as the mirror left it. If the log ends elsewhere, a client has produced to the partition.';
