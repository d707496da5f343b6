"""The comparison of two logs finds each difference, and no difference that compaction explains."""

from __future__ import annotations

from collections.abc import Mapping

import confluent_kafka
import pytest

from gateway.mirror.verify import Comparison, compare
from tests.clients.topics import create_topic
from tests.gateway_process import GatewayProcess
from tests.mirror.mirrors import cluster, transact

Log = Mapping[int, tuple[bytes | None, bytes | None]]
"""Maps each offset to a key and a value. Missing offsets are gaps."""

WHOLE: Log = {0: (b"a", b"1"), 1: (b"b", b"1"), 2: (b"a", b"2"), 3: (b"c", b"1"), 4: (b"b", b"2")}


def write(bootstrap: str, topic: str, records: Log) -> None:
    """Write records at these offsets. Each gap of two offsets is filled by an aborted transaction of one record and its
    marker.
    """
    offset = 0
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
    while offset <= max(records):
        if offset in records:
            key, value = records[offset]
            producer.produce(topic, key=key, value=value, partition=0, timestamp=1000 + offset)
            offset += 1
            continue
        assert producer.flush(30) == 0
        assert offset + 1 not in records
        transact(bootstrap, topic, [b"aborted"], commits=False)
        offset += 2
    assert producer.flush(30) == 0


def compared(source: str, target: GatewayProcess, one: Log, other: Log, *, compacted: bool = False) -> Comparison:
    topic = create_topic(source, 1)
    create_topic(target.bootstrap, 1, topic)
    write(source, topic, one)
    write(target.bootstrap, topic, other)
    with cluster(source) as left, cluster(target.bootstrap) as right:
        return compare(left, right, (topic, 0), max(one) + 1, compacted=compacted)


def test_equal_logs_have_no_difference(source: str, target: GatewayProcess) -> None:
    first = compared(source, target, WHOLE, WHOLE)
    assert (first.start, first.end, first.records, first.first_difference) == (0, 5, 5, None)
    assert compared(source, target, WHOLE, WHOLE).checksum == first.checksum
    fewer = {offset: record for offset, record in WHOLE.items() if offset < 4}
    assert compared(source, target, fewer, fewer).checksum != first.checksum


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("changed", [(b"b", b"other"), (b"other", b"1"), (b"b", None)])
def test_another_value_or_key_is_a_difference(
    source: str, target: GatewayProcess, changed: tuple[bytes, bytes | None], compacted: bool
) -> None:
    found = compared(source, target, WHOLE, {**WHOLE, 1: changed}, compacted=compacted)
    assert (found.records, found.first_difference) == (4, 1)


def test_a_missing_record_is_a_difference_unless_a_later_one_of_its_key_explains_it(
    source: str, target: GatewayProcess
) -> None:
    less = {0: WHOLE[0], 3: WHOLE[3], 4: WHOLE[4]}  # the records at 1 and 2
    assert compared(source, target, WHOLE, less).first_difference == 1
    assert compared(source, target, less, WHOLE).first_difference == 1
    assert compared(source, target, WHOLE, less, compacted=True).first_difference == 2, "the last record of key a"
    superseded = {**WHOLE, 4: (b"a", b"3")}
    assert compared(source, target, superseded, {**less, 4: (b"a", b"3")}, compacted=True).first_difference == 1
    last = {4: (b"a", b"3"), 5: (b"b", b"3")}
    assert compared(source, target, {**WHOLE, **last}, {**less, **last}, compacted=True).first_difference is None


def test_a_missing_tombstone_is_no_difference_in_a_compacted_log(source: str, target: GatewayProcess) -> None:
    one = {0: (b"a", b"1"), 1: (b"b", None), 2: (b"c", None), 3: (b"d", b"1")}
    other = {0: (b"a", b"1"), 3: (b"d", b"1")}
    assert compared(source, target, one, other).first_difference == 1
    assert compared(source, target, one, other, compacted=True).first_difference is None


def test_a_missing_tombstone_is_a_difference_if_the_log_has_the_record_that_it_deletes(
    source: str, target: GatewayProcess
) -> None:
    """Compaction removes a tombstone later than the older records of its key."""
    one = {0: (b"a", b"1"), 1: (b"b", None), 2: (b"a", None), 3: (b"d", b"1"), 4: (b"d", b"2")}
    other = {0: (b"a", b"1"), 3: (b"d", b"1"), 4: (b"d", b"2")}
    assert compared(source, target, one, other, compacted=True).first_difference == 2
    assert compared(source, target, other, one, compacted=True).first_difference == 2
    written_again = {4: (b"a", b"2")}
    again = compared(source, target, {**one, **written_again}, {**other, **written_again}, compacted=True)
    assert again.first_difference is None
