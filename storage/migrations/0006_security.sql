-- Credentials, tokens and access control lists.

create table scram_credential (
    user_name   text collate "C" not null,
    mechanism   smallint not null,
    iterations  integer  not null,
    salt        bytea    not null,
    stored_key  bytea    not null,
    server_key  bytea    not null,
    primary key (user_name, mechanism)
);

comment on table scram_credential is
    'Salted passwords of users (SCRAM, RFC 5802; KIP-554). They contain no password, and nothing that another server would accept in its place.';
comment on column scram_credential.mechanism is '1: SCRAM-SHA-256, 2: SCRAM-SHA-512.';

create table acl (
    acl_key        bytea primary key,
    resource_type  smallint not null,
    pattern_type   smallint not null,
    resource_name  text not null,
    principal      text not null,
    host           text not null,
    operation      smallint not null,
    permission     smallint not null
);

comment on table acl is 'Access control lists, as CreateAcls made them. The numbers are Kafka''s codes.';
comment on column acl.acl_key is 'A digest of all other columns: together they may be longer than a key may be.';

create table delegation_token (
    token_id    text collate "C" primary key,
    hmac_digest bytea   not null unique,
    owner       text collate "C" not null,
    requester   text collate "C" not null,
    renewers    text[]  not null,
    issued_ms   bigint  not null,
    expires_ms  bigint  not null,
    max_ms      bigint  not null,
    iterations  integer not null,
    salts       bytea[] not null,
    stored_keys bytea[] not null,
    server_keys bytea[] not null
);

create index delegation_token_requester on delegation_token (requester);
create index delegation_token_expires_ms on delegation_token (expires_ms);

comment on table delegation_token is
    'Delegation tokens (KIP-48, KIP-373) without their secrets: a secret is derived from the id by delegation.token.secret.key.';
comment on column delegation_token.hmac_digest is
    'SHA-256 of the secret: finds the token by its secret, and reveals a token of another key.';
comment on column delegation_token.owner is
    'The user that a client acts for if it logs in by the token: a name of type User, as all names here.';
comment on column delegation_token.requester is 'The user that requested the token and may describe it.';
comment on column delegation_token.renewers is 'Users besides the owner that may renew, expire and describe it.';
comment on column delegation_token.expires_ms is 'End of its validity, in milliseconds since 1970; may be moved, up to max_ms.';
comment on column delegation_token.salts is
    'With the keys, a SCRAM credential per mechanism: 1 is SCRAM-SHA-256, 2 is SCRAM-SHA-512.';
