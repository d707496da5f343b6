"""The admin clients of kafka-python and librdkafka against a gateway: topics, partitions, settings, sizes."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportPrivateImportUsage=false
# The type stubs of these client libraries are incomplete, or belong to an older release.

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaException, Producer, TopicCollection
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)
from kafka.admin import AbortTransactionSpec, KafkaAdminClient
from kafka.admin import ConfigResource as PythonResource
from kafka.errors import (
    InvalidConfigurationError,
    InvalidProducerEpochError,
    TopicAlreadyExistsError,
    TransactionalIdNotFoundError,
)
from kafka.structs import TopicPartition

from tests.gateway_process import GatewayProcess

TIMEOUT_S = 30


@pytest.fixture
def librdkafka(gateway: GatewayProcess) -> AdminClient:
    return AdminClient({"bootstrap.servers": gateway.bootstrap})


@pytest.fixture
def kafka_python(gateway: GatewayProcess) -> Iterator[KafkaAdminClient]:
    client = KafkaAdminClient(bootstrap_servers=gateway.bootstrap)
    yield client
    client.close()


def fresh() -> str:
    return f"admin-{uuid.uuid4().hex[:12]}"


def error_name(future) -> str:
    with pytest.raises(KafkaException) as refused:
        future.result(TIMEOUT_S)
    return refused.value.args[0].name()


# --- librdkafka -----------------------------------------------------------------------------------------------------


def test_librdkafka_creates_grows_and_deletes_topics(librdkafka: AdminClient) -> None:
    name = fresh()
    created = librdkafka.create_topics([NewTopic(name, 2, 1, config={"retention.ms": "1000"})])
    assert created[name].result(TIMEOUT_S) is None
    listed = librdkafka.list_topics(timeout=TIMEOUT_S)
    assert len(listed.topics[name].partitions) == 2
    assert listed.cluster_id
    assert listed.controller_id in listed.brokers
    assert error_name(librdkafka.create_topics([NewTopic(name, 2, 1)])[name]) == "TOPIC_ALREADY_EXISTS"
    librdkafka.create_partitions([NewPartitions(name, 5)])[name].result(TIMEOUT_S)
    assert len(librdkafka.list_topics(name, timeout=TIMEOUT_S).topics[name].partitions) == 5
    assert error_name(librdkafka.create_partitions([NewPartitions(name, 5)])[name]) == "INVALID_PARTITIONS"
    librdkafka.delete_topics([name])[name].result(TIMEOUT_S)
    assert name not in librdkafka.list_topics(timeout=TIMEOUT_S).topics
    assert error_name(librdkafka.delete_topics([name])[name]) == "UNKNOWN_TOPIC_OR_PART"


def test_librdkafka_receives_errors_for_wrong_admin_requests(librdkafka: AdminClient) -> None:
    name = fresh()
    refused = librdkafka.create_topics([NewTopic(name, 1, 1, config={"retention.ms": "soon"}), NewTopic("a b", 1, 1)])
    with pytest.raises(KafkaException, match=r"retention\.ms"):
        refused[name].result(TIMEOUT_S)
    assert error_name(refused["a b"]) == "TOPIC_EXCEPTION"
    librdkafka.create_topics([NewTopic(name, 1, 1)], validate_only=True)[name].result(TIMEOUT_S)
    assert name not in librdkafka.list_topics(timeout=TIMEOUT_S).topics


def test_librdkafka_describes_and_alters_settings(librdkafka: AdminClient) -> None:
    name = fresh()
    librdkafka.create_topics([NewTopic(name, 1, 1)])[name].result(TIMEOUT_S)
    topic = ConfigResource(ResourceType.TOPIC, name)

    def read() -> dict[str, ConfigEntry]:
        return librdkafka.describe_configs([topic])[topic].result(TIMEOUT_S)

    assert (read()["retention.ms"].value, read()["retention.ms"].is_default) == ("604800000", True)
    changes = [
        ConfigEntry("retention.ms", "5000", incremental_operation=AlterConfigOpType.SET),
        ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.APPEND),
    ]
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=changes)
    librdkafka.incremental_alter_configs([resource])[resource].result(TIMEOUT_S)
    assert (read()["retention.ms"].value, read()["retention.ms"].is_default) == ("5000", False)
    assert read()["cleanup.policy"].value == "delete,compact"
    assert set(read()["retention.ms"].synonyms) == {"retention.ms"}
    replaced = ConfigResource(ResourceType.TOPIC, name, set_config={"segment.ms": "500"})
    librdkafka.alter_configs([replaced])[replaced].result(TIMEOUT_S)
    assert read()["retention.ms"].value == "604800000"
    assert read()["segment.ms"].value == "500"


def test_librdkafka_describes_cluster_topics_and_broker(librdkafka: AdminClient) -> None:
    name = fresh()
    librdkafka.create_topics([NewTopic(name, 3, 1)])[name].result(TIMEOUT_S)
    cluster = librdkafka.describe_cluster(include_authorized_operations=True).result(TIMEOUT_S)
    assert cluster.cluster_id
    assert cluster.controller.id == cluster.nodes[0].id
    assert cluster.authorized_operations
    topics = librdkafka.describe_topics(TopicCollection([name]), include_authorized_operations=True)
    described = topics[name].result(TIMEOUT_S)
    assert (len(described.partitions), described.is_internal) == (3, False)
    assert described.authorized_operations
    broker = ConfigResource(ResourceType.BROKER, str(cluster.nodes[0].id))
    configs = librdkafka.describe_configs([broker])[broker].result(TIMEOUT_S)
    assert configs["num.partitions"].value == "1"
    assert configs["advertised.listeners"].value.endswith(str(cluster.nodes[0].port))
    # Looking up a group's coordinator creates the topic.
    librdkafka.describe_consumer_groups([name])[name].result(TIMEOUT_S)
    offsets = librdkafka.list_topics(timeout=TIMEOUT_S).topics["__consumer_offsets"]
    assert len(offsets.partitions) == 50


# --- kafka-python ---------------------------------------------------------------------------------------------------


def test_kafka_python_creates_describes_and_deletes_topics(kafka_python: KafkaAdminClient) -> None:
    name = fresh()
    kafka_python.create_topics({name: {"num_partitions": 3, "replication_factor": 1}})
    with pytest.raises(TopicAlreadyExistsError):
        kafka_python.create_topics([name])
    (described,) = kafka_python.describe_topics([name])
    assert len(described["partitions"]) == 3
    assert name in kafka_python.list_topics()
    kafka_python.create_partitions({name: 4})
    paged = kafka_python.describe_topic_partitions([name])
    assert str(paged).count("partition_index") >= 4
    kafka_python.delete_topics([name])
    assert name not in kafka_python.list_topics()


def test_kafka_python_describes_and_alters_settings(kafka_python: KafkaAdminClient) -> None:
    name = fresh()
    kafka_python.create_topics({name: {"configs": {"segment.ms": "500"}}})
    resource = PythonResource("topic", name)

    def modified() -> dict[str, str]:
        found = kafka_python.describe_configs([resource])["topic"][name]
        return {key: entry["value"] for key, entry in found.items()}

    assert modified() == {"segment.ms": "500"}
    kafka_python.alter_configs([PythonResource("topic", name, {"retention.ms": "5"})])
    assert modified() == {"segment.ms": "500", "retention.ms": "5"}
    kafka_python.alter_configs([PythonResource("topic", name, {"retention.ms": "6"})], incremental=False)
    assert modified() == {"segment.ms": "500", "retention.ms": "6"}
    kafka_python.reset_configs([PythonResource("topic", name, {"segment.ms": None})])
    assert modified() == {"retention.ms": "6"}
    with pytest.raises(InvalidConfigurationError):
        kafka_python.create_topics({fresh(): {"configs": {"cleanup.policy": "shred"}}})
    assert name in str(kafka_python.list_config_resources())


def test_kafka_python_describes_broker_settings_and_log_sizes(kafka_python: KafkaAdminClient) -> None:
    cluster = kafka_python.describe_cluster()
    assert cluster["cluster_id"]
    kafka_python.alter_configs([PythonResource("broker", "1", {"log.retention.ms": "123456789"})])
    found = kafka_python.describe_configs([PythonResource("broker", "1")], config_filter="all")["broker"]["1"]
    assert found["log.retention.ms"]["value"] == "123456789"
    assert found["advertised.listeners"]["value"].startswith("PLAINTEXT://127.0.0.1:")
    name = fresh()
    kafka_python.create_topics([name])
    topic = PythonResource("topic", name)
    everything = kafka_python.describe_configs([topic], config_filter="all")["topic"][name]
    assert everything["retention.ms"]["value"] == "123456789"
    kafka_python.reset_configs([PythonResource("broker", "1", {"log.retention.ms": None})])
    everything = kafka_python.describe_configs([topic], config_filter="all")["topic"][name]
    assert everything["retention.ms"]["value"] == "604800000"
    assert name in str(kafka_python.describe_log_dirs())


def test_kafka_python_describes_transactions_and_aborts_one(
    kafka_python: KafkaAdminClient, gateway: GatewayProcess
) -> None:
    """Abort a transaction by naming one of its partitions, which aborts all of it. Of these admin clients only
    kafka-python can do this.
    """
    topic, name = fresh(), fresh()
    kafka_python.create_topics({topic: {"num_partitions": 2, "replication_factor": 1}})
    producer = Producer({"bootstrap.servers": gateway.bootstrap, "transactional.id": name})
    producer.init_transactions(TIMEOUT_S)
    producer.begin_transaction()
    for partition in range(2):
        producer.produce(topic, "never", partition=partition)
    assert producer.flush(TIMEOUT_S) == 0

    def listed(**filters) -> list[tuple[str, str]]:
        found = kafka_python.list_transactions(transactional_id_pattern=f"{name}.*", **filters)
        return [(each.transactional_id, each.state) for each in found[1]]

    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    assert listed(state_filters=["Ongoing"], duration_filter_ms=0) == [(name, "Ongoing")]
    assert listed(duration_filter_ms=3_600_000) == []
    described = kafka_python.describe_transactions([name])[name]
    assert (described.state, described.producer_epoch, described.coordinator_id) == ("Ongoing", 0, 1)
    assert described.topic_partitions == {first, second}
    (state,) = kafka_python.describe_producers([first])[first].active_producers
    assert (state.producer_id, state.producer_epoch, state.last_sequence) == (described.producer_id, 0, 0)
    assert state.current_transaction_start_offset == 0
    assert kafka_python.find_hanging_transactions() == []

    with pytest.raises(InvalidProducerEpochError):
        kafka_python.abort_transaction(AbortTransactionSpec(second, described.producer_id, -1))
    kafka_python.abort_transaction(AbortTransactionSpec(second, described.producer_id, 0))
    described = kafka_python.describe_transactions([name])[name]
    assert (described.state, described.producer_epoch, described.topic_partitions) == ("CompleteAbort", 1, set())
    for partition, states in kafka_python.describe_producers([first, second]).items():
        assert [each.current_transaction_start_offset for each in states.active_producers] == [-1], partition
    with pytest.raises(KafkaException) as fenced:
        producer.commit_transaction(TIMEOUT_S)
    assert fenced.value.args[0].fatal()
    with pytest.raises(TransactionalIdNotFoundError):
        kafka_python.describe_transactions([fresh()])
