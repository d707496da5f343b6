-- The log: an index of chunks in Postgres, and the bytes that lie inside Postgres.

-- Bytes outside of Postgres: segments (files) or objects of one store, which every node of the cluster must reach.
create table log_store (
    singleton  boolean primary key default true check (singleton),
    store_id   uuid not null,
    location   text not null
);

comment on table log_store is 'No row: all bytes are inline. A marker beside the bytes carries the same store_id.';

create table log_object (
    object_id           bigint generated always as identity primary key,
    created_at          timestamptz not null default clock_timestamp(),
    sealed_at           timestamptz,
    unreferenced_since  timestamptz,
    size_bytes          bigint
) with (fillfactor = 70);

comment on table log_object is 'A file or object with bytes of chunks. It is registered before it exists and forgotten after it is deleted.';
comment on column log_object.sealed_at is 'From then on no append refers to it anew.';
comment on column log_object.unreferenced_since is
    'When it was first seen that no chunk refers to the sealed object, and so no chunk ever will. It is deleted a grace period later, because a reader may have found it in the index a moment ago.';

create index log_object_sealed on log_object (sealed_at, object_id);

-- The index of the log. It has no foreign key to partition: rows are written only under its row lock, and the check would
-- cost a lock per row.
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
    appended_bytes            bigint   not null default 0,
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

comment on table chunk is
    'Record batches (magic 2) of one partition, back to back: at first the batches of one commit. The bytes lie at (inline_slot, position) of inline_records, or at a position of an object.';
comment on column chunk.running_max_timestamp_ms is
    'At least the greatest max_timestamp_ms of this and all earlier chunks: never falls with rising offset, so a binary search finds the first chunk at or after a time.';
comment on column chunk.append_timestamp_ms is 'Set only if no batch carries a timestamp (-1): retention by time then uses it.';
comment on column chunk.appended_bytes is
    'Bytes appended to the partition up to here, counted on from partition.appended_bytes. Means nothing below partition.next_offset.';
comment on column chunk.final_heads is
    'Whether the heads of the batches hold base offset and leader epoch. If not, the bytes were written before the offsets were known, the offsets follow each other without a gap, and readers write both into the heads.';

-- Bytes inside Postgres. New ones go to the current slot. A slot that no chunk refers to any more is truncated, so that
-- no vacuum ever reads bytes. Rows are never updated, and never deleted one by one.
create table inline_rotation (
    singleton     boolean  primary key default true check (singleton),
    current_slot  smallint not null default 0,
    rotated_at    timestamptz not null default clock_timestamp()
) with (fillfactor = 10);

comment on table inline_rotation is 'One row: which slot of inline_records takes new bytes.';

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

comment on column inline_records.partition_key is
    'With base_offset, the chunk that these bytes were written for; they are alive while it refers to them.';

create table producer_state (
    partition_key    bigint  not null,
    producer_id      bigint  not null,
    since_offset     bigint  not null,
    update_count     smallint not null,
    producer_epoch   integer not null,
    next_sequence    integer not null,
    batch_count      bigint  not null,
    first_sequences  integer[] not null,
    last_sequences   integer[] not null,
    base_offsets     bigint[]  not null,
    appended_at      timestamptz not null,
    primary key (partition_key, producer_id, since_offset)
) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000
);

comment on table producer_state is
    'What recognises a retried batch: the last five batches of each idempotent producer in a partition, as rings of five whose next slot is batch_count % 5 + 1. The one row is updated a number of times and then gives way to another with a greater since_offset. A look-up takes the greatest first and so passes few dead versions, whatever a snapshot keeps.';
comment on column producer_state.batch_count is 'Batches appended in this epoch.';

create table compaction_state (
    partition_key       bigint primary key,
    revision            bigint not null default 0,
    first_dirty_offset  bigint not null default 0,
    clean_bytes         bigint not null default 0,
    cleaned_at          timestamptz
);

comment on table compaction_state is
    'How far the cleaner came. revision fences replacements: one that started before another ended is refused.';

create view partition_log as
select
    p.partition_key,
    p.topic_id,
    p.partition_index,
    p.leader_epoch,
    p.deleted,
    p.log_start_offset,
    coalesce(newest.last_offset + 1, p.next_offset) as next_offset,
    p.size_bytes + coalesce(newest.appended_bytes - p.appended_bytes, 0) as size_bytes,
    coalesce(newest.appended_bytes, p.appended_bytes) as appended_bytes,
    greatest(p.max_timestamp_ms, newest.running_max_timestamp_ms) as max_timestamp_ms
from partition p
left join lateral (
    select c.last_offset, c.appended_bytes, c.running_max_timestamp_ms
    from chunk c
    where c.partition_key = p.partition_key and c.base_offset >= p.next_offset
    order by c.base_offset desc
    limit 1
) newest on true;

comment on view partition_log is 'Partitions with the end, the size and the greatest timestamp of their logs as they are now.';

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
join partition_log p using (topic_id)
where t.deleted_at is null;

comment on view topic_partition is 'Live partitions with their offsets and size.';
