-- Where share groups (KIP-932) stand in the partitions that they read.
-- Of every row: a row that is deleted and begun anew must not meet an epoch that a former leader still writes by.
create sequence share_epoch;

create table share_partition (
    group_id         text collate "C" not null references consumer_group on delete cascade,
    topic_id         uuid    not null references topic on delete cascade,
    partition_index  integer not null,
    state_epoch      bigint  not null default nextval('share_epoch'),
    write_number     bigint  not null default 0,
    start_offset     bigint  not null,
    ranges           jsonb   not null default '[]',
    primary key (group_id, topic_id, partition_index)
) with (fillfactor = 50);

create index share_partition_topic on share_partition (topic_id);

comment on table share_partition is 'What a share group has done with the records of one partition: below start_offset all is settled.';
comment on column share_partition.state_epoch is
    'Another whenever a node reads the row to lead it, and with every change from outside, never one that was: fences the writes of who led it before.';
comment on column share_partition.write_number is
    'Rises with every write of who leads it: one that had no answer may come late, and must not undo what was written since.';
comment on column share_partition.ranges is
    'From start_offset on, without gaps: [number of records, state, delivery count]. 0 available, 2 acknowledged, 4 archived.';
