"""Each check finds the violation that it is for, and accepts what is legal."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from tests.trust import checks
from tests.trust.checks import Entry, Part, Place
from tests.trust.history import (
    Change,
    Consumed,
    Delivered,
    Observed,
    OffsetCommitted,
    Outcome,
    OwnerChanged,
    Produced,
    Quantity,
    Settled,
    Settlement,
    Transferred,
    number_in,
)
from tests.trust.world import removed_in


def produced(
    value: int,
    offset: int,
    *,
    outcome: Outcome = Outcome.OK,
    key: str | None = None,
    client: str = "p",
    at_s: float = 0,
) -> Produced:
    return Produced(client, "t", 0, key, value, at_s, at_s + 0.5, outcome, offset)


def log_of(*values: int, key: str | None = None) -> dict[Place, Entry]:
    return {Place("t", 0, offset): Entry(key, value) for offset, value in enumerate(values)}


def consumed(value: int, offset: int, at_s: float = 0.0) -> Consumed:
    return Consumed("g", "m", "t", 0, offset, value, at_s)


def owner(member: str, change: Change, at_s: float) -> OwnerChanged:
    return OwnerChanged("g", member, "t", 0, change, at_s)


def commit(member: str, offset: int, at_s: float, outcome: Outcome = Outcome.OK) -> OffsetCommitted:
    return OffsetCommitted("g", member, "t", 0, offset, at_s, at_s + 0.5, outcome)


def read(value: int, at_s: float, quantity: Quantity = Quantity.COMMITTED) -> Observed:
    group = "g" if quantity is Quantity.COMMITTED else ""
    return Observed(quantity, group, "t", 0, value, at_s, at_s + 0.5)


def test_acknowledged_record_elsewhere_or_absent_is_lost() -> None:
    assert checks.nothing_acknowledged_is_lost([produced(7, 0)], log_of(7)) == []
    (absent,) = checks.nothing_acknowledged_is_lost([produced(7, 1)], log_of(7))
    assert absent == "p was told that value 7 is at t-0 offset 1; no record is there"
    (other,) = checks.nothing_acknowledged_is_lost([produced(7, 0)], log_of(8))
    assert other.endswith("value 8 is there")


def test_acknowledged_record_without_an_offset_must_be_in_its_partition() -> None:
    assert checks.nothing_acknowledged_is_lost([produced(7, -1)], log_of(1, 7)) == []
    assert len(checks.nothing_acknowledged_is_lost([produced(7, -1)], log_of(1, 2))) == 1


@pytest.mark.parametrize("outcome", [Outcome.UNKNOWN, Outcome.FAILED])
def test_record_that_was_not_acknowledged_may_be_absent(outcome: Outcome) -> None:
    assert checks.nothing_acknowledged_is_lost([produced(7, -1, outcome=outcome)], {}) == []


def test_record_twice_in_a_topic_is_found() -> None:
    assert checks.nothing_is_there_twice(["t"], log_of(1, 2, 3)) == []
    assert checks.nothing_is_there_twice(["t"], log_of(1, 2, 1)) == [
        "value 1 of t is at 2 places: partition 0 offset 0, partition 0 offset 2"
    ]
    assert checks.nothing_is_there_twice(["other"], log_of(1, 1)) == []


def test_record_that_nobody_sent_or_whose_send_failed_is_invented() -> None:
    sent = [produced(1, 0), produced(2, -1, outcome=Outcome.UNKNOWN), produced(3, -1, outcome=Outcome.FAILED)]
    assert checks.nothing_was_invented(sent, log_of(1, 2)) == []
    assert len(checks.nothing_was_invented(sent, log_of(1, 2, 3, 4))) == 2


def test_offsets_that_cannot_be_read_are_named_as_ranges() -> None:
    log = {Place("t", 0, offset): Entry(None, offset) for offset in (0, 3, 4, 6)}
    assert checks.offsets_are_dense({Part("t", 0): 8}, ["t"], log) == [
        "t-0 ends at 8, but 4 offsets (1 to 2, 5, 7) cannot be read"
    ]
    assert checks.offsets_are_dense({Part("t", 0): 3}, ["t"], log_of(1, 2, 3)) == []


def test_value_behind_a_higher_one_of_the_same_producer_is_out_of_order() -> None:
    sent = [produced(1, 0), produced(2, 1), produced(9, 2, client="other")]
    assert checks.producers_keep_their_order(sent, log_of(1, 9, 2)) == []
    assert len(checks.producers_keep_their_order(sent, log_of(2, 1, 9))) == 1


def test_acknowledged_record_that_a_group_was_not_given_is_found() -> None:
    sent = [produced(1, 0), produced(2, 1), produced(3, -1, outcome=Outcome.UNKNOWN)]
    assert checks.groups_read_everything(sent, [consumed(1, 0), consumed(2, 1)], {"g": "t"}) == []
    assert checks.groups_read_everything(sent, [consumed(1, 0)], {"g": "t"}) == [
        "group g was never given value 2 of t-0"
    ]


def test_consumer_that_is_given_another_record_than_the_log_holds_is_found() -> None:
    assert checks.groups_read_what_the_log_holds([consumed(1, 0)], log_of(1)) == []
    assert len(checks.groups_read_what_the_log_holds([consumed(1, 0), consumed(5, 1)], log_of(2))) == 2


HANDED_OVER = [owner("a", Change.ASSIGNED, 1), owner("a", Change.REVOKED, 2), owner("b", Change.ASSIGNED, 3)]
OVERLAPPING = [owner("a", Change.ASSIGNED, 1), owner("b", Change.ASSIGNED, 2), owner("a", Change.REVOKED, 3)]


def test_partition_with_two_owners_is_found() -> None:
    assert checks.owners_never_overlap(HANDED_OVER, ["g"], {}) == []
    (sentence,) = checks.owners_never_overlap(OVERLAPPING, ["g"], {})
    assert sentence == "group g: b was given t-0 at 2.000 s while a owned it"


def test_overlap_counts_in_named_groups_and_for_members_that_were_not_removed() -> None:
    assert checks.owners_never_overlap(OVERLAPPING, ["other"], {}) == []
    assert checks.owners_never_overlap(OVERLAPPING, ["g"], {("g", "a"): None}) == []


def test_offset_that_does_not_rise_within_one_ownership_is_found() -> None:
    begun, ended = owner("m", Change.ASSIGNED, 1), owner("m", Change.LOST, 3)
    again = owner("m", Change.ASSIGNED, 4)
    before, after = [consumed(7, 0, 2), consumed(8, 1, 2)], [consumed(7, 0, 5), consumed(8, 1, 5)]
    assert checks.members_read_forward([begun, ended, again], [*before, *after]) == []
    assert len(checks.members_read_forward([begun], [*before, *after])) == 1
    (sentence,) = checks.members_read_forward([begun], [consumed(7, 257, 2), consumed(7, 257, 3)])
    assert sentence.startswith("group g: m received offset 257 of t-0 after offset 257 at 3.000 s")


@pytest.mark.parametrize(
    ("commits", "found"),
    [
        ([commit("a", 5, 1.5), commit("b", 9, 3.5)], 0),
        ([commit("a", 5, 2.9)], 0),  # this happens before the new owner receives the partition
        ([commit("a", 5, 3.5)], 1),
        ([commit("a", 5, 3.5, Outcome.FAILED)], 0),
        ([commit("a", 5, 3.5, Outcome.UNKNOWN)], 0),
    ],
)
def test_commit_of_an_old_owner_after_the_new_one_has_the_partition_is_found(
    commits: Sequence[OffsetCommitted], found: int
) -> None:
    assert len(checks.old_owners_cannot_commit(HANDED_OVER, commits)) == found


def test_number_that_falls_between_two_reads_is_found() -> None:
    assert checks.numbers_never_fall([read(5, 0), read(5, 1), read(7, 2)], [], []) == []
    assert checks.numbers_never_fall([read(5, 0), read(4, 1)], [], []) == [
        "committed offset of t-0 of group g was 5, and 4 at 1.000 s"
    ]


def test_read_that_began_before_another_ended_may_return_less() -> None:
    assert checks.numbers_never_fall([read(5, 0), read(4, 0.4)], [], []) == []


def test_acknowledged_commit_or_record_must_be_seen_by_later_reads() -> None:
    assert len(checks.numbers_never_fall([read(4, 1)], [commit("a", 5, 0)], [])) == 1
    assert checks.numbers_never_fall([read(4, 1)], [commit("a", 5, 0, Outcome.UNKNOWN)], []) == []
    assert len(checks.numbers_never_fall([read(5, 1, Quantity.LOG_END)], [], [produced(1, 5)])) == 1
    assert checks.numbers_never_fall([read(6, 1, Quantity.LOG_END)], [], [produced(1, 5)]) == []


def test_key_whose_last_value_is_older_than_the_acknowledged_one_was_compacted_wrongly() -> None:
    sent = [produced(1, 0, key="k"), produced(2, 1, key="k"), produced(3, -1, key="k", outcome=Outcome.UNKNOWN)]
    assert checks.compaction_keeps_the_last(sent, ["t"], log_of(2, key="k")) == []
    assert checks.compaction_keeps_the_last(sent, ["t"], log_of(2, 3, key="k")) == []
    assert len(checks.compaction_keeps_the_last(sent, ["t"], log_of(1, key="k"))) == 1
    assert len(checks.compaction_keeps_the_last(sent, ["t"], {})) == 1


def test_source_without_result_with_two_and_result_without_source_are_found() -> None:
    assert checks.transfers_happen_once([1, 2], [2, 1]) == []
    assert checks.transfers_happen_once([1, 2, 3], [2, 2, 9, 3]) == [
        "source 2 has 2 results",
        "result 9 has no source",
        "source 1 has no result",
    ]
    of_one = [Transferred("w", "t", [(0, 7, 1)], 2.0, 3.5, Outcome.OK, "")]
    assert checks.transfers_happen_once([1], [], of_one) == ["source 1 has no result; w ok after 2.000-3.500"]


def test_states_that_differ_are_named() -> None:
    assert checks.states_are_equal({"a": 1}, {"a": 1}, "w") == []
    assert checks.states_are_equal({"a": 1, "b": 2}, {"b": 3}, "w") == [
        "w: a was 1 and is absent",
        "w: b was 2 and is 3",
    ]


def test_check_describes_twenty_violations_and_counts_the_others() -> None:
    found = checks.nothing_was_invented([], log_of(*range(30)))
    assert len(found) == checks.MAX_SENTENCES + 1
    assert found[-1] == "and 10 more"


def delivered(count: int, at_s: float, member: str = "m") -> Delivered:
    return Delivered("g", member, "t", 0, 5, 50, count, at_s)


def settled(settlement: Settlement, count: int, at_s: float, outcome: Outcome = Outcome.OK) -> Settled:
    return Settled("g", "m", "t", 0, 5, count, settlement, at_s, at_s + 0.5, outcome)


@pytest.mark.parametrize("settlement", [Settlement.ACCEPT, Settlement.REJECT])
def test_delivery_after_a_final_acknowledgement_is_reported(settlement: Settlement) -> None:
    final = [settled(settlement, 2, 1.0)]
    assert checks.settled_records_stay_settled([delivered(1, 0.1), delivered(2, 0.9)], final) == []
    (again,) = checks.settled_records_stay_settled([delivered(3, 2.0, "n")], final)
    assert again == (
        "group g: n was given t-0 offset 5 (delivery 3) at 2.000 s, "
        f"after the {settlement} of m (delivery 2) at 1.500 s"
    )
    (late,) = checks.settled_records_stay_settled([delivered(2, 1.5 + checks.STALE_S + 1)], final)
    assert "delivery 2" in late


def test_delivery_that_a_member_held_back_is_no_new_delivery() -> None:
    assert checks.settled_records_stay_settled([delivered(1, 2.0, "n")], [settled(Settlement.ACCEPT, 2, 1.0)]) == []


def test_record_that_was_released_or_perhaps_accepted_may_come_again() -> None:
    released = settled(Settlement.RELEASE, 1, 1.0)
    unsure = settled(Settlement.ACCEPT, 1, 1.0, Outcome.UNKNOWN)
    assert checks.settled_records_stay_settled([delivered(2, 2.0)], [released, unsure]) == []


def test_two_members_that_settle_one_record_are_reported() -> None:
    twice = [settled(Settlement.ACCEPT, 1, 1.0), settled(Settlement.REJECT, 2, 2.0)]
    assert checks.settled_records_stay_settled([], twice) == ["group g: m and m both settled t-0 offset 5"]


def test_delivery_beyond_the_limit_is_reported() -> None:
    assert checks.deliveries_keep_their_limit([delivered(5, 1.0)], [], 5) == []
    assert checks.deliveries_keep_their_limit([delivered(6, 1.0)], [], 5) == [
        "group g: t-0 offset 5 was delivered for the 6th time to m"
    ]


def test_record_without_a_row_and_row_without_a_record_are_reported() -> None:
    assert checks.records_are_the_committed_rows({"k": [1, 2]}, "t", log_of(1, 2, key="k")) == []
    (lost,) = checks.records_are_the_committed_rows({"k": [1, 2]}, "t", log_of(1, key="k"))
    assert lost == "t, key k: rows without a record: [2]; records without a row: []"
    (extra,) = checks.records_are_the_committed_rows({"k": [1]}, "t", log_of(1, 1, key="k"))
    assert extra == "t, key k: rows without a record: []; records without a row: [1]"
    (order,) = checks.records_are_the_committed_rows({"k": [1, 2]}, "t", log_of(2, 1, key="k"))
    assert order == "t, key k: the order differs"


def test_record_that_is_processed_twice_or_never_is_reported() -> None:
    log = log_of(1, 2)
    first, second = [(place, entry.value) for place, entry in log.items()]
    assert checks.records_are_processed_once([first, second], "t", log) == []
    assert checks.records_are_processed_once([first, first], "t", log) == [
        "t-0 offset 0, value 1, has 2 results",
        "t-0 offset 1, value 2, has 0 results",
    ]


def test_members_that_a_killed_node_removed_are_found_in_its_log() -> None:
    silent = "member m1.40-librdkafka-2502ccb5-8032-4199-8f9a-1fb2343486dc was not heard within its session"
    left = "member m2.1-Java-f919c915-7596-44d0-bce9-e9d56e609587 left"
    whole = [json.dumps({"group_id": "g", "facts": facts}) for facts in ([silent, "rebalance: a member left"], [left])]
    log = "\n".join([*whole, '{"group_id": "g", "facts": ["member m3', "no JSON"])
    assert removed_in(log) == {("g", "m1.40-librdkafka"): 1}


def test_record_whose_key_another_record_was_sent_with_is_invented() -> None:
    sent = [produced(1, 0, key="a"), produced(2, 1, key="b")]
    assert checks.nothing_was_invented(sent, log_of(1, key="a")) == []
    assert checks.nothing_was_invented(sent, log_of(2, key="a")) == [
        "t-0 offset 0 holds value 2 with key a, which no producer sent there"
    ]


def test_record_behind_the_end_of_its_log_is_reported() -> None:
    assert checks.offsets_are_dense({Part("t", 0): 1}, ["t"], log_of(1, 2, 3)) == [
        "t-0 ends at 1, but 2 offsets (1 to 2) can be read"
    ]
    assert checks.offsets_are_dense({}, ["t"], log_of(1)) == ["t-0 ends at 0, but 1 offsets (0) can be read"]


@pytest.mark.parametrize(("removed_s", "found"), [(1.5, 0), (2 + checks.REMOVED_S + 1, 1), (-1 - checks.REMOVED_S, 1)])
def test_overlap_is_excused_by_a_removal_at_its_time_only(removed_s: float, found: int) -> None:
    assert len(checks.owners_never_overlap(OVERLAPPING, ["g"], {("g", "a"): [removed_s]})) == found


def test_member_that_learns_of_its_assignment_after_its_removal_is_excused() -> None:
    late = [owner("b", Change.ASSIGNED, 90), owner("a", Change.ASSIGNED, 99)]
    assert checks.owners_never_overlap(late, ["g"], {("g", "a"): [80.0]}) == []
    assert len(checks.owners_never_overlap(late, ["g"], {("g", "a"): [50.0]})) == 1


def test_delivery_count_that_begins_anew_is_reported() -> None:
    released = [settled(Settlement.RELEASE, count, float(count)) for count in (1, 2, 3)]
    assert checks.deliveries_keep_their_limit([], released, 5) == []
    unsure = settled(Settlement.RELEASE, 3, 4.0, Outcome.UNKNOWN)
    assert checks.deliveries_keep_their_limit([], [*released, unsure], 5) == []
    assert checks.deliveries_keep_their_limit([], [*released, settled(Settlement.RELEASE, 1, 4.0)], 5) == [
        "group g: delivery 1 of t-0 offset 5 was acknowledged 2 times"
    ]


def test_result_with_another_value_than_the_record_is_reported() -> None:
    (place,) = log = log_of(7)
    assert checks.records_are_processed_once([(place, 8)], "t", log) == [
        "t-0 offset 0, value 7, has 0 results",
        "t-0 offset 0, value 8, has 1 results",
    ]


def test_committed_offset_that_is_absent_has_fallen() -> None:
    assert checks.numbers_never_fall([read(-1, 0), read(5, 1)], [], []) == []
    assert checks.numbers_never_fall([read(-1, 1)], [commit("a", 5, 0)], []) == [
        "committed offset of t-0 of group g was 5, and -1 at 1.000 s"
    ]


def test_client_that_never_succeeded_is_reported() -> None:
    assert checks.every_client_worked({"records": 1, "commits": 0}) == ["commits: none"]


@pytest.mark.parametrize(
    ("value", "found"), [(b"12", 12), ("12", 12), (b"1\xff", -1), (b"-1", -1), (b"", -1), (None, -1)]
)
def test_record_without_a_number_is_unreadable_and_ends_no_client(value: bytes | str | None, found: int) -> None:
    assert number_in(value) == found


def test_topic_that_is_created_again_must_begin_empty_and_at_offset_0() -> None:
    sent = {0: [b"1"], 1: []}
    assert checks.topic_has_its_records("t", sent, {0: [(0, b"1"), (1, b"2")], 1: []}, {b"2"}) == []
    (old,) = checks.topic_has_its_records("t", sent, {0: [(0, b"old"), (1, b"1")], 1: []}, ())
    assert old.startswith("t: wrote")
    assert checks.topic_has_its_records("t", sent, {0: [(7, b"1")], 1: []}, ()) == ["t: its logs begin at {0: 7}"]
