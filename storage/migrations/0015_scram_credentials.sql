-- Salted passwords of users (SCRAM, RFC 5802; KIP-554).

create table scram_credential (
    user_name   text collate "C" not null,
    mechanism   smallint not null,
    iterations  integer  not null,
    salt        bytea    not null,
    stored_key  bytea    not null,
    server_key  bytea    not null,
    primary key (user_name, mechanism)
);

comment on table scram_credential is 'By what a user is known; no password, and nothing that could be used in its place at another server.';
comment on column scram_credential.mechanism is '1: SCRAM-SHA-256, 2: SCRAM-SHA-512.';

alter table cluster add column scram_secret bytea not null
    default sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()));

comment on column cluster.scram_secret is 'What credentials of users who are not there are derived from, so that each of them looks like one who is.';
