-- A large transaction ends in several of Postgres' transactions: the decision is kept in its row until every partition has
-- its marker. A row in a Prepare state has the producer's identity as it will be; a release that does not know these
-- states refuses the row.

alter table transactional_producer
    add column ending_producer_id   bigint,
    add column ending_marker        bytea,
    add column ending_timestamp_ms  bigint,
    add column ending_state         text;

alter table transactional_producer
    drop constraint transactional_producer_state_check,
    drop constraint transactional_producer_check,
    add constraint transactional_producer_state_check check (
        state in ('Empty', 'Ongoing', 'PrepareCommit', 'PrepareAbort', 'CompleteCommit', 'CompleteAbort')
    ),
    add constraint transactional_producer_started_check check (
        (state in ('Ongoing', 'PrepareCommit', 'PrepareAbort')) = (started_at is not null)
    ),
    add constraint transactional_producer_ending_check check (
        (state in ('PrepareCommit', 'PrepareAbort')) = (
            ending_producer_id is not null and ending_marker is not null and ending_timestamp_ms is not null
            and ending_state is not null
        )
    );

comment on column transactional_producer.ending_producer_id is
    'Whose partitions are still to be marked, in a Prepare state: the producer id before it was replaced.';
comment on column transactional_producer.ending_marker is 'The control batch of those partitions, in a Prepare state.';
comment on column transactional_producer.ending_timestamp_ms is 'Of the marker, in a Prepare state.';
comment on column transactional_producer.ending_state is 'The state once every partition is marked, in a Prepare state.';

-- The next partitions of one producer, in the order in which they are locked.
create index open_transaction_producer_partition on open_transaction (producer_id, partition_key);
drop index open_transaction_producer;
