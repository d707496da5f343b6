"""The connector as a batch source: its partitions, its offsets, and all fields of a record."""

from __future__ import annotations

import time

from pyspark.sql.functions import spark_partition_id

from tests.compat.spark.peer import Record, by_partition
from tests.compat.spark.scenario import Run, raises, rows, same, scenario, texts

BIG_BYTES = 900_000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
EARLIEST, LATEST = -2, -1


def _codec(run: Run, codec: str) -> None:
    topic = run.peer.create(2)
    sent = [
        (0, Record(b"plain")),
        (0, Record(b"keyed", b"k", (("h", b"v"), ("h", b"w"), ("ünï", b"")))),
        (0, Record(None, b"tombstone")),
        (0, Record(b"", b"")),
        *((index % 2, Record(f"value {index}".encode() * 20, str(index).encode())) for index in range(100)),
        (1, Record(bytes(index * 7919 % 251 for index in range(BIG_BYTES)), b"big")),
    ]
    run.peer.send(topic, sent, compression=codec)
    found = rows(run.batch(topic, startingOffsets="earliest", endingOffsets="latest", includeHeaders="true"))
    for partition in (0, 1):
        part = [row for row in found if row.partition == partition]
        same([row.record for row in part], [record for number, record in sent if number == partition], "records")
        same([row.offset for row in part], range(len(part)), "offsets")


for _name in CODECS:

    def _bound(run: Run, codec: str = _name) -> None:
        _codec(run, codec)

    scenario(f"spark.batch.codec.{_name}")(_bound)


@scenario("spark.batch.subscribe")
def subscribe(run: Run) -> None:
    topics = sorted(run.peer.create(2) for _ in range(2))
    other = run.peer.create(2)
    sent = {topic: run.peer.fill(topic, (0, 1), range(10)) for topic in (*topics, other)}
    found = rows(run.batch(",".join(topics)))
    for topic in topics:
        same(
            sorted((row.record.value or b"").decode() for row in found if row.topic == topic),
            sorted(sent[topic]),
            topic,
        )
    assert len(found) == 40, f"{len(found)} rows of { ({row.topic for row in found}) }"


@scenario("spark.batch.subscribe-pattern")
def subscribe_pattern(run: Run) -> None:
    prefix = run.peer.create()
    for suffix in ("-a", "-b", "x-c"):
        run.peer.create(2, name=prefix + suffix)
        run.peer.fill(prefix + suffix, (0, 1), range(5))
    found = rows(run.batch(subscribePattern=f"{prefix}-[a-c]"))
    counts = {topic: sum(row.topic == topic for row in found) for topic in {row.topic for row in found}}
    assert counts == {f"{prefix}-a": 10, f"{prefix}-b": 10}, counts


@scenario("spark.batch.assign")
def assign(run: Run) -> None:
    topic = run.peer.create(4)
    run.peer.fill(topic, range(4), range(5))
    found = texts(run.batch(assign={topic: [1, 3]}))
    same(found, [f"{partition}:{number}" for partition in (1, 3) for number in range(5)], "partitions 1 and 3")


@scenario("spark.batch.offsets-json")
def offsets_json(run: Run) -> None:
    topic = run.peer.create(3)
    run.peer.fill(topic, range(3), range(10))
    found = texts(
        run.batch(
            topic,
            startingOffsets={topic: {"0": 4, "1": EARLIEST, "2": 9}},
            endingOffsets={topic: {"0": 7, "1": 2, "2": LATEST}},
        )
    )
    same(found, ["0:4", "0:5", "0:6", "1:0", "1:1", "2:9"], "rows between the offsets")
    same(texts(run.batch(topic, startingOffsets={topic: {"0": 10, "1": 10, "2": 10}})), [], "rows after the end")
    raises(lambda: run.batch(topic, startingOffsets="latest"), "latest")


@scenario("spark.batch.timestamps")
def timestamps(run: Run) -> None:
    """The options startingTimestamp, endingTimestamp and …OffsetsByTimestamp, and a time after all records."""
    topic = run.peer.create(2)
    base_ms = int(time.time() * 1000) - 100_000
    records = [
        (partition, Record(f"{partition}:{number}".encode(), timestamp_ms=base_ms + 1000 * number))
        for number in range(10)
        for partition in (0, 1)
    ]
    run.peer.send(topic, records)
    found = rows(run.batch(topic, startingTimestamp=base_ms + 3000, endingTimestamp=base_ms + 5001))
    same([row.offset for row in found], [3, 4, 5] * 2, "offsets between the times")
    same([row.timestamp_ms - base_ms for row in found], [3000, 4000, 5000] * 2, "times")
    assert {row.timestamp_type for row in found} == {0}, "CreateTime"
    found = rows(
        run.batch(
            topic,
            startingOffsetsByTimestamp={topic: {"0": base_ms + 8001, "1": base_ms + 2000}},
            endingOffsetsByTimestamp={topic: {"0": base_ms + 60_000, "1": base_ms + 3000}},
        )
    )
    same([(row.partition, row.offset) for row in found], [(0, 9), (1, 2)], "offsets by time of each partition")
    after_all = {"startingTimestamp": base_ms + 60_000}
    raises(lambda: rows(run.batch(topic, **after_all)), "No offset matched")
    found = rows(run.batch(topic, **after_all, startingOffsetsByTimestampStrategy="latest"))
    same(found, [], "rows after all times")


@scenario("spark.batch.log-append-time")
def log_append_time(run: Run) -> None:
    topic = run.peer.create(message_timestamp_type="LogAppendTime")
    before_ms = int(time.time() * 1000)
    run.peer.send(topic, [(0, Record(b"v", timestamp_ms=1000))])
    after_ms = int(time.time() * 1000)
    (row,) = rows(run.batch(topic))
    assert (row.timestamp_type, before_ms <= row.timestamp_ms <= after_ms) == (1, True), row
    same(rows(run.batch(topic, startingTimestamp=before_ms)), [row], "rows by the time of the append")


@scenario("spark.batch.min-partitions")
def min_partitions(run: Run) -> None:
    topic = run.peer.create(2)
    run.peer.fill(topic, (0, 1), range(50))
    frame = run.batch(topic, minPartitions=7)
    assert frame.selectExpr("spark_partition_id() AS task").distinct().count() >= 7
    same(texts(frame), [f"{partition}:{number}" for partition in (0, 1) for number in range(50)], "rows")


@scenario("spark.batch.max-records-per-partition")
def max_records_per_partition(run: Run) -> None:
    """The scenario gives the offsets, because Spark does not use this option to divide a batch from `earliest` to
    `latest`.
    """
    topic = run.peer.create(2)
    run.peer.fill(topic, (0, 1), range(50))
    frame = run.batch(
        topic,
        startingOffsets={topic: {"0": 0, "1": 10}},
        endingOffsets={topic: {"0": 50, "1": 45}},
        maxRecordsPerPartition=20,
    )
    tasks = {row.task: row["count"] for row in frame.groupBy(spark_partition_id().alias("task")).count().collect()}
    assert len(tasks) >= 5, tasks
    assert max(tasks.values()) <= 20, tasks
    same(texts(frame), [*(f"0:{number}" for number in range(50)), *(f"1:{number}" for number in range(10, 45))], "rows")


@scenario("spark.batch.group-ids")
def group_ids(run: Run) -> None:
    """To Spark `kafka.group.id` and `groupIdPrefix` are only names. It assigns partitions itself, and no group is
    created.
    """
    topic = run.peer.create(2)
    run.peer.fill(topic, (0, 1), range(5))
    group = f"g-{topic}"
    assert len(rows(run.batch(topic, kafka_group_id=group))) == 10
    assert len(rows(run.batch(topic, groupIdPrefix=group))) == 10
    assert not {name for name in run.peer.groups() if name.startswith(group)}, run.peer.groups()


@scenario("spark.batch.offsets-by-consumer")
def offsets_by_consumer(run: Run) -> None:
    """In Spark's older way to find partitions, a consumer in the driver joins a real group."""
    topic = run.peer.create(3)
    run.peer.fill(topic, range(3), range(5))
    prefix = f"g-{topic}"
    run.spark.conf.set("spark.sql.streaming.kafka.useDeprecatedOffsetFetching", "true")
    try:
        found = texts(run.batch(topic, groupIdPrefix=prefix))
    finally:
        run.spark.conf.unset("spark.sql.streaming.kafka.useDeprecatedOffsetFetching")
    same(found, [f"{partition}:{number}" for partition in range(3) for number in range(5)], "rows")
    assert [name for name in run.peer.groups() if name.startswith(prefix)], "the driver's consumer joined no group"


@scenario("spark.batch.read-committed")
def read_committed(run: Run) -> None:
    """Three kinds of records must not be read: those of an aborted transaction, those of an open one, and those behind
    an open one.
    """
    topic = run.peer.create(2)
    committed = {"kafka_isolation_level": "read_committed"}

    def found(**options: str) -> list[list[int]]:
        numbers = by_partition(texts(run.batch(topic, **options)))
        return [numbers["0"], numbers["1"]]

    with run.peer.transaction(topic, (0, 1), range(10)):
        pass
    with run.peer.transaction(topic, (0, 1), range(10, 20), abort=True):
        pass
    run.peer.fill(topic, (0, 1), range(20, 30))
    ended = [*range(10), *range(20, 30)]
    with run.peer.transaction(topic, (0,), range(30, 40)):
        run.peer.fill(topic, (0, 1), range(40, 50))
        assert found(**committed) == [ended, [*ended, *range(40, 50)]], found(**committed)
        assert found() == [list(range(50)), [*range(30), *range(40, 50)]], found()
    assert found(**committed) == [[*ended, *range(30, 50)], [*ended, *range(40, 50)]], found(**committed)


@scenario("spark.batch.tuning")
def tuning(run: Run) -> None:
    """Timeouts and sizes that users set, all of them in one query."""
    topic = run.peer.create(2)
    run.peer.fill(topic, (0, 1), range(200))
    options = {
        "fetchOffset.numRetries": 1,
        "fetchOffset.retryIntervalMs": 50,
        "kafkaConsumer.pollTimeoutMs": 5000,
        "kafka.max.poll.records": 7,
        "kafka.fetch.min.bytes": 100_000,
        "kafka.fetch.max.wait.ms": 50,
        "kafka.check.crcs": "true",
        "kafka.client.id": "tuned",
        "kafka.client.rack": "r1",
    }
    same(
        texts(run.batch(topic, **options)),
        [f"{partition}:{number}" for partition in (0, 1) for number in range(200)],
        "rows",
    )


@scenario("spark.batch.fail-on-data-loss")
def fail_on_data_loss(run: Run) -> None:
    """The test deletes records after the offsets were planned and before they are read."""
    topic = run.peer.create()
    run.peer.fill(topic, (0,), range(20))
    start = {"startingOffsets": {topic: {"0": 5}}}
    frames = {loss: run.batch(topic, **start, failOnDataLoss=loss) for loss in ("true", "false")}
    run.peer.delete_records(topic, 0, 12)
    raises(lambda: rows(frames["true"]), "OffsetOutOfRange", "data may have been lost")
    same(texts(frames["false"]), [f"0:{number}" for number in range(12, 20)], "what is left")
    same(texts(run.batch(topic, startingOffsets="earliest")), [f"0:{number}" for number in range(12, 20)], "earliest")


@scenario("spark.batch.unknown-topic")
def unknown_topic(run: Run) -> None:
    raises(lambda: rows(run.batch("no-such-topic-here")), "UnknownTopicOrPartition", "does not host this topic")
    same(rows(run.batch(subscribePattern="no-such-topic-.*")), [], "rows of no topic")


@scenario("spark.batch.many")
def many(run: Run) -> None:
    """100,000 records in small batches and small fetches: each is read once."""
    topic = run.peer.create(4)
    frame = run.spark.range(100_000).selectExpr("CAST(id AS STRING) AS value", "CAST(id % 4 AS INT) AS partition")
    run.write(frame, topic, kafka_batch_size=8192)
    found = run.batch(topic, kafka_max_partition_fetch_bytes=100_000, kafka_fetch_max_bytes=150_000)
    counted = found.selectExpr("partition", "offset", "CAST(CAST(value AS STRING) AS BIGINT) AS id").selectExpr(
        "count(*) AS rows",
        "count(DISTINCT id) AS ids",
        "count(DISTINCT partition, offset) AS places",
        "sum(id) AS total",
        "count_if(id % 4 != partition) AS astray",
        "max(offset) AS last",
    )
    (row,) = counted.collect()
    assert row.asDict() == {
        "rows": 100_000,
        "ids": 100_000,
        "places": 100_000,
        "total": 99_999 * 50_000,
        "astray": 0,
        "last": 24_999,
    }, row
