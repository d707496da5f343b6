"""Votes, compatibility and subscriptions."""

from __future__ import annotations

from collections import Counter

import pytest

from gateway.coordinator.classic.model import Group, Member
from gateway.coordinator.facts import MemberId
from gateway.coordinator.protocols import compatible, select_protocol, subscribed_topics
from gateway.coordinator.requests import Protocols
from protocol.consumer import Subscription, encode_subscription


def member(name: str, *names: str) -> Member:
    offer = tuple((protocol, f"{name} in {protocol}".encode()) for protocol in names)
    return Member(MemberId(name), None, "client", "/host", 10_000, 10_000, offer)


def group(*members: Member, protocol_type: str | None = "consumer") -> Group:
    support = Counter(name for each in members for name in {name for name, _ in each.protocols})
    return Group(
        "g",
        exists=True,
        protocol_type=protocol_type,
        members={each.member_id: each for each in members},
        protocol_support=support,
    )


def choose(*members: Member) -> str:
    there = group(*members)
    return select_protocol(there.members, there.protocol_support, members[0])


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        (["range"], "range"),
        (["range roundrobin", "roundrobin range", "roundrobin range"], "roundrobin"),
        (["cooperative-sticky range", "range"], "range"),
        (["cooperative-sticky range", "cooperative-sticky range"], "cooperative-sticky"),
        (["a b c", "b a c", "c b d"], "b"),
        (["RoundRobinAssigner", "RoundRobinAssigner"], "RoundRobinAssigner"),
    ],
)
def test_protocol_with_most_votes_is_chosen(offers: list[str], chosen: str) -> None:
    assert choose(*(member(f"m{index}", *offer.split()) for index, offer in enumerate(offers))) == chosen


def test_tied_vote_follows_the_leader() -> None:
    one, other = member("one", "range", "roundrobin"), member("other", "roundrobin", "range")
    assert choose(one, other) == "range"
    assert choose(other, one) == "roundrobin"


def test_a_protocol_listed_twice_or_without_a_name_has_no_more_votes() -> None:
    assert choose(member("one", "", "a", "a", "b"), member("two", "b", "a"), member("three", "b", "a")) == "b"


@pytest.mark.parametrize(
    ("offer", "protocol_type", "fits"),
    [
        ("range", "consumer", True),
        ("x range", "consumer", True),
        ("roundrobin", "consumer", False),
        ("range", "connect", False),
        ("", "consumer", False),
    ],
)
def test_a_newcomer_must_share_a_protocol_with_all(offer: str, protocol_type: str, fits: bool) -> None:
    there = group(member("one", "range", "roundrobin"), member("two", "range", "sticky"))
    assert compatible(there, protocol_type, tuple((name, b"") for name in offer.split())) is fits


@pytest.mark.parametrize(
    ("offer", "protocol_type", "fits"),
    [((("x", b""),), "connect", True), ((), "connect", False), ((("x", b""),), "", False), ((("", b""),), "y", False)],
)
def test_empty_group_accepts_any_valid_protocol_type(offer: Protocols, protocol_type: str, fits: bool) -> None:
    assert compatible(group(), protocol_type, offer) is fits


def test_subscriptions_are_read_from_the_chosen_protocol() -> None:
    offers: list[Protocols] = [
        (("range", encode_subscription(Subscription(0, ("t",)))), ("sticky", b"garbage")),
        (("sticky", b"garbage"), ("range", encode_subscription(Subscription(3, ("u", "t"))))),
    ]
    members = [Member(MemberId(str(at)), None, "", "", 1, 1, offer) for at, offer in enumerate(offers)]
    assert subscribed_topics("consumer", "range", members) == {"t", "u"}
    assert subscribed_topics("consumer", "sticky", members) is None
    assert subscribed_topics("connect", "range", members) is None
    assert subscribed_topics(None, "range", members) is None
