"""Which quota counts, by upstream's order, and who shares it."""

from __future__ import annotations

import itertools

import pytest

from gateway.quotas.limits import DEFAULT, Entity, EntityType, Limit, QuotaKey, Quotas

KEY = QuotaKey.PRODUCER_BYTE_RATE


def entity(user: str = "-", client: str = "-") -> Entity:
    """ "-": without."""
    named = ((EntityType.USER, user), (EntityType.CLIENT_ID, client))
    return frozenset(each for each in named if each[1] != "-")


ORDER = [
    (entity("u", "c"), ("u", "c")),
    (entity("u", DEFAULT), ("u", "c")),
    (entity("u"), ("u", None)),
    (entity(DEFAULT, "c"), ("u", "c")),
    (entity(DEFAULT, DEFAULT), ("u", "c")),
    (entity(DEFAULT), ("u", None)),
    (entity(client="c"), (None, "c")),
    (entity(client=DEFAULT), (None, "c")),
]


@pytest.mark.parametrize(
    "chosen", itertools.chain.from_iterable(itertools.combinations(range(8), n) for n in (1, 2, 8))
)
def test_the_most_particular_quota_counts(chosen: tuple[int, ...]) -> None:
    quotas = Quotas({ORDER[number][0]: {KEY: float(number)} for number in chosen})
    assert quotas.limit("u", "c", KEY) == Limit(float(chosen[0]), ORDER[chosen[0]][1])


def test_a_quota_of_another_key_or_of_others_does_not_count() -> None:
    quotas = Quotas({entity("u", "c"): {QuotaKey.CONSUMER_BYTE_RATE: 1.0}, entity("v"): {KEY: 2.0}, entity("u"): {}})
    assert quotas.limit("u", "c", KEY) is None
    assert quotas.limit("u", "c", QuotaKey.CONSUMER_BYTE_RATE) == Limit(1.0, ("u", "c"))
    assert dict(quotas.items()).keys() == {entity("u", "c"), entity("v")}
    assert quotas
    assert not Quotas({entity("u"): {}})


def test_a_more_particular_quota_without_the_key_leaves_the_next_one() -> None:
    quotas = Quotas({entity("u", "c"): {QuotaKey.CONSUMER_BYTE_RATE: 1.0}, entity(client=DEFAULT): {KEY: 5.0}})
    assert quotas.limit("u", "c", KEY) == Limit(5.0, (None, "c"))
