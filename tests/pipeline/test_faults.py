"""Jobs are killed with their JVM at seeded moments. Their archives verify, and their replays have neither gaps nor
duplicates.

Two kills run each time. --long runs thirty, and also kills workers, executors and the driver of a cluster.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from pipeline.kafka import Cluster as KafkaCluster
from pipeline.replay.plan import MARK
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.pipeline import processes, topics
from tests.pipeline.conftest import INTERPRETED

PARTITIONS, RECORDS, BATCH = 3, 60_000, 6_000
LONG_KILLS, CLUSTER_KILLS = 15, 3
# On a cluster there are only two batches more than kills, because its four JVMs share one machine.
CLUSTER_BATCH = 12_000
CLUSTER_MEMORY = "512m"
FEW_ROWS = {**INTERPRETED, "spark.sql.shuffle.partitions": "4"}
ON_CLUSTER = tuple(word for name, value in FEW_ROWS.items() for word in ("--conf", f"{name}={value}"))


def filled(bootstrap: str) -> str:
    topic = topics.fresh(bootstrap, PARTITIONS)
    topics.fill(bootstrap, topic, topics.records(RECORDS, PARTITIONS, size=200))
    return topic


def killed_and_done(
    given: tuple[str, ...], event: str, kills: int, seed: int, master: str = "local[2]"
) -> Counter[str]:
    """Start a job, and kill it at a seeded moment after a seeded batch has begun. Repeat this for the given number of
    kills. Then let the job end.
    """
    chance = random.Random(seed)
    moments: Counter[str] = Counter()
    for _ in range(kills):
        job = processes.Job(*given, master=master)
        try:
            for _ in range(chance.randrange(1, 3)):
                if job.wait_for(event) is None:
                    break
            processes.wait_seconds(chance.random() * 2.5)
            job.kill()
        finally:
            job.close()
        moments[job.said[-1].get("event", "") if job.said else "start"] += 1
    processes.run(*given, master=master)
    return moments


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("table_format", ["delta", "iceberg"])
@pytest.mark.parametrize("kills", [1, pytest.param(LONG_KILLS, marks=pytest.mark.long)])
def test_an_archive_that_was_killed_is_the_topic(
    gateway: GatewayProcess, tmp_path: Path, kills: int, table_format: str
) -> None:
    topic, out, where = filled(gateway.bootstrap), str(tmp_path / "table"), ()
    if table_format == "iceberg":
        out, where = "table", ("--format", "iceberg", "--catalog", str(tmp_path / "files"))
    given = ("archive", "--bootstrap", gateway.bootstrap, "--topics", topic, "--out", out, "--once",
             "--max-batch-records", str(BATCH), *where)  # fmt: skip
    moments = killed_and_done(given, "reading", kills, seed=kills)
    proof = processes.run("verify", "--bootstrap", gateway.bootstrap, "--archive", out, *where)
    assert [line["offsets"] for line in proof.said if line.get("event") == "proved"] == [RECORDS], moments


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [1, pytest.param(LONG_KILLS, marks=pytest.mark.long)])
def test_a_replay_that_was_killed_has_neither_gap_nor_duplicate(
    gateway: GatewayProcess, tmp_path: Path, kills: int
) -> None:
    topic, out = filled(gateway.bootstrap), str(tmp_path / "table")
    processes.run("archive", "--bootstrap", gateway.bootstrap, "--topics", topic, "--out", out, "--once")
    target = f"{topic}-again"
    given = ("replay", "--bootstrap", gateway.bootstrap, "--archive", out, "--topic-map", f"{topic}={target}",
             "--partition-map", "2:1", "--create-topics", "--max-batch-records", str(BATCH))  # fmt: skip
    moments = killed_and_done(given, "writing", kills, seed=kills)
    check_replayed(gateway.bootstrap, topic, target, {0: (0,), 1: (1, 2)}, str(moments))


def check_replayed(bootstrap: str, topic: str, target: str, sources: dict[int, tuple[int, ...]], words: str) -> None:
    ends = {log.partition: log.end for log in KafkaCluster(bootstrap).logs([target])}
    each = RECORDS // PARTITIONS
    assert ends == {partition: each * len(of) for partition, of in sources.items()}, words
    for partition, of in sources.items():
        came: dict[int, list[int]] = {source: [] for source in of}
        for _, record in topics.read(bootstrap, target, partition, ends[partition]):
            name, value = record[4][-1]
            assert name == MARK
            found, source, offset, _ = (value or b"").decode().split("/")
            assert found == topic
            came[int(source)].append(int(offset))
        for source, offsets in came.items():
            assert offsets == list(range(each)), f"{target}-{partition} from {source}: {words}"


@pytest.mark.timeout(600)
@pytest.mark.long
def test_an_archive_outlives_restarts_of_the_gateway(gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    gateway = gateway_factory()
    topic, out = filled(gateway.bootstrap), str(tmp_path / "table")
    job = processes.Job("archive", "--bootstrap", gateway.bootstrap, "--topics", topic, "--out", out, "--once",
                        "--max-batch-records", str(BATCH))  # fmt: skip
    try:
        job.wait_for("reading")
        gateway.kill()
        gateway.start()
        job.wait_for("committed")
        gateway.kill()
        gateway.start()
        assert job.wait() == 0, "".join(job.errors)
    finally:
        job.close()
    processes.run("verify", "--bootstrap", gateway.bootstrap, "--archive", out)


@pytest.mark.timeout(1800)
@pytest.mark.long
def test_on_a_cluster_a_worker_and_the_driver_may_die(gateway: GatewayProcess, tmp_path: Path) -> None:
    topic, out = filled(gateway.bootstrap), str(tmp_path / "table")
    short = ("--memory", CLUSTER_MEMORY, *ON_CLUSTER)
    given = ("archive", "--bootstrap", gateway.bootstrap, "--topics", topic, "--out", out, "--once",
             "--max-batch-records", str(CLUSTER_BATCH), *short)  # fmt: skip
    with processes.cluster(2, str(tmp_path)) as machines:
        job = processes.Job(*given, master=machines.master)
        try:
            assert job.wait_for("reading") is not None, "".join(job.errors)
            machines.kill_worker()
            assert job.wait_for("committed") is not None, "".join(job.errors)
            machines.add_worker()
            job.kill()
        finally:
            job.close()
        processes.run(*given, master=machines.master)
        verify = ("verify", "--bootstrap", gateway.bootstrap, "--archive", out, *short)
        processes.run(*verify, master=machines.master)
        target = f"{topic}-again"
        replay = ("replay", "--bootstrap", gateway.bootstrap, "--archive", out, "--topic-map", f"{topic}={target}",
                  "--create-topics", "--max-batch-records", str(CLUSTER_BATCH), *short)  # fmt: skip
        job = processes.Job(*replay, master=machines.master)
        try:
            assert job.wait_for("committed") is not None, "".join(job.errors)
            assert job.wait_for("writing") is not None, "".join(job.errors)
            machines.kill_worker()
            assert job.wait() == 0, "".join(job.errors)
        finally:
            job.close()
    check_replayed(gateway.bootstrap, topic, target, {0: (0,), 1: (1,), 2: (2,)}, "a worker was killed")


@pytest.mark.timeout(1800)
@pytest.mark.long
def test_on_a_cluster_executors_may_die_again_and_again(gateway: GatewayProcess, tmp_path: Path) -> None:
    topic, out, chance = filled(gateway.bootstrap), str(tmp_path / "table"), random.Random(7)
    target, short = f"{topic}-again", ("--memory", CLUSTER_MEMORY, *ON_CLUSTER)
    to, batch = ("--bootstrap", gateway.bootstrap), ("--max-batch-records", str(CLUSTER_BATCH))
    archive = ("archive", *to, "--topics", topic, "--out", out, "--once", *batch, *short)
    replay = ("replay", *to, "--archive", out, "--topic-map", f"{topic}={target}", "--create-topics", *batch, *short)
    with processes.cluster(2, str(tmp_path)) as machines:
        for given, event in ((archive, "reading"), (replay, "writing")):
            job = processes.Job(*given, master=machines.master)
            try:
                for _ in range(CLUSTER_KILLS):
                    assert job.wait_for(event) is not None, "".join(job.errors)
                    processes.wait_seconds(chance.random())
                    machines.kill_executor(chance)
                    assert job.wait_for("committed") is not None, "".join(job.errors)
                assert job.wait() == 0, "".join(job.errors)
            finally:
                job.close()
        processes.run("verify", *to, "--archive", out, *short, master=machines.master)
    check_replayed(gateway.bootstrap, topic, target, {0: (0,), 1: (1,), 2: (2,)}, "executors were killed")


def test_an_error_of_the_cluster_is_told_in_words() -> None:
    job = processes.Job("doctor", "--no-spark", "--bootstrap", "127.0.0.1:1", "--client-conf", "socket.timeout.ms=1000")
    assert job.wait() == 1
    missing = [line for line in job.said if line.get("event") == "missing"]
    assert [line["check"] for line in missing] == ["Kafka"]
    assert missing[0]["cause"] == "No Kafka broker answers at 127.0.0.1:1."
    assert "--bootstrap" in missing[0]["next"]
