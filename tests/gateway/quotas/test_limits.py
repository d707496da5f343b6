"""Which quota applies to a client, in upstream's order of precedence, and which clients share it."""

from __future__ import annotations

import itertools

import pytest

from gateway.quotas.limits import DEFAULT, Entity, EntityType, Limit, QuotaKey, Quotas

KEY = QuotaKey.PRODUCER_BYTE_RATE


def entity(user: str = "-", client: str = "-") -> Entity:
    """Return a quota's entity. "-" leaves a part out."""
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


CHOICES = [chosen for count in (1, 2, 8) for chosen in itertools.combinations(range(8), count)]


@pytest.mark.parametrize("chosen", CHOICES)
def test_most_specific_quota_applies(chosen: tuple[int, ...]) -> None:
    quotas = Quotas({ORDER[number][0]: {KEY: float(number)} for number in chosen})
    assert quotas.limit("u", "c", KEY) == Limit(float(chosen[0]), ORDER[chosen[0]][1])


def test_quota_of_another_key_or_entity_does_not_apply() -> None:
    quotas = Quotas({entity("u", "c"): {QuotaKey.CONSUMER_BYTE_RATE: 1.0}, entity("v"): {KEY: 2.0}, entity("u"): {}})
    assert quotas.limit("u", "c", KEY) is None
    assert quotas.limit("u", "c", QuotaKey.CONSUMER_BYTE_RATE) == Limit(1.0, ("u", "c"))
    assert dict(quotas.items()).keys() == {entity("u", "c"), entity("v")}
    assert quotas
    assert not Quotas({entity("u"): {}})


def test_quota_without_the_key_falls_back_to_the_next() -> None:
    quotas = Quotas({entity("u", "c"): {QuotaKey.CONSUMER_BYTE_RATE: 1.0}, entity(client=DEFAULT): {KEY: 5.0}})
    assert quotas.limit("u", "c", KEY) == Limit(5.0, (None, "c"))


def test_an_address_has_its_own_quota_or_the_default_for_itself() -> None:
    def connections(**bounds: float) -> Quotas:
        key = QuotaKey.CONNECTION_CREATION_RATE
        return Quotas({frozenset({(EntityType.IP, name)}): {key: bound} for name, bound in bounds.items()})

    own = connections(**{"10.0.0.1": 3.0, "0:0::1": 4.0, DEFAULT: 9.0})
    assert [own.connections_from(each) for each in ("10.0.0.1", "::1", "10.0.0.2")] == [3.0, 4.0, 9.0]
    assert connections(**{"10.0.0.1": 3.0}).connections_from("10.0.0.2") is None
    assert own.limit("u", "c", KEY) is None
