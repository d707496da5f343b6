-- The brokers' limits for timestamps that SQL gives its records.

alter table sql_door
    add column log_append_time         boolean not null default false,
    add column timestamp_before_max_ms bigint  not null default 9223372036854775807,
    add column timestamp_after_max_ms  bigint  not null default 3600000;

comment on column sql_door.log_append_time is 'Whether log.message.timestamp.type is LogAppendTime. Topics may have another type.';
