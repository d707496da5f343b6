"""Plans of the jobs archive, verify and replay, without Spark."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from pipeline.archive.plan import Progress, Range, plan, plan_again, share, without
from pipeline.archive.start import from_json, milliseconds
from pipeline.errors import PipelineError
from pipeline.kafka import Log
from pipeline.replay import topics
from pipeline.replay.plan import Done, Plan, by_key, partition_map, source_ranges, topic_map
from pipeline.verify.compare import PIECE_BLOCKS, pieces, rounds, scopes, tasks
from pipeline.verify.sums import BLOCK

A0, A1 = ("a", 0), ("a", 1)


def logs(*ends: tuple[int, int], topic_id: str = "id-a") -> list[Log]:
    return [Log("a", topic_id, partition, start, end) for partition, (start, end) in enumerate(ends)]


def began(next0: int, next1: int) -> Progress:
    return Progress(1, "run", {"a": "id-a"}, {A0: 0, A1: 0}, {A0: next0, A1: next1})


def test_a_first_batch_begins_where_it_is_told() -> None:
    batch = plan(Progress(), logs((0, 10), (0, 5)), {A0: 4, A1: 0}, "run", 100)
    assert batch.ranges == (Range("a", 0, 4, 10), Range("a", 1, 0, 5))
    assert batch.after.first == {A0: 4, A1: 0}
    assert batch.after.next == {A0: 10, A1: 5}
    assert (batch.after.batch, batch.left) == (1, 0)


def test_a_partition_that_was_added_begins_at_its_first_record_whatever_the_archive_began_with() -> None:
    progress = Progress(1, "run", {"a": "id-a"}, {A0: 8}, {A0: 10})
    batch = plan(progress, logs((0, 10), (0, 5)), {A1: 5}, "run", 100)
    assert batch.ranges == (Range("a", 1, 0, 5),)


def test_what_retention_removed_before_it_was_read_is_named_and_skipped() -> None:
    batch = plan(began(4, 5), logs((7, 10), (0, 5)), {}, "run", 100)
    assert batch.lost == (Range("a", 0, 4, 7),)
    assert batch.ranges == (Range("a", 0, 7, 10),)
    assert batch.after.lost == (Range("a", 0, 4, 7),)


def test_a_partition_that_lost_all_it_had_goes_on_behind_it() -> None:
    batch = plan(began(4, 5), logs((10, 10), (0, 5)), {}, "run", 100)
    assert (batch.lost, batch.ranges) == ((Range("a", 0, 4, 10),), ())
    assert batch.after.next == {A0: 10, A1: 5}


def test_a_batch_is_planned_again_without_records_that_its_topic_has_lost() -> None:
    planned = replace(plan(began(4, 5), logs((0, 10), (0, 8)), {}, "run", 100).after, run="other")
    whole = plan_again(began(4, 5), planned, logs((0, 20), (0, 20)), 22)
    assert (whole.ranges, whole.lost) == ((Range("a", 0, 4, 10), Range("a", 1, 5, 8)), ())
    assert (whole.after, whole.left) == (planned, 22)
    less = plan_again(began(4, 5), planned, logs((7, 20), (15, 20)), 0)
    assert (less.ranges, less.lost) == ((Range("a", 0, 7, 10),), (Range("a", 0, 4, 7), Range("a", 1, 5, 8)))
    assert less.after == replace(planned, lost=less.lost)
    deleted = plan_again(began(4, 5), planned, [], 0)
    assert (deleted.ranges, deleted.lost) == ((), (Range("a", 0, 4, 10), Range("a", 1, 5, 8)))
    with pytest.raises(PipelineError, match="deleted and created again"):
        plan_again(Progress(), planned, logs((0, 10), topic_id="other"), 0)


def test_a_topic_made_again_is_refused() -> None:
    with pytest.raises(PipelineError, match="deleted and created again"):
        plan(began(4, 5), logs((0, 10), (0, 5), topic_id="other"), {}, "run", 100)


def test_a_topic_that_is_shorter_than_its_archive_is_refused() -> None:
    with pytest.raises(PipelineError, match="truncated"):
        plan(began(4, 5), logs((0, 3), (0, 5)), {}, "run", 100)


def test_a_batch_has_no_more_than_it_may_and_every_partition_its_share() -> None:
    ranges = share([Range("a", 0, 0, 900), Range("a", 1, 50, 150)], 100)
    assert ranges == [Range("a", 0, 0, 90), Range("a", 1, 50, 60)]
    assert share([Range("a", 0, 0, 10**6), Range("a", 1, 0, 1)], 10) == [Range("a", 0, 0, 9), Range("a", 1, 0, 1)]


def test_progress_is_read_back_as_it_was_written() -> None:
    progress = Progress(7, "run", {"a": "id-a"}, {A0: 0, A1: 3}, {A0: 10, A1: 5}, (Range("a", 0, 4, 7),))
    assert Progress.from_json(progress.to_json()) == progress
    with_settings = replace(progress, settings={"a": {"retention.ms": "-1"}})
    assert Progress.from_json(with_settings.to_json()) == with_settings
    assert Progress.from_json('{"other": 1}') is None
    assert Progress.from_json("no json") is None


def test_times_are_utc_unless_they_say_otherwise() -> None:
    assert (
        milliseconds("1970-01-01T00:00:01") == milliseconds("1970-01-01T01:00:01+01:00") == milliseconds("1000") == 1000
    )
    for text in ("yesterday", "--5", "²"):
        with pytest.raises(PipelineError, match="no time"):
            milliseconds(text)


def test_offsets_given_as_json() -> None:
    assert from_json('{"a": {"1": 4}}', logs((2, 10), (0, 5))) == {A0: 2, A1: 4}
    with pytest.raises(PipelineError, match="not JSON"):
        from_json('{"a": 4}', logs((2, 10)))


@pytest.mark.parametrize("named", ["aa-0", "a-7"])
def test_an_offset_of_a_partition_that_is_not_archived_is_refused(named: str) -> None:
    topic, partition = named.split("-")
    told = {"a": {"0": 4}}
    told.setdefault(topic, {})[partition] = 4
    text = json.dumps(told)
    with pytest.raises(PipelineError, match=f"--from names {named}, which is not archived"):
        from_json(text, logs((2, 10)))
    # A table that already holds the partition does not begin it again.
    assert from_json(text, logs((2, 10)), {(topic, int(partition))}) == {A0: 4}


@pytest.mark.parametrize("offset", [-2, -1, 11])
def test_an_offset_outside_of_its_log_is_refused(offset: int) -> None:
    with pytest.raises(PipelineError, match="whose log ends at 10"):
        from_json(f'{{"a": {{"0": {offset}}}}}', logs((2, 10)))
    assert from_json('{"a": {"0": 10}}', logs((2, 10))) == {A0: 10}


# --- verify ---------------------------------------------------------------------------------------------------------


def test_a_range_less_its_holes() -> None:
    whole = Range("a", 0, 10, 50)
    holes = [Range("a", 0, 0, 12), Range("a", 0, 30, 35), Range("a", 1, 15, 20), Range("a", 0, 45, 99)]
    assert list(without(whole, holes)) == [Range("a", 0, 12, 30), Range("a", 0, 35, 45)]
    inside = [Range("a", 0, 12, 40), Range("a", 0, 20, 25)]
    assert list(without(whole, inside)) == [Range("a", 0, 10, 12), Range("a", 0, 40, 50)]


def test_what_can_be_proved_is_what_both_hold() -> None:
    progress = Progress(3, "run", {"a": "id-a"}, {A0: 0, A1: 0}, {A0: 50, A1: 5}, (Range("a", 0, 10, 20),))
    told = scopes(progress, logs((15, 60)))
    assert told[0].ranges == (Range("a", 0, 20, 50),)
    assert "offsets before 15 have been removed" in " ".join(told[0].remarks)
    assert told[1].ranges == ()
    assert "was deleted" in told[1].remarks[0]


def test_a_topic_made_again_is_not_proved_and_does_not_hinder_others() -> None:
    progress = Progress(3, "run", {"a": "id-a", "b": "id-b"}, {A0: 0, ("b", 0): 0}, {A0: 50, ("b", 0): 5})
    told = scopes(progress, [Log("a", "other", 0, 0, 60), Log("b", "id-b", 0, 0, 5)])
    assert told[0].ranges == ()
    assert told[0].remarks == ("its topic was deleted and created again, so nothing of it can be proved",)
    assert told[1].ranges == (Range("b", 0, 0, 5),)


def test_pieces_end_at_borders_of_blocks() -> None:
    border = PIECE_BLOCKS * BLOCK
    cut = pieces([Range("a", 0, 5, border + 7)])
    assert cut == [Range("a", 0, 5, border), Range("a", 0, border, border + 7)]


def test_many_small_pieces_share_tasks_and_large_ones_have_their_own() -> None:
    assert tasks(3, 10_000_000, 2) == 3
    assert tasks(2_000, 50_000, 2) == 16
    assert tasks(400, 400_000_000, 2) == 100
    assert tasks(0, 0, 2) == 1


def test_rounds_keep_every_piece_in_order() -> None:
    work = [Range("a", partition, 0, records) for partition, records in enumerate((5, 5, 30, 1, 2))]
    assert list(rounds(work, 10)) == [work[:2], [work[2]], work[3:]]
    assert list(rounds([], 10)) == []


def test_rounds_of_many_small_pieces_do_not_take_the_square_of_their_number() -> None:
    work = [Range("a", partition, 0, 1) for partition in range(20_000)]
    began = time.thread_time()
    assert list(rounds(work, 10**9)) == [work]
    assert time.thread_time() - began < 2


# --- replay ---------------------------------------------------------------------------------------------------------


def a_plan(**changes: object) -> Plan:
    values: dict[str, object] = {
        "name": "r", "archive": "x", "topics": {"a": "b"}, "partitions": {1: 0}, "condition": None, "from_ms": None,
        "until_ms": None, "timestamps": "keep", "ranges": (Range("a", 0, 0, 100), Range("a", 1, 0, 50)),
        "batch_records": 30, "target_ids": {"b": "id-b"}, "bases": {("b", 0): 3},
    }  # fmt: skip
    return Plan(**{**values, **changes})  # type: ignore[arg-type]


def test_the_batches_of_a_replay_cover_every_offset_once() -> None:
    told = a_plan()
    following, seen = {A0: 0, A1: 0}, {A0: 0, A1: 0}
    while ranges := told.batch(following):
        for each in ranges:
            assert each.start == seen[each.topic, each.partition]
            seen[each.topic, each.partition] = each.end
            following = {**following, (each.topic, each.partition): each.end}
    assert seen == {A0: 100, A1: 50}


def test_a_replay_is_read_back_as_it_was_written() -> None:
    for told in (a_plan(), a_plan(by_key=0, counts={"b": 7})):
        done = Done(told, 4, {A0: 10, A1: 7})
        assert Done.from_json(done.to_json()) == done
    assert Done.from_json(Progress().to_json()) is None


def test_maps_of_topics_and_partitions() -> None:
    assert topic_map("a=b, c=d", ["a", "c"]) == {"a": "b", "c": "d"}
    assert partition_map("0:1,1:1") == {0: 1, 1: 1}
    assert partition_map("same") == {}
    assert partition_map("key") == partition_map("key:12") == {}
    assert (by_key("same"), by_key("0:1"), by_key("key"), by_key("key:12")) == (None, None, 0, 12)
    for text in ("key:", "key:0", "key:x", "key:²"):
        with pytest.raises(PipelineError, match="names no number of partitions"):
            by_key(text)
    for text in ("a", "x=b", "a=b,c=b"):
        with pytest.raises(PipelineError):
            topic_map(text, ["a", "c"])
    with pytest.raises(PipelineError):
        partition_map("0-1")


def test_a_created_target_has_its_sources_settings_and_every_partition() -> None:
    archived = [("a", partition) for partition in range(6)]
    sources = {"a": {"retention.ms": "60000", "max.message.bytes": "9000"}}
    (made,) = topics.targets(a_plan(partitions={}), archived, sources, {"segment.bytes": "1048576"})
    assert (made.topic, made.partitions) == ("b", 6)
    assert made.settings == {
        "retention.ms": "-1", "retention.bytes": "-1", "max.message.bytes": "9000", "segment.bytes": "1048576",
    }  # fmt: skip
    assert made.unlimited == {"retention.ms": "60000", "retention.bytes": ""}


def test_a_created_target_keeps_a_retention_that_cannot_expire_records() -> None:
    sources = {"a": {"retention.ms": "60000"}}
    (now,) = topics.targets(a_plan(timestamps="now"), [A0], sources, {})
    assert now.settings == {"retention.ms": "60000"}
    compacted = {"a": {"cleanup.policy": "compact", "retention.ms": "60000"}}
    assert topics.targets(a_plan(), [A0], compacted, {})[0].settings == compacted["a"]
    (given,) = topics.targets(a_plan(), [A0], sources, {"retention.ms": "5"})
    assert given.settings == {"retention.ms": "5", "retention.bytes": "-1"}


def test_a_created_target_takes_old_timestamps_as_they_are() -> None:
    own = {"message.timestamp.type": "LogAppendTime", "message.timestamp.before.max.ms": "3600000", "segment.ms": "5"}
    (kept,) = topics.targets(a_plan(), [A0], {"a": own}, {})
    assert kept.settings == {
        "message.timestamp.type": "CreateTime", "segment.ms": "5", "retention.ms": "-1", "retention.bytes": "-1",
    }  # fmt: skip
    (new,) = topics.targets(a_plan(timestamps="now"), [A0], {"a": own}, {})
    assert new.settings == own


def test_a_target_that_replaces_kept_timestamps_is_refused() -> None:
    topics.check_timestamps("b", {})
    topics.check_timestamps("b", {"message.timestamp.type": "CreateTime"})
    with pytest.raises(PipelineError, match="would replace the timestamps"):
        topics.check_timestamps("b", {"message.timestamp.type": "LogAppendTime"})


def test_a_given_retention_must_be_a_number() -> None:
    topics.check_given({"retention.ms": "-1", "retention.bytes": "5000", "cleanup.policy": "delete"})
    with pytest.raises(PipelineError, match=r"retention\.ms=7d is no whole number"):
        topics.check_given({"retention.ms": "7d"})


def test_the_offsets_to_replay_are_those_between_from_and_until() -> None:
    progress = Progress(1, "run", {"a": "i", "b": "j"}, {A0: 5, A1: 0, ("b", 0): 0}, {A0: 50, A1: 20, ("b", 0): 9})
    assert source_ranges(progress, {"a"}, {}, {}) == [Range("a", 0, 5, 50), Range("a", 1, 0, 20)]
    assert source_ranges(progress, {"a"}, {A0: 30, A1: 30, ("b", 0): 4}, {A0: 99}) == [Range("a", 0, 30, 50)]
    for first, until in (({("x", 0): 3}, {}), ({}, {("a", 2): 3})):
        with pytest.raises(PipelineError, match="which the archive does not hold"):
            source_ranges(progress, {"a"}, first, until)


def test_the_partitions_of_a_created_target_follow_the_map() -> None:
    assert topics.targets(a_plan(partitions={1: 8}), [A0, A1], {}, {})[0].partitions == 9
    assert topics.targets(a_plan(by_key=12), [A0, A1], {}, {})[0].partitions == 12
    assert topics.targets(a_plan(by_key=0), [A0, A1], {}, {})[0].partitions == 2


def test_retention_expires_only_records_older_than_its_limit() -> None:
    assert topics.expiring("1000", "delete", 5_000, 10_000)
    assert topics.expiring("1000", "compact,delete", 5_000, 10_000)
    assert not topics.expiring("1000", "compact", 5_000, 10_000)
    assert not topics.expiring("-1", "delete", 5_000, 10_000)
    assert not topics.expiring("6000", "delete", 5_000, 10_000)
    assert not topics.expiring("1000", "delete", None, 10_000)


def test_a_target_that_lost_replayed_records_is_refused() -> None:
    key = ("b", 0)
    assert topics.check_held({key: 3}, {key: 10}, [Log("b", "id", 0, 3, 13)]) == 10
    with pytest.raises(PipelineError, match="no longer holds 4 of the 10 records"):
        topics.check_held({key: 3}, {key: 10}, [Log("b", "id", 0, 7, 13)])
    with pytest.raises(PipelineError, match="ends at offset 12"):
        topics.check_held({key: 3}, {key: 10}, [Log("b", "id", 0, 0, 12)])
    with pytest.raises(PipelineError, match="has been deleted"):
        topics.check_held({key: 3}, {key: 10}, [])
