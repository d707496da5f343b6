"""The compaction's index of keys, compared with a dict."""

from __future__ import annotations

import random

import pytest

from gateway.log.offset_map import FIRST_SLOTS, MAX_SPAN, OffsetMap


@pytest.mark.parametrize("base_offset", [0, 10**15])
@pytest.mark.parametrize("keys", [1, 100, 10 * FIRST_SLOTS])
def test_offset_map_keeps_the_newest_offset_of_each_key(base_offset: int, keys: int) -> None:
    chance = random.Random(keys)
    index, expected = OffsetMap(base_offset, 10**9), dict[bytes, int]()
    for offset in range(base_offset, base_offset + 3 * keys):
        key = b"%d" % chance.randrange(keys)
        index.put(key, offset)
        expected[key] = offset
    assert len(index) == len(expected)
    assert {key: index.newest(key) for key in expected} == expected
    assert index.newest(b"another") == -1


def test_keys_may_be_empty_or_views() -> None:
    index = OffsetMap(0, 10)
    index.put(b"", 0)
    index.put(memoryview(b"abc")[1:], 1)
    assert (index.newest(b""), index.newest(b"bc"), index.newest(b"abc")) == (0, 1, -1)


def test_offset_map_is_full_at_its_bound() -> None:
    index = OffsetMap(0, 3)
    for offset, key in enumerate([b"a", b"a", b"b"]):
        index.put(key, offset)
    assert not index.full
    index.put(b"c", 3)
    assert index.full


def test_offset_map_reports_which_offsets_it_can_keep() -> None:
    index = OffsetMap(7, 10)
    assert [index.covers(offset) for offset in (6, 7, 6 + MAX_SPAN, 7 + MAX_SPAN)] == [False, True, True, False]
    index.put(b"last", 6 + MAX_SPAN)
    assert index.newest(b"last") == 6 + MAX_SPAN
