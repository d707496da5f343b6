-- Nodes, the releases that they run, and the leases that they hold.

create table node (
    node_id               integer primary key check (node_id >= 0),
    name                  text collate "C" not null unique,
    listeners             jsonb   not null,
    rack                  text,
    is_given              boolean not null default false,
    incarnation           bigint  not null default 1,
    announced             bigint  not null default 0,
    catalog_revision      bigint  not null default 0,
    registered_at         timestamptz not null default now(),
    renewed_at            timestamptz,
    expires_at            timestamptz not null,
    function_schema       text    not null,
    authorizer            text    not null,
    is_broker             boolean not null,
    is_controller         boolean not null,
    controller_listeners  text[]  not null
) with (fillfactor = 50);

comment on column node.listeners is 'Listener name -> [host, port] at which its clients are told to connect.';
comment on column node.is_given is 'Whether the node''s settings name its id: then no other node gets that id.';
comment on column node.incarnation is 'Rises whenever a process registers under this id, and fences the one before it.';
comment on column node.announced is
    'How many announcements of appends this incarnation had sent at its last renewal: a node that received fewer has missed some.';
comment on column node.catalog_revision is
    'The revision that this incarnation had converged to at its last renewal; 0: not yet known.';
comment on column node.renewed_at is 'When the registration was last prolonged; null: never.';
comment on column node.function_schema is 'The functions that the node calls, so that unused ones can be dropped.';
comment on column node.authorizer is 'A node warns if another node has a different authorizer. Empty: none.';
comment on column node.is_broker is 'With is_controller, the node''s roles (process.roles).';
comment on column node.controller_listeners is 'Names of those of its listeners that serve controller requests.';

create table function_schema (
    name     text primary key,
    used_at  timestamptz not null default clock_timestamp()
);

comment on table function_schema is 'When the functions of a release were last known to be called, or were first seen.';

create table coordinator_lease (
    kind         text    not null,
    shard        integer not null,
    node_id      integer not null,
    incarnation  bigint  not null,
    lease_epoch  integer not null,
    expires_at   timestamptz not null,
    successor    integer,
    primary key (kind, shard)
) with (fillfactor = 50);

comment on table coordinator_lease is
    'The node that may write the contents of a shard of a kind (groups, jobs). lease_epoch rises with every change of owner.';
comment on column coordinator_lease.successor is 'The node that the lease was handed over to, until that node acquires it.';

-- A change of owner waits for transactions that hold the lease's row FOR KEY SHARE, because an UPDATE of a column of a
-- unique index locks the row as a DELETE does. A renewal changes none of these columns and does not wait.
create unique index coordinator_lease_owner on coordinator_lease (kind, shard, node_id, lease_epoch);

comment on index coordinator_lease_owner is
    'Exists for its locks, not for look-ups: writes under a lease and its renewals run beside each other.';
