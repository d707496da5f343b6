-- Delegation tokens (KIP-48, KIP-373).

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

comment on table delegation_token is 'By what a token is known, and for how long; not its secret, which is derived from its id by delegation.token.secret.key.';
comment on column delegation_token.hmac_digest is 'SHA-256 of the secret: who shows the secret is found by it, and a token of another key is told by it.';
comment on column delegation_token.owner is 'Whom who logs in by the token acts for: a name of type User, as all names here.';
comment on column delegation_token.requester is 'Who has asked for it; may describe it.';
comment on column delegation_token.renewers is 'Who may renew, end and describe it, besides its owner.';
comment on column delegation_token.expires_ms is 'Until when it holds, in milliseconds since 1970; may be moved, up to max_ms.';
comment on column delegation_token.salts is 'With the keys what a SCRAM credential is, by mechanism: 1 is SCRAM-SHA-256, 2 is SCRAM-SHA-512.';
