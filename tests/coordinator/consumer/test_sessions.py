"""The immutable mapping of members to deadlines, which is kept in buckets."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.coordinator.consumer.sessions import NO_DEADLINES, Deadlines
from gateway.coordinator.facts import MemberId

members = st.integers(0, 200).map(lambda number: MemberId(f"m{number}"))
deeds = st.lists(st.tuples(members, st.none() | st.integers(0, 1_000)), max_size=40)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(deeds, st.integers(0, 1_000))
def test_buckets_behave_as_a_mapping(done: list[tuple[MemberId, int | None]], now_ms: int) -> None:
    deadlines, plain = NO_DEADLINES, dict[MemberId, int]()
    for member_id, at_ms in done:
        before, shown = deadlines, dict(deadlines)
        if at_ms is None:
            deadlines = deadlines.without(member_id)
            plain.pop(member_id, None)
        else:
            deadlines = deadlines.moved(member_id, at_ms)
            plain[member_id] = at_ms
        assert dict(before) == shown, "what others hold stays as it was"
    assert deadlines == plain == Deadlines(plain)
    assert len(deadlines) == len(plain)
    assert deadlines.earliest() == min(plain.values(), default=None)
    assert sorted(deadlines.due(now_ms)) == sorted(key for key, at_ms in plain.items() if at_ms <= now_ms)
    assert deadlines.later(5) == {key: at_ms + 5 for key, at_ms in plain.items()}


def test_move_shares_all_buckets_but_one() -> None:
    many = Deadlines({MemberId(f"m{number}"): number for number in range(1_000)})
    moved = many.moved(MemberId("m7"), 5_000)
    shared = sum(left is right for left, right in zip(many.buckets, moved.buckets, strict=True))
    assert shared == len(many.buckets) - 1
