-- Bounds of the journal: refused or very frequent commits are summed up in one row with a count.
alter table journal_offset add column commit_count integer not null default 1;

comment on column journal_offset.commit_count is
    'Commits that this row stands for. Above 1: partitions of one request that share the error; topic, partition and offset are those of the first.';
