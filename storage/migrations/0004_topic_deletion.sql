-- How the deletion of a hidden topic's data gets on. A release that does not know the columns deletes all the same.

alter table topic
    add column delete_failures integer not null default 0,
    add column delete_error text,
    add column delete_retry_at timestamptz;

comment on column topic.delete_failures is 'How often deleting its data has failed; each doubles the wait before the next try.';
comment on column topic.delete_error is 'Why it failed last.';
comment on column topic.delete_retry_at is 'When it is tried again; null: at once.';
comment on column topic.deleted_at is
    'A deleted topic is invisible, its name free and its log closed at once; its row goes after the last of its data.';
