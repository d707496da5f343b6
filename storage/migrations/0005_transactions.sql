-- Transactions (KIP-98). Rows of open_transaction are changed only under their partition's row lock; new ones are inserted
-- under the lock of the row of transactional_producer.

create table transactional_producer (
    transactional_id      text collate "C" primary key,
    producer_id           bigint   not null unique,
    producer_epoch        integer  not null,
    last_producer_epoch   integer  not null,
    previous_producer_id  bigint   not null,
    timeout_ms            integer  not null,
    state                 text     not null,
    revision              bigint   not null,
    started_at            timestamptz,
    last_started_at       timestamptz,
    updated_at            timestamptz not null,
    ending_producer_id    bigint,
    ending_marker         bytea,
    ending_timestamp_ms   bigint,
    ending_state          text,
    constraint transactional_producer_state_check check (
        state in ('Empty', 'Ongoing', 'PrepareCommit', 'PrepareAbort', 'CompleteCommit', 'CompleteAbort')
    ),
    constraint transactional_producer_started_check check (
        (state in ('Ongoing', 'PrepareCommit', 'PrepareAbort')) = (started_at is not null)
    ),
    constraint transactional_producer_ending_check check (
        (state in ('PrepareCommit', 'PrepareAbort')) = (
            ending_producer_id is not null and ending_marker is not null and ending_timestamp_ms is not null
            and ending_state is not null
        )
    )
) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000
);

comment on table transactional_producer is
    'One row for each transactional id; gateway/coordinator/transactions.py decides its next state. A large transaction ends in several transactions of Postgres: its row keeps the decision, in a Prepare state and with the producer''s identity after the end, until every partition has its marker.';
comment on column transactional_producer.last_producer_epoch is
    'The epoch before, if its owner asked for the present one by naming it: a repeated request gets the same answer. -1: none.';
comment on column transactional_producer.previous_producer_id is 'The id whose epochs were used up. -1: none.';
comment on column transactional_producer.revision is
    'Rises with every write: a decision made by an earlier revision writes nothing.';
comment on column transactional_producer.last_started_at is
    'When the last transaction began, once it is over. Null: none has ended since the producer was initialized.';
comment on column transactional_producer.ending_producer_id is
    'In a Prepare state: the producer id whose partitions are still to be marked, which was replaced since.';
comment on column transactional_producer.ending_marker is 'In a Prepare state: the control batch of those partitions.';
comment on column transactional_producer.ending_timestamp_ms is 'In a Prepare state: the marker''s timestamp.';
comment on column transactional_producer.ending_state is 'In a Prepare state: the state once every partition is marked.';

create index transactional_producer_started on transactional_producer (started_at) where started_at is not null;

create table open_transaction (
    partition_key   bigint   not null,
    producer_id     bigint   not null,
    producer_epoch  integer  not null,
    first_offset    bigint,
    begins_at_zero  boolean  not null default false,
    primary key (partition_key, producer_id)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000
);

comment on table open_transaction is
    'The partitions that each open transaction has enlisted. Every append of a transaction requires its row.';
comment on column open_transaction.first_offset is
    'Offset of its first batch; null: it has appended none. The least of a partition is its last stable offset.';
comment on column open_transaction.begins_at_zero is
    'A partition that does not know the producer accepts no first batch but the one with sequence 0 (KIP-890).';

-- The next partitions of one producer, in the order in which they are locked.
create index open_transaction_producer_partition on open_transaction (producer_id, partition_key);

create table aborted_transaction (
    partition_key       bigint  not null,
    last_offset         bigint  not null,
    producer_id         bigint  not null,
    first_offset        bigint  not null,
    last_stable_offset  bigint  not null,
    primary key (partition_key, last_offset)
);

comment on table aborted_transaction is
    'Records that a reader with read_committed skips: those of the producer from first_offset to the marker.';
comment on column aborted_transaction.last_offset is 'Offset of the marker.';
comment on column aborted_transaction.last_stable_offset is
    'The last stable offset once the transaction had ended: no transaction that ended later began below it, so a look-up need not go on.';

create table transaction_group (
    producer_id  bigint not null,
    group_id     text collate "C" not null,
    primary key (producer_id, group_id)
);

comment on table transaction_group is 'Groups whose offsets belong to an open transaction.';

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

comment on table pending_offset is
    'Offsets that belong to an open transaction: its commit moves them to committed_offset, its abort deletes them.';

create index pending_offset_producer on pending_offset (producer_id);
create index pending_offset_topic on pending_offset (topic_id);
