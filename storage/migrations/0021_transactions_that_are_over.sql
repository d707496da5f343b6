-- Since when a transaction ran that is over, as administrators are told; and markers that commit it in one partition
-- before it ends (WriteTxnMarkers).

alter table transactional_producer add column last_started_at timestamptz;

comment on column transactional_producer.last_started_at is
    'When the last transaction began, once it is over. Null: none has ended since the producer was initialized.';

alter table open_transaction add column marked_epoch integer, add column coordinator_epoch integer;

comment on column open_transaction.marked_epoch is
    'Of the last marker that somebody sent to the partition, which has committed what lay there; null: there was none. With first_offset null nothing has come behind it, and the end of the transaction appends no other. No batch of an earlier epoch is taken.';
comment on column open_transaction.coordinator_epoch is 'That the marker named: one of an earlier epoch is refused.';

alter table transaction_group add column marked_epoch integer, add column coordinator_epoch integer;

comment on column transaction_group.marked_epoch is
    'Of the last marker that somebody sent to the partition of __consumer_offsets that the group belongs to, which has committed its offsets; null: there was none.';
comment on column transaction_group.coordinator_epoch is 'That the marker named: one of an earlier epoch is refused.';
