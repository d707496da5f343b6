-- An append leaves its partition's row as it is: where the log ends is in its last chunk. So what an open snapshot keeps
-- of rows that were updated does not grow with every append.

alter table chunk add column appended_bytes bigint not null default 0;

comment on column chunk.appended_bytes is
    'Bytes appended to the partition up to here, counted on from partition.appended_bytes. Means nothing below partition.next_offset.';

alter table partition
    add column appended_bytes bigint not null default 0,
    -- Holds off whoever takes a row that appends have left behind for the end of the log.
    add constraint partition_log_start_offset_check check (log_start_offset <= next_offset);

comment on table partition is
    'A partition, and how far its log had come when somebody last wrote that down; partition_log says how far it has. Every writer of the log locks this row.';
comment on column partition.next_offset is
    'An end of the log that has been reached. Chunks from here on are as they were appended, without a gap: who removes or rewrites chunks first moves this behind them.';
comment on column partition.size_bytes is 'Sum of chunk.size_bytes below next_offset.';
comment on column partition.max_timestamp_ms is 'Greatest timestamp ever appended below next_offset.';
comment on column partition.appended_bytes is 'Where chunk.appended_bytes goes on at next_offset.';

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

create or replace view consumer_lag as
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

create or replace view topic_partition as
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

create table renewed_producer_state (
    since_offset  bigint   not null,
    update_count  smallint not null,
    primary key (partition_key, producer_id, since_offset)
) inherits (producer_state) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000
);

comment on table renewed_producer_state is
    'Of each idempotent producer in a partition one row, which is updated so many times and then gives way to another with a greater since_offset: who looks for the greatest first passes few versions of it, whatever a snapshot keeps.';

-- Until the last of them has gone, appends also write what these releases read.
create table former_release (
    function_schema  text primary key
);

comment on table former_release is
    'Functions of releases that take partition.next_offset for the end of the log, and know only the rows of producer_state itself.';

insert into former_release (function_schema)
select nspname from pg_namespace where nspname ~ '^sluice_[0-9a-f]{12}$';
