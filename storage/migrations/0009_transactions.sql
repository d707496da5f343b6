-- Transactions (KIP-98). Lock order: a row of transactional_producer before any lease; rows of open_transaction only under
-- their partition's row lock, but for new ones; pending_offset after committed_offset.

create table transactional_producer (
    transactional_id       text collate "C" primary key,
    producer_id            bigint   not null unique,
    producer_epoch         integer  not null,
    last_producer_epoch    integer  not null,
    previous_producer_id   bigint   not null,
    timeout_ms             integer  not null,
    state                  text     not null check (state in ('Empty', 'Ongoing', 'CompleteCommit', 'CompleteAbort')),
    revision               bigint   not null,
    started_at             timestamptz,
    updated_at             timestamptz not null,
    check ((state = 'Ongoing') = (started_at is not null))
) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000
);

comment on table transactional_producer is
    'One row for each transactional id. What it may do next is decided by gateway/coordinator/transactions.py.';
comment on column transactional_producer.last_producer_epoch is
    'The epoch before, if its owner asked for the present one by naming it: an answer that was lost is given again. -1: none.';
comment on column transactional_producer.previous_producer_id is 'Whose epochs were used up. -1: none.';
comment on column transactional_producer.revision is 'Rises with every write: who decides by an earlier one writes nothing.';

create index transactional_producer_started on transactional_producer (started_at) where started_at is not null;

create table open_transaction (
    partition_key   bigint   not null,
    producer_id     bigint   not null,
    producer_epoch  integer  not null,
    first_offset    bigint,
    primary key (partition_key, producer_id)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000
);

comment on table open_transaction is
    'The partitions of each transaction that is under way. No append of a transaction stands without its row.';
comment on column open_transaction.first_offset is
    'Of the first batch that it appended; null: none yet. The least of a partition is its last stable offset.';

create index open_transaction_producer on open_transaction (producer_id);

create table aborted_transaction (
    partition_key       bigint  not null,
    last_offset         bigint  not null,
    producer_id         bigint  not null,
    first_offset        bigint  not null,
    last_stable_offset  bigint  not null,
    primary key (partition_key, last_offset)
);

comment on table aborted_transaction is 'What a reader with read_committed leaves out: records of the producer from first_offset to the marker.';
comment on column aborted_transaction.last_offset is 'Of its marker.';
comment on column aborted_transaction.last_stable_offset is
    'As it was once the transaction had ended: none that ended later began below it, so a look-up need not go on.';

create table transaction_group (
    producer_id  bigint not null,
    group_id     text collate "C" not null,
    primary key (producer_id, group_id)
);

comment on table transaction_group is 'Groups whose offsets belong to a transaction that is under way.';

create table pending_offset (
    group_id             text collate "C" not null,
    topic_id             uuid     not null,
    partition_index      integer  not null,
    producer_id          bigint   not null,
    committed_offset     bigint   not null,
    leader_epoch         integer  not null,
    metadata             text     not null,
    commit_timestamp_ms  bigint   not null,
    primary key (group_id, topic_id, partition_index, producer_id)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000
);

comment on table pending_offset is 'Offsets that a transaction has committed: they become committed_offset if it is, and go if it is not.';

create index pending_offset_producer on pending_offset (producer_id);
create index pending_offset_topic on pending_offset (topic_id);

-- While a node of one of them lives, no transaction begins: its readers with read_committed would be given everything, and
-- its compaction would take what was aborted for what was written last.
create table release_without_transactions (
    function_schema  text primary key
);

comment on table release_without_transactions is 'Functions of releases that know nothing of transactions.';

insert into release_without_transactions (function_schema)
select nspname from pg_namespace where nspname ~ '^sluice_[0-9a-f]{12}$';
