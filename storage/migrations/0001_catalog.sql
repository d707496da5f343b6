-- The catalog: cluster, settings, topics and partitions. All of Sluice's tables live in the schema `sluice`. They are
-- written for people too: each area ends with its views.
--
-- Lock order, so that no two writers can deadlock: cluster, transactional_producer, node, coordinator_lease by kind and
-- shard, consumer_group by group_id, topic, compaction_state by partition_key, rows of chunk by primary key (only
-- maintenance locks any), partition by partition_key, open_transaction, producer_state, committed_offset by primary key,
-- pending_offset, log_object, inline_rotation.
--
-- Times named *_ms are Unix milliseconds as Kafka's protocol gives them; leases and nodes use the database's clock.

create function random_uuid() returns uuid
language plpgsql volatile as $$
-- Return a random UUID whose base64 form does not start with '-', which command line tools would read as an option.
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
    singleton                boolean primary key default true check (singleton),
    cluster_id               text    not null,
    revision                 bigint  not null default 1,
    broker_configs_revision  bigint  not null default 1,
    group_configs_revision   bigint  not null default 1,
    client_quotas_revision   bigint  not null default 1,
    acls_revision            bigint  not null default 1,
    purged_revision          bigint  not null default 0,
    history                  integer not null default 0,
    history_identity         text,
    next_producer_id         bigint  not null default 0,
    scram_secret             bytea   not null
        default sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()))
) with (fillfactor = 10);

comment on table cluster is 'One row. Locking it serialises changes of the catalog, so revisions become visible in order.';
comment on column cluster.revision is
    'Rises with every change of topics, partitions or settings, in the order of their commits.';
comment on column cluster.broker_configs_revision is 'The revision of the last change of broker settings.';
comment on column cluster.group_configs_revision is 'The revision of the last change of settings of single groups.';
comment on column cluster.client_quotas_revision is 'The revision of the last change of quotas.';
comment on column cluster.acls_revision is 'The revision of the last change of ACLs.';
comment on column cluster.purged_revision is
    'Deletions up to here may have left no row: a node that knows only an older revision reads the whole catalog.';
comment on column cluster.history is
    'Rises whenever this database turns out to continue from a state that lacks commits (failover, restore).';
comment on column cluster.history_identity is
    'The identity of the server and its files when the present history began: see storage/history.py.';
comment on column cluster.scram_secret is
    'Source of the credentials shown for unknown users, so that an unknown user looks like a known one.';

insert into cluster (cluster_id)
select translate(rtrim(encode(uuid_send(random_uuid()), 'base64'), '='), '+/', '-_');

create table broker_config (
    broker  text collate "C" not null,
    name    text not null,
    value   text not null,
    primary key (broker, name)
);

comment on table broker_config is 'Dynamic broker settings, as AlterConfigs set them.';
comment on column broker_config.broker is
    'The id of the node that a setting belongs to. Empty: the default of all nodes, which a node''s own setting overrides.';

create table group_config (
    group_id  text collate "C" not null,
    name      text not null,
    value     text not null,
    primary key (group_id, name)
);

comment on table group_config is 'Dynamic settings of single groups, which need not exist, as IncrementalAlterConfigs set them.';

create table finalized_feature (
    name   text primary key,
    level  smallint not null
);

comment on table finalized_feature is
    'Features whose level an administrator has set (KIP-584); the others are at the highest level that all nodes serve.';

create table client_quota (
    user_name  text collate "C" not null,
    client_id  text collate "C" not null,
    address    text collate "C" not null,
    name       text not null,
    value      double precision not null,
    primary key (user_name, client_id, address, name)
);

comment on table client_quota is 'Quotas of users, clients (KIP-546) and addresses (KIP-612), as AlterClientQuotas set them.';
comment on column client_quota.user_name is 'Empty: any user; *: the default of users; else = and the name.';
comment on column client_quota.client_id is 'Encoded like user_name.';
comment on column client_quota.address is 'Encoded like user_name, for IP addresses.';

create table topic (
    topic_id          uuid primary key default random_uuid(),
    name              text collate "C" not null,
    internal          boolean not null default false,
    configs           jsonb   not null default '{}',
    created_revision  bigint  not null default 1,
    changed_revision  bigint  not null default 1,
    created_at        timestamptz not null default now(),
    deleted_at        timestamptz,
    delete_failures   integer not null default 0,
    delete_error      text,
    delete_retry_at   timestamptz
);

comment on column topic.created_revision is 'Of two topics of one name, the later one has the greater revision.';
comment on column topic.changed_revision is
    'The revision of the topic''s last change, its deletion included: nodes ask for changes behind a revision.';
comment on column topic.deleted_at is
    'A deleted topic is invisible, its name free and its log closed at once; its row goes after the last of its data.';
comment on column topic.delete_failures is 'How often deleting its data has failed; each failure doubles the wait before the next try.';
comment on column topic.delete_error is 'The error of the last failure.';
comment on column topic.delete_retry_at is 'Time of the next try; null: at once.';

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
    appended_bytes    bigint  not null default 0,
    max_timestamp_ms  bigint  not null default -1,
    deleted           boolean not null default false,
    replicas          integer[],
    leader            integer,
    unique (topic_id, partition_index),
    -- Refuses a writer that mistakes an old row for the end of the log: see next_offset.
    constraint partition_log_start_offset_check check (log_start_offset <= next_offset)
) with (
    fillfactor = 40,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

comment on table partition is
    'A partition, and the end of its log when that was last written down; the view partition_log has the end as it is now. Every writer of the log locks this row; an append does not update it.';
comment on column partition.next_offset is
    'An end that the log has reached. Chunks from here on are as they were appended, without a gap: a writer that removes or rewrites chunks first moves this value behind them.';
comment on column partition.size_bytes is 'Sum of chunk.size_bytes below next_offset.';
comment on column partition.appended_bytes is 'The value that chunk.appended_bytes continues from at next_offset.';
comment on column partition.max_timestamp_ms is 'Greatest timestamp ever appended below next_offset.';
comment on column partition.replicas is
    'Nodes that an administrator has named, in the order in which they are to lead (KIP-455); null: the live nodes. Where bytes lie does not depend on it.';
comment on column partition.leader is
    'The replica that was elected and leads while it is alive (KIP-460); null: the first live replica.';
create table partition_epoch (
    partition_key  bigint  not null references partition on delete cascade,
    leader_epoch   integer not null,
    start_offset   bigint  not null,
    primary key (partition_key, leader_epoch)
);

comment on table partition_epoch is
    'The offset at which each leader epoch began, and so the one before ended. A partition''s first epoch has no row.';
