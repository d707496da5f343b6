-- The journal: events of groups, for people and for analysis. docs/journal.md is its contract.
--
-- Rows are numbered by `seq` in the order in which they became visible: a writer reserves numbers by updating the one row
-- of journal_position in the transaction that inserts the rows. So the next writer waits until these are committed, and
-- a rollback leaves no hole. A reader that has seen next_seq can read everything below it, over any number of
-- connections. Every table is partitioned by the day it was written, so that retention is a DROP.

create table journal_position (
    singleton  boolean primary key default true check (singleton),
    first_seq  bigint not null default 1,
    next_seq   bigint not null default 1,
    check (first_seq <= next_seq)
) with (fillfactor = 10);

comment on table journal_position is 'One row. Locking it serialises the writers of the journal.';
comment on column journal_position.first_seq is 'Every row from here to next_seq exists; retention may have dropped rows below.';

insert into journal_position default values;

create table journal_event (
    seq                bigint      not null,
    written_at         timestamptz not null default now(),
    at_ms              bigint      not null,
    node_id            integer     not null,
    group_id           text collate "C" not null,
    group_type         text        not null check (group_type in ('classic', 'consumer', 'streams', 'share', '')),
    kind               text        not null check (kind in (
        'loaded', 'rebalance_started', 'member_joined', 'generation_created', 'assignment_stored', 'member_synced',
        'rebalance_completed', 'member_left', 'member_expired', 'member_fenced', 'heartbeat_gap', 'observed',
        'offsets_removed', 'deleted', 'rows_dropped')),
    reason             text,
    detail             text,
    generation_id      integer     not null,
    state_before       text,
    state_after        text,
    member_id          text collate "C",
    group_instance_id  text,
    client_id          text,
    client_host        text,
    protocol_name      text,
    member_count       integer,
    wait_ms            bigint,
    row_count          bigint,
    primary key (seq, written_at)
) partition by range (written_at);

create index journal_event_group on journal_event (group_id, seq);

comment on table journal_event is 'One row per event of a group or a member.';
comment on column journal_event.at_ms is 'Time of the event, Unix ms by the clock of the coordinator''s node.';
comment on column journal_event.generation_id is 'Classic: the generation. Consumer: the group epoch; for member_synced the member epoch. -1: none.';
comment on column journal_event.reason is 'The reason, as one of the words that docs/journal.md lists.';
comment on column journal_event.detail is 'The reason for people; never parsed.';
comment on column journal_event.wait_ms is 'A measured time; docs/journal.md says which, by kind.';
comment on column journal_event.row_count is 'rows_dropped: how many rows the node could not write. Otherwise null.';

create table journal_member (
    seq                   bigint      not null,
    written_at            timestamptz not null default now(),
    at_ms                 bigint      not null,
    node_id               integer     not null,
    group_id              text collate "C" not null,
    generation_id         integer     not null,
    member_id             text collate "C" not null,
    group_instance_id     text,
    client_id             text        not null,
    client_host           text        not null,
    session_timeout_ms    integer     not null,
    rebalance_timeout_ms  integer     not null,
    join_wait_ms          bigint,
    leader                boolean     not null default false,
    primary key (seq, written_at)
) partition by range (written_at);

create index journal_member_group on journal_member (group_id, seq);

comment on table journal_member is 'The members of a generation, a row each, behind generation_created and loaded.';
comment on column journal_member.join_wait_ms is 'From the start of the rebalance to this member''s join; null if it need not join (loaded, consumer protocol).';

create table journal_ownership (
    seq            bigint      not null,
    written_at     timestamptz not null default now(),
    at_ms          bigint      not null,
    node_id        integer     not null,
    group_id       text collate "C" not null,
    generation_id  integer     not null,
    topic_id       uuid,
    topic          text collate "C" not null,
    partition      integer     not null,
    change         text        not null check (change in ('assigned', 'released', 'kept')),
    member_id      text collate "C" not null,
    primary key (seq, written_at)
) partition by range (written_at);

create index journal_ownership_group on journal_ownership (group_id, seq);

comment on table journal_ownership is 'The difference an assignment makes, a row per partition and member.';
comment on column journal_ownership.change is
    'assigned: the member may own it from here on. released: it revoked the partition, or was removed. kept: owned before, restated when a group is loaded.';

create table journal_offset (
    seq               bigint      not null,
    written_at        timestamptz not null default now(),
    at_ms             bigint      not null,
    node_id           integer     not null,
    group_id          text collate "C" not null,
    kind              text        not null check (kind in ('commit', 'fetch', 'position')),
    generation_id     integer     not null,
    member_id         text collate "C",
    topic_id          uuid,
    topic             text collate "C" not null,
    partition         integer     not null,
    "offset"          bigint      not null,
    log_start_offset  bigint,
    log_end_offset    bigint,
    error_code        smallint    not null default 0,
    commit_count      integer     not null default 1,
    primary key (seq, written_at)
) partition by range (written_at);

create index journal_offset_refused on journal_offset (group_id, seq) where error_code <> 0;

comment on table journal_offset is 'Every offset that a group commits (refused ones included), fetches, or reads from.';
comment on column journal_offset.kind is
    'commit: OffsetCommit, with its outcome in error_code. fetch: the response of OffsetFetch, -1 = nothing committed. position: the first fetch offset of an owner, or the last one before it revoked the partition.';
comment on column journal_offset.generation_id is 'As the request gave it, -1 = none: the tools of an administrator, or a consumer without group membership.';
comment on column journal_offset.log_end_offset is 'The high watermark at that moment; null if the partition is unknown.';
comment on column journal_offset.commit_count is
    'Commits that this row stands for, because refused or very frequent commits are summed up. Above 1: partitions of one request that share the error; topic, partition and offset are those of the first.';

create table journal_handoff (
    seq               bigint      not null,
    written_at        timestamptz not null default now(),
    at_ms             bigint      not null,
    node_id           integer     not null,
    group_id          text collate "C" not null,
    generation_id     integer     not null,
    topic_id          uuid,
    topic             text collate "C" not null,
    partition         integer     not null,
    phase             text        not null check (phase in ('begun', 'ended')),
    mode              text        not null check (mode in ('ack', 'drain')),
    source_member_id  text collate "C" not null,
    target_member_id  text collate "C" not null,
    mark_offset       bigint,
    deadline_ms       bigint,
    reason            text,
    wait_ms           bigint,
    primary key (seq, written_at),
    check ((phase = 'ended') = (reason is not null))
) partition by range (written_at);

create index journal_handoff_group on journal_handoff (group_id, seq);

comment on table journal_handoff is 'A partition that waits for its source: a row when the wait begins and one when it ends.';
comment on column journal_handoff.generation_id is 'The generation in which the handoff was created, in both rows.';
comment on column journal_handoff.mark_offset is 'Next offset after what was served to the source, if known.';
comment on column journal_handoff.deadline_ms is 'Unix ms; after it the handoff is forced.';
