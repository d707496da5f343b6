-- Everything Sluice keeps, in its own schema. Written for people too: see the views at the end.
--
-- Lock order, so that no two writers can deadlock: cluster, node, coordinator_lease by kind and shard, consumer_group by
-- group_id, topic, compaction_state by partition_key, rows of chunk by primary key (only maintenance locks any),
-- partition by partition_key, producer_state, committed_offset by primary key, log_object, inline_rotation.
--
-- Times named *_ms are Unix milliseconds as Kafka's protocol gives them; leases and nodes use the database's clock.

-- --- cluster ---------------------------------------------------------------------------------------------------------

create function random_uuid() returns uuid
language plpgsql volatile as $$
-- A random UUID whose base64 form does not start with '-', which command line tools would read as an option.
declare
    candidate uuid;
begin
    loop
        candidate := gen_random_uuid();
        exit when get_byte(uuid_send(candidate), 0) >> 2 <> 62;
    end loop;
    return candidate;
end
$$;

create table cluster (
    singleton         boolean primary key default true check (singleton),
    cluster_id        text   not null,
    revision          bigint not null default 1,
    broker_configs_revision  bigint not null default 1,
    group_configs_revision  bigint not null default 1,
    purged_revision   bigint not null default 0,
    history           integer not null default 0,
    history_identity  text,
    next_producer_id  bigint not null default 0
) with (fillfactor = 10);

comment on table cluster is 'One row. Locking it serialises changes of the catalog, so revisions become visible in order.';
comment on column cluster.revision is
    'Rises with every change of topics, partitions or broker settings, in the order of their commits.';
comment on column cluster.broker_configs_revision is 'The revision of the last change of broker settings.';
comment on column cluster.history is
    'Rises whenever this database turns out to go on from a state that lacks commits (failover, restore).';
comment on column cluster.history_identity is
    'What the server and its files called themselves when the present history began: see storage/history.py.';
comment on column cluster.group_configs_revision is 'The revision of the last change of settings of single groups.';
comment on column cluster.purged_revision is
    'Deletions up to here may have left no row: who knows only an older revision reads the whole catalog.';

insert into cluster (cluster_id)
select translate(rtrim(encode(uuid_send(random_uuid()), 'base64'), '='), '+/', '-_');

create table broker_config (
    broker  text collate "C" not null,
    name    text not null,
    value   text not null,
    primary key (broker, name)
);

comment on table broker_config is 'Dynamic broker settings, as AlterConfigs set them.';
comment on column broker_config.broker is 'The id of the node for which a setting holds; empty: all of them, beneath their own.';

create table group_config (
    group_id  text collate "C" not null,
    name      text not null,
    value     text not null,
    primary key (group_id, name)
);

comment on table group_config is 'Dynamic settings of single groups, which need not exist, as IncrementalAlterConfigs set them.';

-- --- topics ----------------------------------------------------------------------------------------------------------

create table topic (
    topic_id    uuid primary key default random_uuid(),
    name        text collate "C" not null,
    internal    boolean not null default false,
    configs     jsonb not null default '{}',
    created_revision  bigint not null default 1,
    changed_revision  bigint not null default 1,
    created_at  timestamptz not null default now(),
    deleted_at  timestamptz
);

comment on column topic.created_revision is 'Of two topics of one name the one with the greater is the later.';
comment on column topic.changed_revision is 'Of its last change, its deletion included: what a node asks by.';
comment on column topic.deleted_at is 'A deleted topic is invisible and its name free at once; purge removes its rows.';

create unique index topic_live_name on topic (name) where deleted_at is null;
create index topic_changed on topic (changed_revision);
create index topic_deleted on topic (deleted_at) where deleted_at is not null;

create table partition (
    partition_key     bigint generated always as identity primary key,
    topic_id          uuid    not null references topic,
    partition_index   integer not null,
    created_revision  bigint  not null default 1,
    leader_epoch      integer not null default 0,
    log_start_offset  bigint  not null default 0,
    next_offset       bigint  not null default 0,
    size_bytes        bigint  not null default 0,
    max_timestamp_ms  bigint  not null default -1,
    deleted           boolean not null default false,
    unique (topic_id, partition_index)
) with (
    fillfactor = 40,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

comment on table partition is 'The truth of a partition. Every append updates its row, in place (HOT): hence the fillfactor.';
comment on column partition.next_offset is 'Offset of the next record: the log end and the high watermark.';
comment on column partition.size_bytes is 'Sum of chunk.size_bytes.';
comment on column partition.max_timestamp_ms is 'Greatest timestamp ever appended; where chunk.running_max_timestamp_ms goes on.';

create table partition_epoch (
    partition_key  bigint  not null references partition on delete cascade,
    leader_epoch   integer not null,
    start_offset   bigint  not null,
    primary key (partition_key, leader_epoch)
);

comment on table partition_epoch is 'Where each leader epoch but a partition''s first began: where the one before ended.';

-- --- log -------------------------------------------------------------------------------------------------------------

-- Bytes outside of Postgres: segments (files) or objects of one store, which every node of the cluster must reach.
create table log_store (
    singleton  boolean primary key default true check (singleton),
    store_id   uuid not null,
    location   text not null
);

comment on table log_store is 'No row: all bytes are inline. A marker beside the bytes carries the same store_id.';

create table log_object (
    object_id   bigint generated always as identity primary key,
    created_at  timestamptz not null default clock_timestamp(),
    sealed_at   timestamptz,
    size_bytes  bigint
) with (fillfactor = 70);

comment on table log_object is 'A file or object with bytes of chunks. It is registered before it exists and forgotten after it is deleted.';
comment on column log_object.sealed_at is 'From then on no append refers to it anew; what no chunk names may be deleted after a grace.';

create index log_object_sealed on log_object (sealed_at, object_id);

-- The index of the log. No foreign key to partition: rows are written only under its row lock, and the check would cost
-- a lock per row.
create table chunk (
    partition_key             bigint   not null,
    base_offset               bigint   not null,
    last_offset               bigint   not null,
    max_timestamp_ms          bigint   not null,
    running_max_timestamp_ms  bigint   not null,
    append_timestamp_ms       bigint,
    object_id                 bigint,
    position                  bigint   not null,
    size_bytes                integer  not null,
    batch_count               integer  not null,
    leader_epoch              integer  not null,
    inline_slot               smallint,
    final_heads               boolean  not null,
    primary key (partition_key, base_offset),
    check ((object_id is null) <> (inline_slot is null))
) partition by hash (partition_key);

do $$
begin
    for i in 0..7 loop
        execute format(
            'create table chunk_%s partition of chunk for values with (modulus 8, remainder %s) with (
                autovacuum_vacuum_scale_factor = 0.05,
                autovacuum_vacuum_insert_scale_factor = 0.2,
                autovacuum_analyze_scale_factor = 0.1
            )', i, i);
    end loop;
end
$$;

comment on table chunk is 'Record batches (magic 2) of one partition, back to back: at first what one commit appended. Where the bytes lie: (inline_slot, position) of inline_records, or at a position of an object.';
comment on column chunk.running_max_timestamp_ms is
    'At least the greatest max_timestamp_ms of this and all earlier chunks: never falls with rising offset, so a binary search finds the first chunk at or after a time.';
comment on column chunk.append_timestamp_ms is 'Set only where no batch carries a timestamp (-1): what retention by time goes by.';
comment on column chunk.final_heads is
    'Whether the heads of the batches hold base offset and leader epoch. If not, the bytes were written before the offsets were known, the offsets follow each other without a gap, and readers write both into the heads.';

-- Bytes inside Postgres. New ones go to the current slot; a slot that no chunk names any more is truncated, so that no
-- vacuum ever walks bytes. Rows are never updated, and never deleted one by one.
create table inline_rotation (
    singleton     boolean  primary key default true check (singleton),
    current_slot  smallint not null default 0,
    rotated_at    timestamptz not null default clock_timestamp()
) with (fillfactor = 10);

insert into inline_rotation default values;

create sequence inline_position;

create table inline_records (
    slot           smallint not null,
    position       bigint   not null,
    partition_key  bigint   not null,
    base_offset    bigint   not null,
    records        bytea    not null,
    primary key (slot, position)
) partition by list (slot);

-- Clients compress; compressing again would only cost.
alter table inline_records alter column records set storage external;

do $$
begin
    for i in 0..7 loop
        execute format(
            'create table inline_records_%s partition of inline_records for values in (%s)
                with (autovacuum_enabled = off, toast.autovacuum_enabled = off)', i, i);
        execute format('alter table inline_records_%s alter column records set storage external', i);
    end loop;
end
$$;

comment on column inline_records.partition_key is 'With base_offset the chunk that these bytes were written for; they are alive while it names them.';
comment on table inline_rotation is 'One row: which slot of inline_records takes new bytes.';

create table producer_state (
    partition_key    bigint  not null,
    producer_id      bigint  not null,
    producer_epoch   integer not null,
    next_sequence    integer not null,
    batch_count      bigint  not null,
    first_sequences  integer[] not null,
    last_sequences   integer[] not null,
    base_offsets     bigint[]  not null,
    appended_at      timestamptz not null,
    primary key (partition_key, producer_id)
) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000
);

comment on table producer_state is
    'What recognises a retried batch: the last five of each idempotent producer, as rings of five whose next slot is batch_count % 5 + 1.';
comment on column producer_state.batch_count is 'Batches appended in this epoch.';

create table compaction_state (
    partition_key       bigint primary key,
    revision            bigint not null default 0,
    first_dirty_offset  bigint not null default 0,
    clean_bytes         bigint not null default 0,
    cleaned_at          timestamptz
);

comment on table compaction_state is 'How far the cleaner came. `revision` fences replacements: one that started before another ended is refused.';

-- --- nodes and leases ------------------------------------------------------------------------------------------------

create table node (
    node_id        integer primary key check (node_id >= 1),
    name           text collate "C" not null unique,
    listeners      jsonb   not null,
    rack           text,
    incarnation    bigint  not null default 1,
    announced      bigint  not null default 0,
    registered_at  timestamptz not null default now(),
    expires_at     timestamptz not null
) with (fillfactor = 50);

comment on column node.listeners is 'Listener name -> [host, port] at which its clients are told to connect.';
comment on column node.announced is
    'How many announcements of appends this incarnation had sent at its last renewal: who has heard fewer has missed some.';
comment on column node.incarnation is 'Rises whenever a process registers under this id, and fences the one before it.';

create table coordinator_lease (
    kind         text    not null,
    shard        integer not null,
    node_id      integer not null,
    incarnation  bigint  not null,
    lease_epoch  integer not null,
    expires_at   timestamptz not null,
    successor    integer,
    primary key (kind, shard)
) with (fillfactor = 50);

comment on table coordinator_lease is
    'Who may write what is in a shard of a kind (groups, transactions, jobs). lease_epoch rises with every change of owner.';
comment on column coordinator_lease.successor is 'The node that it was handed over to, until that one has taken it.';

-- --- groups and offsets ----------------------------------------------------------------------------------------------

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
    'What Postgres decides by has a column, the rest is a document that only the machine of the group''s type reads.';
comment on column consumer_group.generation_id is 'Generation or group epoch: fences offset commits that name no member epoch.';
comment on column consumer_group.restored_at_ms is
    'Since when a coordinator, or one after another, waits to hear all members again; null once they all were heard.';

create index consumer_group_shard on consumer_group (shard, group_id);

create table group_member (
    group_id              text collate "C" not null references consumer_group,
    member_id             text collate "C" not null,
    member_epoch          integer not null,
    document              jsonb   not null,
    primary key (group_id, member_id)
) with (fillfactor = 70);

comment on column group_member.member_epoch is 'Fences offset commits that name the member; 0 where the group''s generation does.';

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

-- --- views -----------------------------------------------------------------------------------------------------------

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
join partition p on p.topic_id = o.topic_id and p.partition_index = o.partition_index;

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

create view topic_partition as
select
    t.name as topic,
    t.topic_id,
    p.partition_index as partition,
    p.partition_key,
    p.log_start_offset,
    p.next_offset as log_end_offset,
    p.next_offset - p.log_start_offset as offsets,
    p.size_bytes,
    case when p.max_timestamp_ms >= 0 then to_timestamp(p.max_timestamp_ms / 1000.0) end as newest_record_at
from topic t
join partition p using (topic_id)
where t.deleted_at is null;

comment on view topic_partition is 'Live partitions with their offsets and size.';
