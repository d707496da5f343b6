-- Groups of all types, their members, and the offsets that they commit.

create table consumer_group (
    group_id            text collate "C" primary key,
    shard               integer not null,
    group_type          text    not null,
    state               text    not null,
    state_timestamp_ms  bigint  not null,
    protocol_type       text,
    generation_id       integer not null,
    restored_at_ms      bigint,
    document            jsonb   not null
) with (fillfactor = 50);

comment on table consumer_group is
    'The values that Postgres decides by have columns; the rest is a document that only the machine of the group''s type reads.';
comment on column consumer_group.generation_id is 'Generation or group epoch: fences offset commits that name no member epoch.';
comment on column consumer_group.restored_at_ms is
    'Since when a coordinator, or one after another, waits to hear from all members again; null once every member has been heard.';

create index consumer_group_shard on consumer_group (shard, group_id);

create table group_member (
    group_id      text collate "C" not null references consumer_group,
    member_id     text collate "C" not null,
    member_epoch  integer not null,
    document      jsonb   not null,
    primary key (group_id, member_id)
) with (fillfactor = 70);

comment on column group_member.member_epoch is
    'Fences offset commits that name the member; 0 if the group''s generation fences them.';

create table committed_offset (
    group_id             text collate "C" not null references consumer_group,
    topic_id             uuid    not null references topic,
    partition_index      integer not null,
    committed_offset     bigint  not null,
    leader_epoch         integer not null,
    metadata             text    not null,
    commit_timestamp_ms  bigint  not null,
    expire_timestamp_ms  bigint,
    primary key (group_id, topic_id, partition_index)
) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000
);

create index committed_offset_topic on committed_offset (topic_id, group_id, partition_index);

-- One sequence for all rows: a row that is deleted and begun anew must not get an epoch that a former leader still uses.
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

comment on table share_partition is
    'The progress of a share group (KIP-932) in one partition: every record below start_offset is settled.';
comment on column share_partition.state_epoch is
    'Takes a value that was never used whenever a node reads the row to lead it, and with every change from outside: fences the writes of the leader before.';
comment on column share_partition.write_number is
    'Rises with every write of the leader: a write without a reply may arrive late, and must not undo later writes.';
comment on column share_partition.ranges is
    'From start_offset on, without gaps: [number of records, state, delivery count]. 0 available, 2 acknowledged, 4 archived.';

create view consumer_lag as
select
    o.group_id,
    t.name as topic,
    o.partition_index as partition,
    o.committed_offset,
    p.log_start_offset,
    p.next_offset as log_end_offset,
    greatest(p.next_offset - greatest(o.committed_offset, p.log_start_offset), 0) as lag,
    to_timestamp(o.commit_timestamp_ms / 1000.0) as committed_at,
    o.metadata
from committed_offset o
join topic t on t.topic_id = o.topic_id and t.deleted_at is null
join partition_log p on p.topic_id = o.topic_id and p.partition_index = o.partition_index;

comment on view consumer_lag is 'Records each group has yet to read, per partition it has committed.';

create view consumer_group_member as
select
    g.group_id,
    g.group_type,
    g.state,
    g.generation_id,
    g.protocol_type,
    g.document ->> 'protocol_name' as protocol_name,
    m.member_id,
    m.member_epoch,
    m.member_id = g.document ->> 'leader_id' as leader,
    m.document ->> 'group_instance_id' as group_instance_id,
    m.document ->> 'client_id' as client_id,
    m.document ->> 'client_host' as client_host,
    (m.document ->> 'session_timeout_ms')::integer as session_timeout_ms,
    (m.document ->> 'rebalance_timeout_ms')::integer as rebalance_timeout_ms
from consumer_group g
left join group_member m using (group_id);

comment on view consumer_group_member is 'Groups with their members; a group without members is one row with nulls.';
