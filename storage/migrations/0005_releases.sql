-- Which release's functions each node calls, so that those that nobody calls any more can go.

create table node_release (
    node_id          integer primary key,
    incarnation      bigint not null,
    function_schema  text   not null
);

comment on table node_release is
    'A live node whose incarnation has no row here runs a release that does not know the table: nobody knows what it calls.';

create table function_schema (
    name     text primary key,
    used_at  timestamptz not null default clock_timestamp()
);

comment on table function_schema is 'When a schema of functions was last known to be called, or was first seen.';
