"""MirrorMaker 2 copies topics, settings and groups' offsets between Apache Kafka and a gateway, in both directions."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType  # pyright: ignore[reportPrivateImportUsage]

from tests.gateway_process import ROOT, GatewayFactory
from tests.kafka.process import LOGGING, assemble, java
from tests.mirror.mirrors import committed, consume, fill, needs_kafka, read_partition, transact
from tests.steps.waiting import wait_for

pytestmark = [pytest.mark.long, needs_kafka]

POM = Path(__file__).parent / "mirrormaker-pom.xml"
LIBRARIES = ROOT / ".compat" / "mirrormaker" / "libs"
MIRROR_SECONDS = 180.0
"""Time limit for MirrorMaker, which takes about ten seconds on an idle machine."""

PROPERTIES = """\
clusters = kafka, sluice
kafka.bootstrap.servers = {kafka}
sluice.bootstrap.servers = {sluice}
kafka->sluice.enabled = true
kafka->sluice.topics = {prefix}to-sluice-.*
kafka->sluice.groups = {prefix}to-sluice-.*
sluice->kafka.enabled = true
sluice->kafka.topics = {prefix}to-kafka-.*
sluice->kafka.groups = {prefix}to-kafka-.*
replication.policy.class = org.apache.kafka.connect.mirror.IdentityReplicationPolicy
sync.group.offsets.enabled = true
offset.lag.max = 0
replication.factor = 1
checkpoints.topic.replication.factor = 1
heartbeats.topic.replication.factor = 1
offset-syncs.topic.replication.factor = 1
config.storage.replication.factor = 1
offset.storage.replication.factor = 1
status.storage.replication.factor = 1
refresh.topics.interval.seconds = 1
refresh.groups.interval.seconds = 1
sync.topic.configs.interval.seconds = 1
emit.checkpoints.interval.seconds = 1
sync.group.offsets.interval.seconds = 1
offset.flush.interval.ms = 1000
kafka.consumer.isolation.level = read_committed
sluice.consumer.isolation.level = read_committed
"""


@pytest.fixture
def sluice(gateway_factory: GatewayFactory) -> str:
    return gateway_factory().bootstrap


@pytest.fixture
def prefix(kafka: str, sluice: str, tmp_path: Path) -> Iterator[str]:
    """Common prefix of the topics and groups that a running MirrorMaker copies."""
    assemble(POM, LIBRARIES)
    prefix, settings, log = f"m-{uuid.uuid4().hex[:8]}-", tmp_path / "mm2.properties", tmp_path / "mm2.log"
    settings.write_text(PROPERTIES.format(kafka=kafka, sluice=sluice, prefix=prefix))
    options = ["-Xmx512m", "-XX:+UseSerialGC", f"-Dlog4j2.configurationFile={LOGGING}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            java("org.apache.kafka.connect.mirror.MirrorMaker", str(settings), options=options, libraries=LIBRARIES),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield prefix
        assert process.poll() is None, f"MirrorMaker ended:\n{log.read_text()[-4000:]}"
    finally:
        process.kill()
        process.wait()


def create(bootstrap: str, topic: str) -> None:
    made = NewTopic(topic, 2, 1, config={"retention.ms": "1234567890"})
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([made])[topic].result(30)


def retention_ms(bootstrap: str, topic: str) -> str | None:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (found,) = admin.describe_configs([resource]).values()
    return found.result(30)["retention.ms"].value


@pytest.mark.parametrize("direction", ["to-sluice", "to-kafka"])
def test_topics_and_groups_are_copied_and_a_consumer_resumes(
    kafka: str, sluice: str, prefix: str, direction: str
) -> None:
    source, target = (kafka, sluice) if direction == "to-sluice" else (sluice, kafka)
    topic, group = f"{prefix}{direction}-topic", f"{prefix}{direction}-group"
    create(source, topic)
    fill(source, topic, 0, 100, **{"compression.type": "zstd", "enable.idempotence": True})
    fill(source, topic, 1, 50)
    consume(source, topic, group, 150)
    places = (topic, 0), (topic, 1)
    assert committed(source, group, *places) == [100, 50]
    wait_for(
        lambda: committed(target, group, *places),
        "MirrorMaker has copied the group's offsets",
        holds=lambda offsets: offsets == [100, 50],
        seconds=MIRROR_SECONDS,
    )
    assert retention_ms(target, topic) == "1234567890"
    fill(source, topic, 0, 30)
    transact(source, topic, [b"aborted"] * 3, commits=False)
    transact(source, topic, [b"committed"] * 3, commits=True)
    wait_for(
        lambda: len(read_partition(target, topic)),
        "MirrorMaker has copied the later records",
        holds=lambda count: count >= 133,
        seconds=MIRROR_SECONDS,
    )
    for partition in (0, 1):
        copied, original = (read_partition(cluster, topic, partition) for cluster in (target, source))
        assert [record[1:] for record in copied] == [record[1:] for record in original]
    assert consume(target, topic, group, 33) == list(range(100, 133))
