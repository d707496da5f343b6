-- name: create_delegation_token
-- Create a token that is valid from now on, for $9 ms and with renewals for $10; no row if $11 valid tokens exist, or
-- $12 of this requester.
with clock as (
    select (extract(epoch from clock_timestamp()) * 1000)::bigint as now_ms
), times as (
    select
        now_ms,
        least(now_ms::numeric + $9::bigint, 9223372036854775807)::bigint as renewed_ms,
        least(now_ms::numeric + $10::bigint, 9223372036854775807)::bigint as max_ms
    from clock
)
insert into delegation_token (
    token_id, hmac_digest, owner, requester, renewers, iterations, salts, stored_keys, server_keys,
    issued_ms, expires_ms, max_ms
)
select $1, $2, $3, $4, $5, $13, $6, $7, $8, t.now_ms, least(t.renewed_ms, t.max_ms), t.max_ms
from times t
where (select count(*) from delegation_token o where o.expires_ms >= t.now_ms) < $11::bigint
    and (
        select count(*) from delegation_token o where o.requester = $4 and o.expires_ms >= t.now_ms
    ) < $12::bigint
returning issued_ms, expires_ms, max_ms;

-- name: delegation_token_by_digest
-- The token whose secret has this digest, and whether it is still valid.
select
    token_id, hmac_digest, owner, requester, renewers, issued_ms, expires_ms, max_ms,
    expires_ms < (extract(epoch from clock_timestamp()) * 1000)::bigint as expired
from delegation_token
where hmac_digest = $1;

-- name: delegation_token_credential
-- The credential of a token for one mechanism, and for how many more milliseconds the token is valid.
select
    owner, hmac_digest, iterations, salts[$2::integer] as salt, stored_keys[$2::integer] as stored_key,
    server_keys[$2::integer] as server_key,
    expires_ms - (extract(epoch from clock_timestamp()) * 1000)::bigint as remaining_ms
from delegation_token
where token_id = $1;

-- name: delegation_tokens_of
-- Tokens that one of these users owns, requested or may renew; all if $1 is null.
select token_id, hmac_digest, owner, requester, renewers, issued_ms, expires_ms, max_ms
from delegation_token
where $1::text[] is null or owner = any($1::text[]) or requester = any($1::text[]) or renewers && $1::text[]
order by token_id;

-- name: prolong_delegation_token
-- Let the token end $2 ms from now, or at its latest possible end; no row if it has ended.
update delegation_token d
set expires_ms = least(d.max_ms, least(c.now_ms::numeric + $2::bigint, 9223372036854775807)::bigint)
from (select (extract(epoch from clock_timestamp()) * 1000)::bigint as now_ms) c
where d.token_id = $1 and d.expires_ms >= c.now_ms
returning d.expires_ms;

-- name: delete_delegation_token
-- Delete a token, and return the present time as its end. No row if the token was gone.
delete from delegation_token where token_id = $1 returning (extract(epoch from clock_timestamp()) * 1000)::bigint as ended_ms;

-- name: delete_expired_delegation_tokens
-- Delete at most $1 expired tokens, and return their ids.
delete from delegation_token
where token_id in (
    select d.token_id
    from delegation_token d
    where d.expires_ms < (extract(epoch from clock_timestamp()) * 1000)::bigint
    order by d.expires_ms
    limit $1
    for update skip locked
)
returning token_id;
