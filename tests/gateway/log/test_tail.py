"""The tail, which holds the newest records in memory: contiguity, limits, known offsets, and which events wake which
watch.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

import pytest

from gateway.log.tail import (
    DOUBT_S,
    DOUBTFUL_AGE_S,
    ENTRY_OVERHEAD_BYTES,
    MAX_ABORTED_LOOKED_AT,
    START_AGE_S,
    Tail,
    TailRead,
    Watch,
)
from storage.types import AbortedTransaction, PartitionKey, PartitionState

P0 = PartitionKey(10)
P1 = PartitionKey(11)
FOREVER_S = 60.0


def append(
    tail: Tail,
    key: PartitionKey,
    base_offset: int,
    *,
    count: int = 1,
    size: int = 10,
    now_s: float = 0.0,
    stable: int | None = None,
    aborted: AbortedTransaction | None = None,
) -> None:
    tail.record_append(
        key,
        base_offset=base_offset,
        last_offset=base_offset + count - 1,
        records=base_offset.to_bytes(8, "big").ljust(size, b"."),
        log_start_offset=0,
        leader_epoch=0,
        now_s=now_s,
        last_stable_offset=stable,
        aborted=aborted,
    )


def read(
    tail: Tail, key: PartitionKey, offset: int, max_bytes: int = 10**6, *, at_least_one: bool = True
) -> TailRead | None:
    return tail.read(key, offset, max_bytes, at_least_one=at_least_one, now_s=0.0)


def read_committed(tail: Tail, key: PartitionKey, offset: int) -> TailRead | None:
    return tail.read(key, offset, 10**6, at_least_one=True, now_s=0.0, committed=True)


def offsets(found: TailRead | None) -> list[int]:
    assert found is not None
    return [int.from_bytes(bytes(batch[:8]), "big") for batch in found.batches]


def state(log_start_offset: int, high_watermark: int) -> PartitionState:
    return PartitionState(log_start_offset, high_watermark, high_watermark, 0, 0)


def test_compacted_range_is_not_served_from_the_tail() -> None:
    tail = Tail(10**6)
    for base_offset in (0, 3, 6):
        append(tail, P0, base_offset, count=3)
    append(tail, P1, 0)
    tail.compacted(P0, 6)
    assert read(tail, P0, 5) is None
    assert offsets(read(tail, P0, 6)) == [6]
    assert offsets(read(tail, P1, 0)) == [0]
    assert tail.size_bytes == 20 + 4 * ENTRY_OVERHEAD_BYTES
    append(tail, P0, 9)
    assert offsets(read(tail, P0, 6)) == [6, 9]
    tail.compacted(P0, 100)
    assert not tail.holds(P0)
    assert tail.holds(P1)
    tail.compacted(P0, 100)
    append(tail, P0, 10)
    assert offsets(read(tail, P0, 10)) == [10]


def test_batch_at_the_edge_of_the_compacted_range_stays() -> None:
    tail = Tail(10**6)
    append(tail, P0, 0, count=3)
    tail.compacted(P0, 2)
    assert offsets(read(tail, P0, 0)) == [0]


def test_compaction_of_a_tail_that_has_lost_its_oldest_batches() -> None:
    tail = Tail(3 * (10 + ENTRY_OVERHEAD_BYTES))
    for base_offset in range(5):
        append(tail, P0, base_offset)
    tail.compacted(P0, 4)
    assert read(tail, P0, 3) is None
    assert offsets(read(tail, P0, 4)) == [4]


def test_an_unknown_partition_must_be_read_from_postgres() -> None:
    assert read(Tail(1000), P0, 0) is None


def test_read_begins_at_the_batch_that_holds_the_offset() -> None:
    tail = Tail(10**6)
    for base_offset in (5, 8, 11):
        append(tail, P0, base_offset, count=3)
    assert offsets(read(tail, P0, 5)) == [5, 8, 11]
    assert offsets(read(tail, P0, 10)) == [8, 11]
    assert offsets(read(tail, P0, 13)) == [11]
    assert offsets(read(tail, P0, 14)) == []
    assert read(tail, P0, 4) is None, "what came before is not here"
    assert read(tail, P0, 15) is None, "beyond the known end only Postgres knows"


def test_read_obeys_its_size_limits() -> None:
    tail = Tail(10**6)
    for base_offset in range(4):
        append(tail, P0, base_offset, size=100)
    assert offsets(read(tail, P0, 0, 250)) == [0, 1]
    assert offsets(read(tail, P0, 0, 99)) == [0], "the first batch always"
    assert offsets(read(tail, P0, 0, 99, at_least_one=False)) == []
    assert offsets(read(tail, P0, 0, 200, at_least_one=False)) == [0, 1]
    few = tail.read(P0, 1, 10**6, at_least_one=True, now_s=0.0, max_batches=1)
    assert offsets(few) == [1]


def test_a_gap_starts_the_partition_anew() -> None:
    tail = Tail(10**6)
    append(tail, P0, 0)
    append(tail, P0, 5)
    assert read(tail, P0, 0) is None
    assert read(tail, P0, 4) is None
    assert offsets(read(tail, P0, 5)) == [5]


def test_append_below_the_end_changes_nothing() -> None:
    tail = Tail(10**6)
    append(tail, P0, 4)
    append(tail, P0, 5)
    append(tail, P0, 4)
    assert offsets(read(tail, P0, 4)) == [4, 5]


def test_observing_ahead_of_an_append_keeps_the_tail() -> None:
    """A read of the partition's state may see a commit before the committer itself has recorded it."""
    tail = Tail(10**6)
    append(tail, P0, 0)
    tail.observe(P0, state(0, 2), 0.0)
    assert read(tail, P0, 1) is None
    append(tail, P0, 1)
    assert offsets(read(tail, P0, 0)) == [0, 1]


def test_a_late_observation_lowers_nothing() -> None:
    tail = Tail(10**6)
    append(tail, P0, 0, count=10)
    tail.observe(P0, state(0, 3), 0.0)
    found = read(tail, P0, 10)
    assert found is not None
    assert found.known.high_watermark == 10


async def test_what_was_read_or_appended_before_a_reset_is_not_learned_after_it() -> None:
    """A fetch of many partitions takes its answer over in pieces. A new history of the database may begin in between,
    and offsets never fall."""
    tail = Tail(10**6)
    before_s = asyncio.get_running_loop().time() - 1.0
    tail.reset()
    tail.observe(P0, PartitionState(0, 200, 200, 0, 0), before_s)
    append(tail, P0, 200, now_s=before_s)
    now_s = asyncio.get_running_loop().time()
    assert tail.known(P0, now_s) is None
    tail.observe(P0, PartitionState(0, 150, 150, 1, 0), now_s)
    known = tail.known(P0, now_s)
    assert known is not None
    assert known.high_watermark == 150


def test_below_the_log_start_nothing_is_served() -> None:
    tail = Tail(10**6)
    append(tail, P0, 0)
    append(tail, P0, 1)
    tail.log_start_moved(P0, 1)
    found = read(tail, P0, 0)
    assert found is not None
    assert (list(found.batches), found.known.log_start_offset) == ([], 1)
    assert offsets(read(tail, P0, 1)) == [1]


@pytest.mark.parametrize("reader", [read, read_committed])
def test_above_the_known_end_postgres_must_be_asked(
    reader: Callable[[Tail, PartitionKey, int], TailRead | None],
) -> None:
    """Another node may have appended, and its announcement has not arrived."""
    tail = Tail(10**6)
    tail.observe(P0, state(0, 5), 0.0)
    at_the_end = reader(tail, P0, 5)
    assert at_the_end is not None
    assert not at_the_end.batches
    assert reader(tail, P0, 6) is None


def test_high_watermark_is_trusted_for_a_bounded_time() -> None:
    tail = Tail(10**6)
    tail.observe(P0, state(0, 7), 100.0)
    assert tail.read(P0, 7, 100, at_least_one=True, now_s=100.9, max_age_s=1.0) is not None
    assert tail.read(P0, 7, 100, at_least_one=True, now_s=101.1, max_age_s=1.0) is None
    assert tail.known(P0, 101.1, 1.0) is None


def test_end_is_trusted_while_other_nodes_announce_their_appends() -> None:
    assert Tail(10**6).max_age_s(50.0) == float("inf")


def is_believed(tail: Tail, now_s: float) -> bool:
    return tail.known(P0, now_s, tail.max_age_s(now_s)) is not None


@pytest.mark.parametrize("cause", ["a commit of unknown outcome", "nobody tells"])
def test_end_older_than_possible_foreign_appends_is_read_again(cause: str) -> None:
    tail = Tail(10**6)
    tail.observe(P0, state(0, 7), 40.0)
    settled_s = 50.0 + DOUBT_S
    if cause == "nobody tells":
        tail.trust_since(float("inf"))
        assert is_believed(tail, 40.0 + DOUBTFUL_AGE_S)
        assert not is_believed(tail, 40.1 + DOUBTFUL_AGE_S)
        tail.trust_since(settled_s)
    else:
        tail.doubt(50.0)
    for now_s in (40.1 + DOUBTFUL_AGE_S, settled_s - 1, settled_s, settled_s + 1, settled_s + 10**6):
        assert not is_believed(tail, now_s) or now_s < 50.0, now_s
    assert tail.doubtful(settled_s - 0.1)
    assert not tail.doubtful(settled_s)
    tail.observe(P0, state(0, 7), settled_s - 1)
    assert is_believed(tail, settled_s)
    assert not is_believed(tail, settled_s - 0.9 + DOUBTFUL_AGE_S), "what was read during the doubt ages as well"
    tail.observe(P0, state(0, 7), settled_s)
    assert is_believed(tail, settled_s + 10**6)


def test_end_is_not_trusted_after_the_registration_expired() -> None:
    tail = Tail(10**6)
    tail.observe(P0, state(0, 7), 40.0)
    tail.trust_until(60.0)
    assert is_believed(tail, 59.9)
    assert not is_believed(tail, 60.0)
    assert tail.doubtful(60.0)
    tail.trust_until(65.0)
    assert is_believed(tail, 64.9)


def test_records_that_another_node_may_have_removed_are_served_for_a_bounded_time() -> None:
    alone, tail = Tail(10**6), Tail(10**6)
    tail.trust_until(FOREVER_S)
    for each in (alone, tail):
        append(each, P0, 0)
    assert tail.read(P0, 0, 10**6, at_least_one=True, now_s=START_AGE_S) is not None
    assert tail.read(P0, 0, 10**6, at_least_one=True, now_s=START_AGE_S + 0.1) is None
    assert alone.read(P0, 0, 10**6, at_least_one=True, now_s=START_AGE_S + 0.1) is not None
    tail.observe(P0, state(0, 1), START_AGE_S + 0.1)
    assert tail.read(P0, 0, 10**6, at_least_one=True, now_s=START_AGE_S + 0.2) is not None


def test_announced_end_is_trusted_until_it_is_read() -> None:
    tail = Tail(10**6)
    tail.observe(P0, state(0, 7), 40.0)
    tail.heard(P0, 7, 49.0)
    assert is_believed(tail, 50.0), "nothing new"
    tail.heard(P0, 9, 50.0)
    assert not is_believed(tail, 50.0)
    tail.observe(P0, state(0, 8), 50.0)
    assert not is_believed(tail, 50.0), "a read from before the announced append"
    tail.observe(P0, state(0, 9), 51.0)
    assert is_believed(tail, 10**6)
    tail.heard(P1, 3, 52.0)
    assert tail.known(P1, 50.0) is None, "what nobody reads here is not remembered"


def test_announced_end_that_a_later_read_does_not_show_is_forgotten() -> None:
    tail = Tail(10**6)
    tail.observe(P0, state(0, 7), 40.0)
    tail.heard(P0, 10**18, 50.0)
    tail.observe(P0, state(0, 7), 49.0)
    assert not is_believed(tail, 51.0)
    tail.observe(P0, state(0, 7), 51.0)
    assert is_believed(tail, 52.0), "every role can send a notification"


async def test_announcement_during_the_first_read_of_a_partition_counts() -> None:
    tail = Tail(10**6)
    watch = tail.watch([P0])
    tail.heard(P0, 8, 41.0)
    tail.observe(P0, state(0, 7), 40.0)
    assert not is_believed(tail, 50.0), "Postgres answered before the announced append"
    await asyncio.wait_for(watch.wait(10**6, 60.0), 5.0)
    tail.observe(P0, state(0, 8), 51.0)
    assert is_believed(tail, 52.0)
    watch.close()


async def test_older_of_two_first_reads_does_not_park() -> None:
    tail = Tail(10**6)
    watches = [tail.watch([P0]), tail.watch([P0])]
    tail.observe(P0, state(0, 8), 41.0)
    tail.observe(P0, state(0, 7), 40.0)
    for watch in watches:
        await asyncio.wait_for(watch.wait(10**6, 60.0), 5.0)
        watch.close()


async def test_announcement_wakes_watches() -> None:
    tail = Tail(10**6)
    tail.observe(P0, state(0, 7), 40.0)
    watch = tail.watch([P0])
    assert tail.watched() == [P0]
    tail.heard(P0, 8, 41.0)
    await asyncio.wait_for(watch.wait(10**6, 60.0), 5.0)
    watch.close()
    assert tail.watched() == []


def test_the_oldest_batch_of_the_node_goes_first() -> None:
    per_batch = 100 + ENTRY_OVERHEAD_BYTES
    tail = Tail(3 * per_batch)
    append(tail, P0, 0, size=100)
    append(tail, P1, 0, size=100)
    append(tail, P0, 1, size=100)
    append(tail, P1, 1, size=100)
    assert tail.size_bytes == 3 * per_batch
    assert read(tail, P0, 0) is None
    assert offsets(read(tail, P0, 1)) == [1]
    assert offsets(read(tail, P1, 0)) == [0, 1]


def test_an_evicted_partition_still_knows_its_end() -> None:
    tail = Tail(1)
    append(tail, P0, 0)
    assert offsets(read(tail, P0, 1)) == []
    assert read(tail, P0, 0) is None


def test_evicted_batches_are_forgotten_and_the_rest_is_found() -> None:
    held = 100
    tail = Tail(held * (10 + ENTRY_OVERHEAD_BYTES))
    for base_offset in range(2_000):
        append(tail, P0, base_offset)
        first = max(base_offset - held + 1, 0)
        assert offsets(read(tail, P0, first)) == list(range(first, base_offset + 1))
        assert read(tail, P0, first - 1) is None or first == 0
    entries = tail._partitions[P0].entries  # noqa: SLF001 - what is forgotten shows in nothing but the list's length
    assert len(entries) <= 2 * held + 64


def test_bound_of_the_tail_holds_for_any_appends() -> None:
    chance = random.Random(7)
    bound = 40_000
    tail = Tail(bound)
    ends = dict.fromkeys((PartitionKey(key) for key in range(5)), 0)
    for _ in range(5000):
        key = chance.choice(list(ends))
        match chance.randrange(20):
            case 0:
                tail.forget(key)
            case 1:
                ends[key] += 3
            case _:
                append(tail, key, ends[key], size=chance.randrange(8, 900))
                ends[key] += 1
        assert 0 <= tail.size_bytes <= bound
        for known_key, end in ends.items():
            for offset in range(max(end - 60, 0), end):
                found = read(tail, known_key, offset)
                if found is not None and found.batches:
                    assert offsets(found) == list(range(offset, found.known.high_watermark))
    for key in ends:
        tail.forget(key)
    tail = Tail(0)
    append(tail, P0, 0)
    assert tail.size_bytes == 0


def test_a_small_batch_does_not_pin_a_large_frame() -> None:
    tail = Tail(10**6)
    frame = bytearray(100_000)
    tail.record_append(
        P0, base_offset=0, last_offset=0, records=memoryview(frame)[:100], log_start_offset=0, leader_epoch=0, now_s=0
    )
    frame.extend(b"a frame that nobody holds can grow")
    large = bytearray(100_000)
    tail.record_append(
        P1, base_offset=0, last_offset=0, records=memoryview(large)[100:], log_start_offset=0, leader_epoch=0, now_s=0
    )
    with pytest.raises(BufferError):
        large.extend(b"a batch that fills its frame is not copied")


# --- what is committed -----------------------------------------------------------------------------------------------


def aborted(found: TailRead | None) -> list[AbortedTransaction]:
    assert found is not None
    return list(found.aborted)


A, B = AbortedTransaction(1, 0), AbortedTransaction(2, 1)


def test_read_committed_read_lists_aborted_transactions() -> None:
    tail = Tail(10**6)
    append(tail, P0, 0, stable=0)
    append(tail, P0, 1, stable=0)
    assert offsets(read_committed(tail, P0, 0)) == []
    append(tail, P0, 2, stable=0, aborted=B)
    assert offsets(read_committed(tail, P0, 0)) == []
    append(tail, P0, 3, aborted=A)
    append(tail, P0, 4, stable=4)
    found = read_committed(tail, P0, 0)
    assert (offsets(found), aborted(found)) == ([0, 1, 2, 3], [A, B]), "by where they began"
    assert aborted(read_committed(tail, P0, 3)) == [A]
    assert offsets(read_committed(tail, P0, 4)) == []
    assert offsets(read(tail, P0, 0)) == [0, 1, 2, 3, 4]


def test_outcome_is_unknown_without_the_marker() -> None:
    """Three cases: another node has ended the transaction, the outcome of the end is unknown on this node, or a read
    was faster than the end's outcome.
    """
    tail = Tail(10**6)
    append(tail, P0, 0)
    append(tail, P0, 1, stable=1)
    append(tail, P0, 2, stable=1)
    assert offsets(read_committed(tail, P0, 0)) == [0]
    tail.observe(P0, PartitionState(0, 4, 4, 0, 0), 0.0)  # a marker at offset 3
    assert offsets(read_committed(tail, P0, 0)) == [0], "as far as is known from here"
    assert read_committed(tail, P0, 1) is None
    assert offsets(read(tail, P0, 1)) == [1, 2]
    append(tail, P0, 3, aborted=AbortedTransaction(1, 1))
    found = read_committed(tail, P0, 1)
    assert (offsets(found), aborted(found)) == ([1, 2, 3], [AbortedTransaction(1, 1)]), "here it is"


def test_late_append_alone_is_not_considered_stable() -> None:
    """The second of two appends is recorded first and then evicted. So this node no longer knows the marker in it."""
    tail = Tail(10 + ENTRY_OVERHEAD_BYTES)
    append(tail, P0, 1, aborted=A)
    append(tail, P1, 0)
    append(tail, P0, 0, stable=0)
    assert read_committed(tail, P0, 0) is None


def test_append_behind_a_marker_may_be_recorded_before_it() -> None:
    """The append may arrive before the marker if a transaction has very many partitions. Postgres knows what lies below
    the append.
    """
    tail = Tail(10**6)
    append(tail, P0, 0, stable=0)
    append(tail, P0, 2)
    append(tail, P0, 1, aborted=A)
    append(tail, P0, 3, stable=3)
    append(tail, P0, 4, aborted=AbortedTransaction(2, 3))
    assert read_committed(tail, P0, 0) is None
    assert read_committed(tail, P0, 1) is None
    found = read_committed(tail, P0, 2)
    assert (offsets(found), aborted(found)) == ([2, 3, 4], [AbortedTransaction(2, 3)])


def test_aborted_transactions_are_forgotten_with_their_markers() -> None:
    tail = Tail(100 * (10 + ENTRY_OVERHEAD_BYTES))
    for key in (P0, P1):
        for offset in range(0, 1_000, 2):
            append(tail, key, offset, stable=offset)
            append(tail, key, offset + 1, aborted=AbortedTransaction(1, offset))
            found = read_committed(tail, key, max(offset - 98, 0))
            assert [each.first_offset for each in aborted(found)] == offsets(found)[::2]
    kept = tail._partitions  # noqa: SLF001 - what is forgotten shows in nothing but memory
    assert not kept[P0].aborted
    assert len(kept[P1].aborted) <= 100


def test_read_visits_a_bounded_number_of_aborted_transactions() -> None:
    tail = Tail(10**8)
    append(tail, P0, 0, stable=0)
    many = MAX_ABORTED_LOOKED_AT + 10
    for offset in range(1, many):
        append(tail, P0, offset, stable=0, aborted=AbortedTransaction(offset, offset))
    append(tail, P0, many)
    append(tail, P0, many + 1, aborted=AbortedTransaction(1, many + 1))
    assert tail.read(P0, 0, 30, at_least_one=True, now_s=0.0, committed=True) is None
    assert aborted(read_committed(tail, P0, many)) == [AbortedTransaction(1, many + 1)]


# --- watches ---------------------------------------------------------------------------------------------------------


async def parked(tail: Tail, keys: Iterable[PartitionKey], missing_bytes: int = 1) -> tuple[Watch, asyncio.Task[None]]:
    watch = tail.watch(keys)
    task = asyncio.create_task(watch.wait(missing_bytes, FOREVER_S))
    await settle()
    assert not task.done()
    return watch, task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_append_wakes_watches_of_its_partition_alone() -> None:
    tail = Tail(10**6)
    _, there = await parked(tail, [P0])
    _, elsewhere = await parked(tail, [P1])
    append(tail, P0, 0)
    await settle()
    assert there.done()
    assert not elsewhere.done()
    elsewhere.cancel()


async def test_min_bytes_are_counted_over_partitions() -> None:
    tail = Tail(10**6)
    _, task = await parked(tail, [P0, P1], missing_bytes=25)
    append(tail, P0, 0, size=10)
    append(tail, P1, 0, size=10)
    await settle()
    assert not task.done()
    append(tail, P0, 1, size=10)
    await settle()
    assert task.done()


async def test_read_committed_watch_is_woken_by_stable_records() -> None:
    tail = Tail(10**6)
    append(tail, P0, 0)
    committed = tail.watch([P0], committed=True)
    everything, others = await parked(tail, [P0], missing_bytes=1)
    task = asyncio.create_task(committed.wait(1_000, FOREVER_S))
    append(tail, P0, 1, size=2_000, stable=1)
    await settle()
    assert others.done()
    assert not task.done(), "it may not see that"
    append(tail, P0, 2, size=10)
    await settle()
    assert task.done(), "the marker is small, but what it ends is not"
    everything.close()
    committed.close()


async def test_read_committed_watch_counts_records_that_are_already_stable() -> None:
    tail = Tail(10**6)
    append(tail, P0, 0)
    watch = tail.watch([P0], committed=True)
    task = asyncio.create_task(watch.wait(20, FOREVER_S))
    await settle()
    append(tail, P0, 1, size=10)
    await settle()
    assert not task.done()
    append(tail, P0, 2, size=10)
    await settle()
    assert task.done()
    watch.close()


async def test_append_between_read_and_wait_counts() -> None:
    tail = Tail(10**6)
    watch = tail.watch([P0])
    append(tail, P0, 0, size=10)
    await asyncio.wait_for(watch.wait(10, FOREVER_S), 1)
    watch.rearm()
    waiting = asyncio.create_task(watch.wait(10, FOREVER_S))
    await settle()
    assert not waiting.done(), "rearmed: what was seen does not count again"
    waiting.cancel()


async def test_the_wait_ends_at_its_timeout() -> None:
    watch = Tail(10**6).watch([P0])
    await asyncio.wait_for(watch.wait(1, 0.01), 5)


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(lambda tail: tail.forget(P0), id="deleted"),
        pytest.param(lambda tail: tail.observe(P0, state(0, 1), 0.0), id="another node appended"),
        pytest.param(lambda tail: tail.log_start_moved(P0, 1), id="log start moved"),
        pytest.param(lambda tail: tail.drain(), id="draining"),
    ],
)
async def test_deletion_or_drain_ends_a_wait_at_once(event: object) -> None:
    tail = Tail(10**6)
    tail.observe(P0, state(0, 0), 0.0)
    _, task = await parked(tail, [P0], missing_bytes=10**9)
    assert callable(event)
    event(tail)
    await settle()
    assert task.done()


async def test_a_closed_watch_leaves_nothing_behind() -> None:
    tail = Tail(10**6)
    watch, task = await parked(tail, [P0, P1])
    task.cancel()
    watch.close()
    append(tail, P0, 0)
    assert tail.watched() == []
    kept = tail._partitions  # noqa: SLF001 - what is kept of nothing shows in memory alone
    assert P1 not in kept, "a partition of which nothing is known is not kept"
