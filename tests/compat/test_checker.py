"""The checker of delivery logs, with correct logs and with logs that have one fault each."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from tests.compat.checker import PAUSE_LIMIT_MS, Verdict, check, read_log

TOPIC = "t"
Line = dict[str, object]


def header(mode: str = "eager", **more: object) -> Line:
    return {"t": 0, "event": "scenario", "mode": mode, "topic": TOPIC, "partitions": 2, **more}


def owns(t: float, event: str, member: str, *partitions: int) -> list[Line]:
    return [{"t": t, "event": event, "member": member, "topic": TOPIC, "partition": index} for index in partitions]


def reads(t: float, member: str, partition: int, *offsets: int) -> list[Line]:
    return [
        {"t": t + index, "event": "delivered", "member": member, "partition": partition, "offset": offset}
        for index, offset in enumerate(offsets)
    ]


def produced(t: float, partition: int, *offsets: int) -> list[Line]:
    return [{"t": t, "event": "produced", "partition": partition, "offset": offset} for offset in offsets]


def gone(t: float, event: str, member: str) -> Line:
    return {"t": t, "event": event, "member": member, "partition": -1}


def judge(*lines: Line | Iterable[Line], outage: bool = False) -> Verdict:
    flat: list[Line] = []
    for line in lines:
        flat += [line] if isinstance(line, dict) else line
    return check(read_log("\n".join(json.dumps(line) for line in flat)), outage=outage)


def handover(*, first_revokes: bool = True) -> list[Line]:
    """Return a log in which c1 owns both partitions and reads. Then c2 joins and receives partition 1."""
    return [
        *owns(100, "assigned", "c1", 0, 1),
        *reads(110, "c1", 0, 0, 1),
        *reads(120, "c1", 1, 0, 1),
        *(owns(200, "revoked", "c1", 0, 1) if first_revokes else []),
        *owns(210, "assigned", "c1", 0),
        *owns(211, "assigned", "c2", 1),
        *reads(220, "c1", 0, 2),
        *reads(230, "c2", 1, 2),
    ]


def test_an_orderly_rebalance_passes() -> None:
    verdict = judge(header(produced={"0": 3, "1": 3}), handover())
    assert verdict.problems == []
    assert (verdict.deliveries, verdict.duplicates, verdict.rewinds, verdict.late) == (6, 0, 0, 0)
    assert (verdict.handovers, verdict.longest_pause_ms(retained=False)) == (2, 30)
    assert verdict.longest_pause_ms(retained=True) is None


def test_two_owners_at_one_moment_are_a_problem() -> None:
    verdict = judge(header(), handover(first_revokes=False))
    assert any("assigned to c2 while c1 owned it" in problem for problem in verdict.problems)


def test_ownership_ends_when_a_member_is_killed_or_closed() -> None:
    for event in ("killed", "closed"):
        verdict = judge(
            header(),
            owns(100, "assigned", "c1", 0),
            reads(110, "c1", 0, 0),
            gone(200, event, "c1"),
            owns(300, "assigned", "c2", 0),
            reads(310, "c2", 0, 1),
        )
        assert verdict.problems == []


def test_events_are_judged_in_the_order_of_their_times() -> None:
    """Members in many processes append to the log late and out of order."""
    verdict = judge(
        header(),
        owns(300, "assigned", "c2", 0),
        owns(200, "revoked", "c1", 0),
        owns(100, "assigned", "c1", 0),
        reads(310, "c2", 0, 0),
    )
    assert verdict.problems == []


def test_records_that_never_arrive_are_a_gap() -> None:
    verdict = judge(header(produced={"0": 3, "1": 7}), handover())
    assert verdict.problems == ["t-1: 4 of 7 records never arrived: 3-6"]


def test_an_acknowledged_record_that_never_arrives_is_a_gap() -> None:
    verdict = judge(header(), handover(), produced(50, 0, 0, 1, 2), produced(50, 1, 0, 1, 2, 3, 9))
    assert verdict.problems == ["t-1: 2 of 5 records never arrived: 3, 9"]


def test_a_hole_in_a_log_without_produced_records_is_a_gap() -> None:
    verdict = judge(header(), owns(100, "assigned", "c1", 0), reads(110, "c1", 0, 5, 6, 8))
    assert verdict.problems == ["t-0: 1 of 4 records never arrived: 7"]
    assert judge(header()).problems == ["nothing was delivered"]


def test_a_record_delivered_twice_is_a_duplicate() -> None:
    verdict = judge(header(produced={"0": 2}), owns(100, "assigned", "c1", 0), reads(110, "c1", 0, 0, 1, 1))
    assert verdict.duplicates == 1
    assert verdict.problems == ["t-0 offset 1 was delivered again, to c1"]


def test_redelivery_after_a_crash_counts_but_is_allowed() -> None:
    log = [
        *owns(100, "assigned", "c1", 0),
        *reads(110, "c1", 0, 0, 1, 2),
        gone(200, "killed", "c1"),
        *owns(300, "assigned", "c2", 0),
        *reads(310, "c2", 0, 1, 2, 3),
    ]
    verdict = judge(header(produced={"0": 4}, redelivery_allowed=True), log)
    assert (verdict.problems, verdict.duplicates) == ([], 2)
    assert judge(header(produced={"0": 4}), log).problems


def test_a_rewind_within_one_ownership_is_a_problem_even_after_a_crash() -> None:
    verdict = judge(
        header(produced={"0": 3}, redelivery_allowed=True),
        owns(100, "assigned", "c1", 0),
        reads(110, "c1", 0, 0, 1, 2, 1),
    )
    assert verdict.problems == ["t-0 offset 1 came to c1 after offset 2 in one ownership"]


def test_a_rewind_without_a_duplicate_is_a_problem() -> None:
    verdict = judge(header(produced={"0": 3}), owns(100, "assigned", "c1", 0), reads(110, "c1", 0, 0, 2, 1))
    assert verdict.rewinds == 1
    assert verdict.problems == ["t-0 offset 1 came to c1 after offset 2"]


def test_processing_a_record_of_another_owner_is_a_problem() -> None:
    late = reads(400, "c1", 1, 3)
    verdict = judge(header(produced={"0": 3, "1": 4}), handover(), late)
    assert verdict.problems == ["t-1 offset 3 was processed by c1 while c2 owned the partition"]


def test_processing_after_a_revocation_without_a_new_owner_is_late() -> None:
    verdict = judge(
        header(produced={"0": 2}),
        owns(100, "assigned", "c1", 0),
        reads(110, "c1", 0, 0),
        owns(200, "revoked", "c1", 0),
        reads(201, "c1", 0, 1),
    )
    assert (verdict.problems, verdict.late) == ([], 1)


def test_a_continued_process_may_finish_its_records() -> None:
    log = [
        *owns(100, "assigned", "c1", 0),
        *reads(110, "c1", 0, 0),
        gone(200, "killed", "c1"),
        *owns(300, "assigned", "c2", 0),
        *reads(310, "c2", 0, 1),
        *reads(400, "c1", 0, 1),
        *owns(410, "lost", "c1", 0),
    ]
    assert judge(header(redelivery_allowed=True), log).problems == []
    never_gone = [line for line in log if line["event"] != "killed"]
    assert judge(header(redelivery_allowed=True), never_gone).problems


def cooperative(*, retained_revoked: bool = False, wait_ms: float = 20) -> list[Line]:
    """Return a log in which c2 receives partition 1 from c1, which keeps partition 0 and continues to read. Each record
    arrives `wait_ms` after it was stored.
    """
    return [
        *owns(100, "assigned", "c1", 0, 1),
        *produced(105, 0, 0),
        *reads(110, "c1", 0, 0),
        *produced(105, 1, 0),
        *reads(120, "c1", 1, 0),
        *owns(200, "revoked", "c1", 1),
        *(owns(201, "revoked", "c1", 0) + owns(202, "assigned", "c1", 0) if retained_revoked else []),
        *produced(205, 0, 1),
        *produced(205, 1, 1),
        *reads(205 + wait_ms, "c1", 0, 1),
        *owns(700, "assigned", "c2", 1),
        *reads(720, "c2", 1, 1),
    ]


def test_a_cooperative_rebalance_that_revokes_only_what_moves_passes() -> None:
    verdict = judge(header("cooperative"), cooperative())
    assert verdict.problems == []
    assert verdict.longest_pause_ms(retained=True) == 20
    assert verdict.longest_pause_ms(retained=False) == 515
    assert verdict.handovers == 1


def test_a_retained_partition_that_is_revoked_is_a_problem() -> None:
    assert judge(header("cooperative"), cooperative(retained_revoked=True)).problems == [
        "t-0 was revoked from c1, which retained it"
    ]
    assert judge(header("eager"), cooperative(retained_revoked=True)).problems == []


def test_a_partition_lost_by_a_removed_member_is_not_retained() -> None:
    """A member that is removed during a rebalance has retained no partition, even if it receives
    the partition again.
    """
    lines = [
        *owns(100, "assigned", "c1", 0),
        *reads(110, "c1", 0, 0),
        *owns(200, "lost", "c1", 0),
        *owns(300, "assigned", "c1", 0),
        *reads(310, "c1", 0, 1),
    ]
    assert judge(header("cooperative"), lines).problems == ["t-0 was lost from c1, which retained it"]
    assert judge(header("cooperative"), lines, outage=True).problems == []
    assert judge(header("cooperative", redelivery_allowed=True), lines).problems == []
    assert judge(header("eager"), lines).problems == []


def test_reading_without_an_assignment_is_a_problem() -> None:
    verdict = judge(header(produced={"0": 3, "1": 4}), handover(), reads(190, "c9", 1, 3))
    assert "c9 processed records and was never assigned a partition" in verdict.problems
    assert judge(header(produced={"0": 2}), reads(100, "reader", 0, 0, 1)).problems == []


@pytest.mark.parametrize(("mode", "outage", "in_order"), [("cooperative", False, False), ("cooperative", True, True)])
def test_a_retained_partition_that_pauses_is_a_problem(mode: str, outage: bool, in_order: bool) -> None:
    lines = [
        *owns(100, "assigned", "c1", 0, 1),
        *reads(110, "c1", 0, 0),
        *owns(200, "revoked", "c1", 1),
        *produced(205, 0, 0, 1),
        *owns(700, "assigned", "c2", 1),
        *reads(205 + PAUSE_LIMIT_MS + 1, "c1", 0, 1),
    ]
    assert (judge(header(mode), lines, outage=outage).problems == []) is in_order
    assert judge(header("eager"), lines).problems == []


def test_a_pause_is_judged_only_if_the_times_of_records_are_known() -> None:
    """Between two deliveries there may have been no record to deliver."""
    lines = [
        *owns(100, "assigned", "c1", 0, 1),
        *reads(110, "c1", 0, 0),
        *owns(200, "revoked", "c1", 1),
        *owns(700, "assigned", "c2", 1),
        *reads(90_000, "c1", 0, 1),
    ]
    assert judge(header("cooperative"), lines).problems == []


def test_lines_that_are_no_events_are_counted() -> None:
    text = "\n".join(json.dumps(line) for line in [header(), *owns(1, "assigned", "c1", 0), *reads(2, "c1", 0, 0)])
    torn = text + '\n{"t": 3, "event": "deliv'
    assert check(read_log(torn)).problems == ["1 lines of the log are no events"]
    assert check(read_log(torn.replace('"partitions"', '"redelivery_allowed": true, "partitions"'))).problems == []
    assert check(read_log("")).problems == ["the log has no scenario line", "nothing was delivered"]
    assert read_log('[]\n"text"\n{"event": "delivered"}\n{"t": 1, "event": "unheard-of"}').torn == 4


def test_topics_are_judged_separately() -> None:
    verdict = judge(
        header(),
        {"t": 1, "event": "assigned", "member": "c1", "topic": "a", "partition": 0},
        {"t": 2, "event": "assigned", "member": "c2", "topic": "b", "partition": 0},
        {"t": 3, "event": "delivered", "member": "c1", "topic": "a", "partition": 0, "offset": 0},
        {"t": 4, "event": "delivered", "member": "c2", "topic": "b", "partition": 0, "offset": 0},
    )
    assert verdict.problems == []
