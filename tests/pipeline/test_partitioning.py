"""Partitions and order of a table, from the words of a user to those of a format."""

from __future__ import annotations

import pytest

from pipeline.errors import PipelineError
from pipeline.partitioning import order, partitions
from pipeline.schema import NEWEST, RECORD


def test_columns_days_hours_and_buckets_become_partitions() -> None:
    text = "topic, bucket(16, key),day(timestamp),hour(timestamp)"
    assert partitions(text, NEWEST, derived=True) == [
        "`topic`", "bucket(16, `key`)", "days(`timestamp`)", "hours(`timestamp`)",
    ]  # fmt: skip
    assert partitions("topic,partition", NEWEST, derived=False) == ["`topic`", "`partition`"]
    assert partitions("", NEWEST, derived=True) == []
    assert order("key, offset", NEWEST) == ["`key`", "`offset`"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("month(timestamp)", "is neither a column nor day"),
        ("topic; DROP TABLE x", "is neither a column nor day"),
        ("bucket(0,key)", "has no buckets, or too many"),
        ("bucket(10001,key)", "has no buckets, or too many"),
        ("day(key)", "key is no time"),
        ("nothing", "the table has no column nothing"),
        ("headers", "the table has no column headers"),
    ],
)
def test_a_partition_without_a_meaning_is_refused(text: str, words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        partitions(text, RECORD, derived=True)


def test_delta_derives_no_partitions() -> None:
    with pytest.raises(PipelineError, match="no partitions that are derived from a column"):
        partitions("day(timestamp)", NEWEST, derived=False)
    with pytest.raises(PipelineError, match="the table has no column nothing"):
        order("nothing", NEWEST)
