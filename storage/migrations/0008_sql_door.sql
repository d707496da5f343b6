-- The SQL door: records and offsets that a user's transaction has staged. See docs/decisions/0022.

create table sql_door (
    singleton        boolean primary key default true check (singleton),
    schema_name      text    not null,
    version          integer not null,
    digest           text    not null,
    max_message_bytes  bigint  not null default 1048588,
    compacts         boolean not null default false,
    auto_create      boolean not null default true,
    authorizer       boolean not null default false,
    allow_if_no_acl  boolean not null default false,
    super_users      text[]  not null default '{}'
);

comment on table sql_door is
    'One row once the public schema is installed. The columns from max_message_bytes on are the brokers'' settings that its functions apply; nodes write them.';

create sequence staged_position cache 100;

create table staged_record (
    xid              bigint  not null,
    position         bigint  not null default nextval('staged_position'),
    topic_id         uuid,
    topic            text collate "C",
    partition_index  integer,
    key              bytea,
    value            bytea,
    headers          jsonb,
    timestamp_ms     bigint  not null,
    arms             boolean not null,
    fired_at         timestamptz,
    primary key (xid, position)
) with (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
);

alter table staged_record alter column value set storage external;

comment on table staged_record is
    'Records of transactions, until the relay appends them to the log and deletes them. The order within a transaction is that of position.';
comment on column staged_record.topic_id is 'Null: the topic did not exist; the relay creates the one that `topic` names.';
comment on column staged_record.arms is 'Whether this row''s deferred trigger puts the transaction in its place among the others.';
comment on column staged_record.fired_at is 'The statement that fired the trigger before the transaction committed, if any.';

create sequence staged_commit_seq;

create table staged_commit (
    seq  bigint primary key default nextval('staged_commit_seq'),
    xid  bigint not null
) with (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
);

comment on table staged_commit is
    'Transactions with staged records in the order of their commits. `seq` is drawn while the transaction commits, so a transaction that waited for a lock has a greater one than the transaction that held the lock.';

create sequence staged_awake;

comment on sequence staged_awake is '2 while the relay polls. At any other value a committing transaction notifies it.';

create table staged_offset (
    xid              bigint  not null,
    position         bigint  not null default nextval('staged_position'),
    group_id         text collate "C" not null,
    topic_id         uuid    not null,
    partition_index  integer not null,
    committed_offset bigint  not null,
    metadata         text    not null,
    member_id        text collate "C",
    generation_id    integer,
    fired_at         timestamptz,
    primary key (xid, position)
) with (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
);

comment on table staged_offset is
    'Offsets that a transaction commits. A deferred trigger writes them under the group''s fence while the transaction commits, and deletes them here.';

create table sql_principal (
    role       text primary key,
    principal  text not null check (principal ~ '^[^:]+:.+$')
);

comment on table sql_principal is
    'Principals of Postgres roles. A role without a row is the principal User:<role>.';
