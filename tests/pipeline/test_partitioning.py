"""Partitions and sort order of a table, from the user's words to a format's options."""

from __future__ import annotations

import pytest

from pipeline.errors import PipelineError
from pipeline.partitioning import Part, order, partitions
from pipeline.schema import NEWEST, RECORD


def test_columns_days_hours_and_buckets_become_partitions() -> None:
    text = "topic, bucket(16, key),day(timestamp),hour(timestamp)"
    assert partitions(text, NEWEST) == [
        Part("topic"), Part("key", "bucket", 16), Part("timestamp", "day"), Part("timestamp", "hour"),
    ]  # fmt: skip
    assert partitions("", NEWEST) == []
    assert order("key, offset", NEWEST) == ["key", "offset"]


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
        partitions(text, RECORD)


def test_an_order_by_an_unknown_column_is_refused() -> None:
    with pytest.raises(PipelineError, match="the table has no column nothing"):
        order("nothing", NEWEST)
