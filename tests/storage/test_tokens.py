"""Delegation tokens on a real Postgres: their bounds, expiry and owners."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from storage.pool import Database
from storage.tokens import TokenStore
from storage.types import NewDelegationToken, ScramCredential

LAST_MS = 2**63 - 1
BOUNDS = {"expiry_ms": 1_000_000, "lifetime_ms": 5_000_000, "most": 100, "most_of_one": 100}


@pytest.fixture
def tokens(database: Database) -> TokenStore:
    return TokenStore(database)


def token(token_id: str, **given: Any) -> NewDelegationToken:
    keys = tuple(ScramCredential(token_id, number, 4096, b"s%d" % number, b"k%d" % number, b"v") for number in (1, 2))
    made = NewDelegationToken(token_id, token_id.encode(), "ann", "ann", (), keys)
    return made._replace(**given)


async def create(tokens: TokenStore, new: NewDelegationToken, **bounds: int) -> Any:
    return await tokens.create(new, **{**BOUNDS, **bounds})


async def test_a_token_is_found_by_its_digest_and_its_credential_by_its_id(tokens: TokenStore) -> None:
    names = {"owner": "a\0b", "requester": "\u241b", "renewers": ("c\0", "d")}
    made = await create(tokens, token("one", **names))
    assert (made.owner, made.requester, made.renewers) == ("a\0b", "\u241b", ("c\0", "d"))
    assert (made.expires_ms - made.issued_ms, made.max_ms - made.issued_ms) == (1_000_000, 5_000_000)
    assert await tokens.by_digest(b"one") == (made, False)
    assert await tokens.by_digest(b"other") is None
    for mechanism in (1, 2):
        found = await tokens.credential("one", mechanism)
        assert found is not None
        expected = ScramCredential("one", mechanism, 4096, b"s%d" % mechanism, b"k%d" % mechanism, b"v")
        assert (found.credential, found.owner, found.hmac_digest) == (expected, "a\0b", b"one")
        assert 900_000 < found.remaining_ms <= 1_000_000
        assert repr(expected.stored_key) not in repr(found)
    assert await tokens.credential("\0", 1) is None


async def test_tokens_are_bounded_in_total_and_per_owner(tokens: TokenStore) -> None:
    assert await create(tokens, token("one"), most=2, most_of_one=1) is not None
    assert await create(tokens, token("two"), most=2, most_of_one=1) is None
    other = token("two", requester="ben")
    assert await create(tokens, other, most=2, most_of_one=1) is not None
    assert await create(tokens, other._replace(token_id="three", requester="eve"), most=2, most_of_one=1) is None


async def test_a_token_expires_at_its_maximum_lifetime(tokens: TokenStore) -> None:
    made = await create(tokens, token("one"), expiry_ms=LAST_MS, lifetime_ms=LAST_MS)
    assert (made.expires_ms, made.max_ms) == (LAST_MS, LAST_MS)
    short = await create(tokens, token("two"), lifetime_ms=10_000)
    assert short.expires_ms == short.max_ms == short.issued_ms + 10_000
    assert await tokens.prolong("two", LAST_MS) == short.max_ms
    ends_ms = await tokens.prolong("one", 5_000)
    assert ends_ms is not None
    assert 0 <= ends_ms - made.issued_ms - 5_000 < 60_000
    found = await tokens.by_digest(b"one")
    assert found == (replace(made, expires_ms=ends_ms), False)
    assert await tokens.prolong("three", 1) is None


async def test_an_expired_token_is_neither_renewed_nor_kept(tokens: TokenStore) -> None:
    for number in range(3):
        await create(tokens, token(f"gone-{number}"), lifetime_ms=-1_000)
    made = await create(tokens, token("stays"))
    found = await tokens.by_digest(b"gone-0")
    assert found is not None
    assert found[1]
    assert await tokens.prolong("gone-0", 1_000) is None
    assert sorted([*await tokens.delete_expired(2), *await tokens.delete_expired(2)]) == ["gone-0", "gone-1", "gone-2"]
    assert await tokens.described() == [made]
    assert await tokens.delete("stays") is not None
    assert await tokens.delete("stays") is None


async def test_tokens_are_listed_for_owners_requesters_and_renewers(tokens: TokenStore) -> None:
    await create(tokens, token("1"))
    await create(tokens, token("2", owner="ben", renewers=("ann", "eve")))
    await create(tokens, token("3", owner="ben", requester="eve"))
    whose = {"ann": "12", "ben": "23", "eve": "23", "nobody": ""}
    for user, expected in whose.items():
        assert "".join(each.token_id for each in await tokens.described([user])) == expected
    assert [each.token_id for each in await tokens.described(["ann", "eve"])] == ["1", "2", "3"]
    assert [each.token_id for each in await tokens.described()] == ["1", "2", "3"]
