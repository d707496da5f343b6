-- Commits of offsets that SQL transactions made, for the journal.

alter table staged_offset
    add column role_name    text,
    add column committed_ms bigint;

create index staged_offset_committed on staged_offset (committed_ms) where committed_ms is not null;

comment on table staged_offset is
    'Offsets that a transaction commits. A deferred trigger writes them under the group''s fence while the transaction commits. Rows with committed_ms are committed, and wait until a node moves them to the journal.';
comment on column staged_offset.role_name is 'The role that called kafka.commit_offset.';
comment on column staged_offset.committed_ms is 'Time of the commit, Unix ms; null while the transaction has not committed.';

alter table journal_offset add column sql_role text;

comment on column journal_offset.sql_role is
    'The role that committed by kafka.commit_offset in its transaction; null: the commit was an OffsetCommit.';
