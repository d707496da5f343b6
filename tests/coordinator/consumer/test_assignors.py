"""The assignors: rules for any assignment, and upstream's examples."""

from __future__ import annotations

import itertools
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.coordinator.consumer.assignors import ASSIGNORS, Subscriber, range_, uniform
from gateway.coordinator.consumer.partitions import Partitions, size
from gateway.coordinator.consumer.spread import respread, spread_of
from gateway.coordinator.facts import MemberId

TOPICS = [UUID(int=number) for number in range(1, 6)]
Given = dict[MemberId, Partitions]

counts_of_topics = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 9), min_size=1)
names = st.sets(st.sampled_from("abcdefgh").map(MemberId), min_size=1)


def alike(members: set[MemberId], topic_ids: frozenset[UUID], last: Given) -> dict[MemberId, Subscriber]:
    return {each: Subscriber(topic_ids, last=last.get(each, {})) for each in sorted(members)}


def pairs(held: Partitions) -> set[tuple[UUID, int]]:
    return {(topic_id, index) for topic_id, indexes in held.items() for index in indexes}


def check_valid(given_: Given, subscribers: dict[MemberId, Subscriber], counts: dict[UUID, int]) -> None:
    owned = list(itertools.chain.from_iterable(pairs(held) for held in given_.values()))
    subscribed = {topic_id for each in subscribers.values() for topic_id in each.topic_ids}
    wanted = {(topic, index) for topic in subscribed & set(counts) for index in range(counts[topic])}
    assert len(owned) == len(set(owned))
    assert set(owned) == wanted
    assert set(given_) == set(subscribers)
    for member_id, held in given_.items():
        assert set(held) <= subscribers[member_id].topic_ids
        assert all(held.values())


def moved(before: Given, after: Given) -> int:
    """Return how many partitions moved from a member that is still present to another member."""
    owner = {pair: member_id for member_id, held in after.items() for pair in pairs(held)}
    return sum(owner[pair] != each for each, held in before.items() if each in after for pair in pairs(held))


def fewest_moves(before: Given, after: Given) -> int:
    """Return the fewest moves that any even assignment to these members needs. The most partitions stay if the members
    with the most partitions get the larger shares.
    """
    share, larger = divmod(sum(map(size, after.values())), len(after))
    sizes = sorted((size(before.get(each, {})) for each in after), reverse=True)
    shares = [share + 1] * larger + [share] * (len(after) - larger)
    return sum(max(0, had - gets) for had, gets in zip(sizes, shares, strict=True))


@settings(max_examples=300, deadline=None)
@given(counts_of_topics, st.lists(names, min_size=2, max_size=5))
def test_uniform_is_even_with_the_fewest_moves(counts: dict[UUID, int], groups: list[set[MemberId]]) -> None:
    """Check the assignor's rules after any series of joins and leaves, all at once or one by one."""
    topic_ids = frozenset(counts)
    last: Given = {}
    for members in groups:
        subscribers = alike(members, topic_ids, last)
        now = uniform(subscribers, counts)
        check_valid(now, subscribers, counts)
        assert max(map(size, now.values())) - min(map(size, now.values())) <= 1
        assert moved(last, now) == fewest_moves(last, now)
        assert uniform(alike(members, topic_ids, now), counts) == now
        last = now


@settings(max_examples=300, deadline=None)
@given(counts_of_topics, st.lists(names, min_size=2, max_size=6))
def test_spread_stays_even_with_the_fewest_moves_step_by_step(
    counts: dict[UUID, int], groups: list[set[MemberId]]
) -> None:
    """The shares of departed members are distributed, and new members get their shares. No other share is inspected."""
    topic_ids = frozenset(counts)
    last = dict(uniform(alike(groups[0], topic_ids, {}), counts))
    spread = spread_of(last, counts)
    for members in groups[1:]:
        before = dict(last)
        for gone in last.keys() - members:
            spread = spread.without(gone, last.pop(gone))
        spread, changed = respread(spread, last, sorted(members))
        last = {**last, **changed}
        check_valid(last, alike(members, topic_ids, {}), counts)
        assert max(map(size, last.values())) - min(map(size, last.values())) <= 1
        assert moved(before, last) == fewest_moves(before, last)
        assert spread == spread_of(last, counts)
        assert all(before.get(each) != share for each, share in changed.items()), "only what changes is written"


@settings(max_examples=300, deadline=None)
@given(
    counts_of_topics, st.lists(st.dictionaries(st.sampled_from("abcdef"), st.sets(st.sampled_from(TOPICS)), min_size=1))
)
def test_uniform_is_balanced_with_different_subscriptions(
    counts: dict[UUID, int], groups: list[dict[MemberId, set[UUID]]]
) -> None:
    """No partition could move to a subscriber that owns two fewer partitions. An assignment that is already even does
    not change.
    """
    last: Given = {}
    for members in groups:
        subscribers = {
            each: Subscriber(frozenset(topics) & frozenset(counts), last=last.get(each, {}))
            for each, topics in members.items()
        }
        now = uniform(subscribers, counts)
        check_valid(now, subscribers, counts)
        for giver, taker in itertools.permutations(now, 2):
            if size(now[giver]) - size(now[taker]) >= 2:
                assert not set(now[giver]) & subscribers[taker].topic_ids
        again = {each: Subscriber(subscriber.topic_ids, last=now[each]) for each, subscriber in subscribers.items()}
        assert uniform(again, counts) == now
        last = now


@pytest.mark.parametrize("name", ASSIGNORS)
@given(counts_of_topics, names, counts_of_topics)
@settings(deadline=None)
def test_topics_that_grow_or_vanish_stay_evenly_assigned(
    name: str, counts: dict[UUID, int], members: set[MemberId], others: dict[UUID, int]
) -> None:
    before = ASSIGNORS[name](alike(members, frozenset(counts), {}), counts)
    subscribers = alike(members, frozenset(others), before)
    check_valid(ASSIGNORS[name](subscribers, others), subscribers, others)


@pytest.mark.parametrize("name", ASSIGNORS)
@given(counts_of_topics, names)
@settings(deadline=None)
def test_the_order_of_members_does_not_matter(name: str, counts: dict[UUID, int], members: set[MemberId]) -> None:
    subscribers = alike(members, frozenset(counts), {})
    turned = dict(reversed(subscribers.items()))
    assert ASSIGNORS[name](subscribers, counts) == ASSIGNORS[name](turned, counts)


def shown(given_: Given) -> dict[str, list[list[int]]]:
    return {each: [sorted(held.get(topic, ())) for topic in TOPICS[:2]] for each, held in given_.items()}


A, B, C = MemberId("a"), MemberId("b"), MemberId("c")
BOTH = frozenset(TOPICS[:2])
THREE = {TOPICS[0]: 3, TOPICS[1]: 3}


def test_range_gives_the_same_stretch_of_each_topic() -> None:
    two = range_({A: Subscriber(BOTH), B: Subscriber(BOTH)}, THREE)
    assert shown(two) == {"a": [[0, 1], [0, 1]], "b": [[2], [2]]}
    more_members = range_({A: Subscriber(BOTH), B: Subscriber(BOTH), C: Subscriber(BOTH)}, {TOPICS[0]: 2})
    assert shown(more_members) == {"a": [[0], []], "b": [[1], []], "c": [[], []]}


def test_range_puts_static_members_first_by_instance_id() -> None:
    static = range_(
        {A: Subscriber(BOTH), B: Subscriber(BOTH, instance_id="i2"), C: Subscriber(BOTH, instance_id="i1")}, THREE
    )
    assert shown(static) == {"c": [[0], [0]], "b": [[1], [1]], "a": [[2], [2]]} | {}


def test_range_assigns_each_topic_to_its_subscribers() -> None:
    different = range_({A: Subscriber(BOTH), B: Subscriber(frozenset(TOPICS[:1]))}, THREE)
    assert shown(different) == {"a": [[0, 1], [0, 1, 2]], "b": [[2], []]}


def test_uniform_a_third_member_takes_one_from_each() -> None:
    counts = {TOPICS[0]: 6}
    one = frozenset(TOPICS[:1])
    two = uniform(alike({A, B}, one, {}), counts)
    assert shown(two) == {"a": [[0, 2, 4], []], "b": [[1, 3, 5], []]}
    assert shown(uniform(alike({A, B, C}, one, two), counts)) == {
        "a": [[0, 2], []],
        "b": [[1, 3], []],
        "c": [[4, 5], []],
    }


def test_no_members_own_nothing() -> None:
    assert uniform({}, THREE) == range_({}, THREE) == {}
