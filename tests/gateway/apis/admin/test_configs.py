"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs and ListConfigResources, on a real Postgres."""

from __future__ import annotations

import asyncio
import contextlib
import random
import string
import time

import asyncpg
import pytest
import structlog.testing

from gateway.apis.admin.broker_loggers import Operation
from gateway.apis.admin.config_resources import ResourceType
from gateway.apis.admin.new_topics import plan_internal
from gateway.config.broker_table import BROKER_CONFIGS, UNLISTED
from gateway.config.definition import ConfigSource, ConfigType
from gateway.config.topic import REPLICATION_FACTOR
from gateway.config.without_effect import WITHOUT_EFFECT
from gateway.coordinator.handoff import HandoffMode, HandoffSettings
from gateway.coordinator.settings import StreamsSettings
from gateway.groups.settings import group_settings
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages import alter_configs as legacy
from protocol.messages import incremental_alter_configs as incremental
from protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from protocol.messages.list_config_resources import ListConfigResourcesRequest
from tests.gateway.admin import SHOWN_CONFIGS, AdminNode, admin_node
from tests.gateway.apis.admin.configs import alter, describe, replace
from tests.steps.waiting import until_blocked

TOPIC, BROKER, GROUP = ResourceType.TOPIC, ResourceType.BROKER, ResourceType.GROUP
SET, DELETE, APPEND, SUBTRACT = Operation
MAP = "listener.security.protocol.map"


async def value_of(node: AdminNode, kind: int, name: str, key: str) -> tuple[str | None, int]:
    (entry,) = (await describe(node, kind, name, key)).configs
    return entry.value, entry.config_source


@contextlib.asynccontextmanager
async def locked_catalog(url: str):
    """Block changes of the catalog until the block ends.

    Yield a connection that can show which sessions wait. This connection is outside any transaction, because inside a
    transaction later backends are not visible.
    """
    watcher, connection = await asyncpg.connect(url), await asyncpg.connect(url)
    try:
        async with connection.transaction():
            await connection.execute("select from sluice.cluster for update")
            yield watcher
    finally:
        await connection.close()
        await watcher.close()


# --- describing a topic ---------------------------------------------------------------------------------------------


async def test_describe_topic_at_every_version(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("orders", configs={"segment.ms": "500"}, factor=2)
        for version in range(1, 5):
            result = await describe(node, TOPIC, "orders", version=version)
            assert (result.error_code, result.error_message) == (ErrorCode.NONE, None)
            entries = {entry.name: entry for entry in result.configs}
            assert entries.keys() == SHOWN_CONFIGS
            assert entries["segment.ms"].value == "500"
            assert entries["segment.ms"].config_source == ConfigSource.TOPIC_CONFIG
            assert entries["retention.ms"].value == "604800000"
            assert entries["retention.ms"].config_source == ConfigSource.DEFAULT_CONFIG
            assert not any(entry.read_only or entry.is_sensitive or entry.synonyms for entry in result.configs)
            if version >= 3:
                assert entries["segment.ms"].config_type == ConfigType.LONG
                assert entries["cleanup.policy"].config_type == ConfigType.LIST
                assert entries["segment.ms"].documentation is None


async def test_resources_described_together_keep_their_own_settings(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("own", configs={"retention.ms": "5"})
        await node.create("plain")
        await alter(node, GROUP, "own", (SET, "consumer.session.timeout.ms", "50000"))
        asked = [(TOPIC, "plain"), (TOPIC, "own"), (GROUP, "plain"), (GROUP, "own"), (GROUP, "other")]
        request = DescribeConfigsRequest(
            resources=tuple(DescribeConfigsResource(resource_type=kind, resource_name=name) for kind, name in asked),
            include_synonyms=True,
        )
        together = (await node.ask(ApiKey.DESCRIBE_CONFIGS, request, 4)).results
        alone = [await describe(node, *one, include_synonyms=True) for one in dict.fromkeys(asked)]
        assert list(together) == alone
        values = {
            (result.resource_type, result.resource_name, entry.name): entry.value
            for result in together
            for entry in result.configs
        }
        assert values[TOPIC, "own", "retention.ms"] == "5"
        assert values[TOPIC, "plain", "retention.ms"] == "604800000"
        assert values[GROUP, "own", "consumer.session.timeout.ms"] == "50000"
        assert values[GROUP, "other", "consumer.session.timeout.ms"] == "45000"


async def test_documentation_and_synonyms_are_returned_if_requested(database_url: str) -> None:
    async with admin_node(database_url, broker={"log.retention.hours": "1", "log.retention.minutes": "30"}) as node:
        await node.create("orders", configs={"retention.ms": "5"})
        await alter(node, BROKER, "", (SET, "log.retention.ms", "7000"))
        result = await describe(node, TOPIC, "orders", include_synonyms=True, include_documentation=True)
        assert all(entry.documentation for entry in result.configs)
        (retention,) = [entry for entry in result.configs if entry.name == "retention.ms"]
        assert [(each.name, each.value, each.source) for each in retention.synonyms] == [
            ("retention.ms", "5", ConfigSource.TOPIC_CONFIG),
            ("log.retention.ms", "7000", ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG),
        ]


async def test_broker_setting_is_listed_with_coarser_ones_that_are_set(database_url: str) -> None:
    async with admin_node(database_url, broker={"log.retention.minutes": "30"}) as node:

        async def synonyms() -> list[tuple[str, str | None, int]]:
            (entry,) = (await describe(node, BROKER, "1", "log.retention.ms", include_synonyms=True)).configs
            return [(each.name, each.value, each.source) for each in entry.synonyms]

        assert await synonyms() == []
        await alter(node, BROKER, "", (SET, "log.retention.ms", "7000"))
        assert await synonyms() == [
            ("log.retention.ms", "7000", ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG),
            ("log.retention.minutes", "30", ConfigSource.STATIC_BROKER_CONFIG),
            ("log.retention.hours", "168", ConfigSource.DEFAULT_CONFIG),
        ]


async def test_only_requested_keys_are_described(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("orders")
        result = await describe(node, TOPIC, "orders", "retention.ms", "no.such.key")
        assert [entry.name for entry in result.configs] == ["retention.ms"]
        request = DescribeConfigsRequest(
            resources=(DescribeConfigsResource(resource_type=TOPIC, resource_name="orders", configuration_keys=()),)
        )
        (everything,) = (await node.ask(ApiKey.DESCRIBE_CONFIGS, request, 4)).results
        assert len(everything.configs) == len(SHOWN_CONFIGS)


async def test_a_resource_named_again_is_described_once(database_url: str) -> None:
    """An answer that repeated each name would be large: a name of eight bytes causes kilobytes."""
    async with admin_node(database_url) as node:
        await node.create("orders")
        whole = DescribeConfigsResource(resource_type=TOPIC, resource_name="orders", configuration_keys=None)
        keys = ("retention.ms",)
        part = DescribeConfigsResource(resource_type=TOPIC, resource_name="orders", configuration_keys=keys)
        request = DescribeConfigsRequest(resources=(whole, part, whole, whole))
        results = (await node.ask(ApiKey.DESCRIBE_CONFIGS, request, 4)).results
        assert [len(result.configs) for result in results] == [len(SHOWN_CONFIGS), 1]


async def test_another_spelling_of_a_brokers_id_is_refused(database_url: str) -> None:
    """Otherwise a request of some kilobytes could name one broker thousands of times, and each answer is large."""
    async with admin_node(database_url) as node:
        for kind in (BROKER, ResourceType.BROKER_LOGGER):
            for name in ("01", "+1", "1 ", "0_1", "\u0661"):
                result = await describe(node, kind, name)
                assert (result.error_code, result.configs) == (ErrorCode.INVALID_REQUEST, ()), (kind, name)
            assert (await describe(node, kind, "1")).configs


async def test_describe_refusals(database_url: str) -> None:
    async with admin_node(database_url) as node:
        for kind, name, code in (
            (TOPIC, "missing", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            (TOPIC, "a b", ErrorCode.INVALID_TOPIC_EXCEPTION),
            (BROKER, "2", ErrorCode.INVALID_REQUEST),
            (BROKER, "one", ErrorCode.INVALID_REQUEST),
            (ResourceType.BROKER_LOGGER, "2", ErrorCode.INVALID_REQUEST),
            (ResourceType.BROKER_LOGGER, "", ErrorCode.INVALID_REQUEST),
            (ResourceType.CLIENT_METRICS, "", ErrorCode.INVALID_REQUEST),
            (GROUP, "", ErrorCode.INVALID_REQUEST),
            (0, "x", ErrorCode.INVALID_REQUEST),
            (99, "x", ErrorCode.INVALID_REQUEST),
        ):
            result = await describe(node, kind, name)
            assert (result.error_code, result.configs) == (code, ()), (kind, name)
            assert result.error_message
        assert (await describe(node, GROUP, "g")).error_code == ErrorCode.NONE


# --- describing a broker --------------------------------------------------------------------------------------------


async def test_describe_broker(database_url: str) -> None:
    async with admin_node(database_url, name="broker.example", rack="r1", broker={"num.partitions": "4"}) as node:
        result = await describe(node, BROKER, "1", include_synonyms=True, include_documentation=True)
        entries = {entry.name: entry for entry in result.configs}
        assert entries.keys() == (BROKER_CONFIGS.keys() - UNLISTED) | WITHOUT_EFFECT.keys()
        shown = {name: (entry.value, entry.config_source, entry.read_only) for name, entry in entries.items()}
        default, static = ConfigSource.DEFAULT_CONFIG, ConfigSource.STATIC_BROKER_CONFIG
        assert shown["num.partitions"] == ("4", static, True)
        assert shown["default.replication.factor"] == ("1", default, True)
        assert shown["message.max.bytes"] == ("1048588", default, False)
        assert shown["log.retention.ms"] == (None, default, False)
        assert shown["log.retention.hours"] == ("168", default, True)
        assert shown["group.initial.rebalance.delay.ms"] == ("3000", default, True)
        assert shown["compression.type"] == ("producer", default, False)
        assert shown["node.id"] == shown["broker.id"] == ("1", static, True)
        assert shown["broker.rack"] == ("r1", static, True)
        assert shown["listeners"] == ("PLAINTEXT://0.0.0.0:9092", static, True)
        assert shown["advertised.listeners"] == ("PLAINTEXT://broker.example:9092", static, True)
        assert all(entry.documentation for entry in result.configs)
        synonyms = entries["num.partitions"].synonyms
        assert [(each.name, each.value, each.source) for each in synonyms] == [
            ("num.partitions", "4", static),
            ("num.partitions", "1", default),
        ]


async def test_setting_without_effect_says_so_and_can_be_altered(database_url: str) -> None:
    async with admin_node(database_url) as node:
        result = await describe(
            node,
            BROKER,
            "1",
            "num.io.threads",
            "num.replica.fetchers",
            "sasl.login.class",
            "delegation.token.secret.key",
            include_synonyms=True,
            include_documentation=True,
        )
        entries = {entry.name: entry for entry in result.configs}
        threads = entries["num.io.threads"]
        assert (threads.value, threads.config_source, threads.read_only) == ("1", ConfigSource.DEFAULT_CONFIG, False)
        assert threads.documentation is not None
        assert threads.documentation.startswith("Has no effect here: ")
        assert threads.config_type == ConfigType.INT
        assert [(each.name, each.value, each.source) for each in threads.synonyms] == [
            ("num.io.threads", "1", ConfigSource.DEFAULT_CONFIG)
        ]
        assert (entries["sasl.login.class"].value, entries["sasl.login.class"].synonyms) == (None, ())
        assert entries["delegation.token.secret.key"].is_sensitive
        timeout = ("5000", ConfigSource.STATIC_BROKER_CONFIG)
        assert await value_of(node, BROKER, "1", "broker.session.timeout.ms") == timeout
        assert (await value_of(node, BROKER, "1", "broker.heartbeat.interval.ms"))[0] == "1000"
        (bare,) = (await describe(node, BROKER, "1", "num.io.threads")).configs
        assert (bare.value, bare.synonyms, bare.documentation) == ("1", (), None)
        response = await alter(node, BROKER, "", (SET, "log.dir", "/tmp"))
        assert response.error_code == ErrorCode.INVALID_REQUEST
        assert "cannot be changed while the gateway runs" in response.error_message
        with structlog.testing.capture_logs() as lines:
            assert (await alter(node, BROKER, "", (SET, "num.io.threads", "4"))).error_code == ErrorCode.NONE
        (said,) = [line for line in lines if line["event"] == "broker config without effect"]
        assert (said["config"], said["reason"][:19]) == ("num.io.threads", "Has no effect here:")
        default = ("4", ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG)
        assert await value_of(node, BROKER, "1", "num.io.threads") == default
        assert await value_of(node, BROKER, "", "num.io.threads") == default
        assert (await alter(node, BROKER, "", (DELETE, "num.io.threads", None))).error_code == ErrorCode.NONE
        assert node.catalog.broker.dynamic == {}


async def test_setting_of_our_own_is_listed_if_set_or_requested(database_url: str) -> None:
    async with admin_node(database_url, broker={"log.initial.task.delay.ms": "100"}) as node:
        listed = {entry.name: entry for entry in (await describe(node, BROKER, "1")).configs}
        assert listed["log.initial.task.delay.ms"].value == "100"
        assert not {"group.handoff.mode", "super.users", "server.max.startup.time.ms"} & listed.keys()
        (entry,) = (await describe(node, BROKER, "1", "group.handoff.mode")).configs
        assert entry.config_source == ConfigSource.DEFAULT_CONFIG


@pytest.mark.parametrize(
    ("broker_id", "name", "value", "message"),
    [
        (
            *("1", "ssl.truststore.password", "hush"),
            "These security configs can be dynamically updated only per-listener using the listener prefix: "
            "Set(ssl.truststore.password)",
        ),
        (
            *("", "listener.name.door.ssl.keystore.location", "/a.pem"),
            "Cannot update these configs at default cluster level, broker id must be specified: "
            "Set(listener.name.door.ssl.keystore.location)",
        ),
        (
            *("", "listener.security.protocol.map", "PLAINTEXT:PLAINTEXT"),
            "Cannot update these configs at default cluster level, broker id must be specified: "
            "Set(listener.security.protocol.map)",
        ),
        (
            *("1", "listener.security.protocol.map", "PLAINTEXT:SSL"),
            "Security protocol cannot be updated for existing listener PLAINTEXT",
        ),
        (
            *("1", "listener.security.protocol.map", "DOOR:SSL"),
            "Listeners 'PLAINTEXT' must be subset of listener map 'DOOR:SSL'",
        ),
        (
            *("2", "listener.security.protocol.map", "PLAINTEXT:PLAINTEXT"),
            "listener.security.protocol.map of broker 2 is altered by that broker alone",
        ),
        (
            *("1", "listener.name.door.ssl.keystore.type", "JKS"),
            "Invalid value JKS for configuration listener.name.door.ssl.keystore.type: String must be one of: PEM",
        ),
        (
            *("1", "listener.name.door.ssl.client.auth", "required"),
            "Invalid value required for configuration listener.name.door.ssl.client.auth: "
            "cannot be changed while the gateway runs",
        ),
    ],
)
async def test_setting_that_one_node_alone_may_have_is_refused_for_all(
    database_url: str, broker_id: str, name: str, value: str, message: str
) -> None:
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2"):
        await node.membership.renew()
        response = await alter(node, BROKER, broker_id, (SET, name, value))
        assert (response.error_code, response.error_message) == (ErrorCode.INVALID_REQUEST, message)
        assert node.catalog.broker.own == {}


async def test_listener_settings_change_on_a_running_node(database_url: str) -> None:
    """Settings of a listener that this node does not have are accepted too, as upstream accepts them."""
    password, path = "listener.name.door.ssl.truststore.password", "listener.name.door.ssl.truststore.location"
    own, static = ConfigSource.DYNAMIC_BROKER_CONFIG, ConfigSource.STATIC_BROKER_CONFIG
    async with admin_node(database_url) as node:
        for name, value in ((password, "hush"), (path, "/a.pem"), (MAP, "PLAINTEXT:PLAINTEXT,DOOR:SSL")):
            assert (await alter(node, BROKER, "1", (SET, name, value))).error_code == ErrorCode.NONE
        result = await describe(node, BROKER, "1", password, path, MAP, include_synonyms=True)
        entries = {entry.name: entry for entry in result.configs}
        assert {(entry.read_only, entry.config_source) for entry in entries.values()} == {(False, own)}
        assert (entries[password].value, entries[password].is_sensitive) == (None, True)
        assert entries[path].value == "/a.pem"
        assert [(each.value, each.source) for each in entries[MAP].synonyms] == [
            ("PLAINTEXT:PLAINTEXT,DOOR:SSL", own),
            ("PLAINTEXT:PLAINTEXT", static),
        ]
        for name in (password, path, MAP):
            assert (await alter(node, BROKER, "1", (DELETE, name, ""))).error_code == ErrorCode.NONE
        (entry,) = (await describe(node, BROKER, "1", password, path, MAP)).configs
        assert (entry.name, entry.value, entry.config_source) == (MAP, "PLAINTEXT:PLAINTEXT", static)


async def test_describe_all_brokers_shows_settings_of_all_brokers(database_url: str) -> None:
    async with admin_node(database_url) as node:
        (insync,) = (await describe(node, BROKER, "")).configs
        told = (insync.name, insync.value, insync.config_source)
        assert told == ("min.insync.replicas", "1", ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG)
        await alter(node, BROKER, "", (SET, "message.max.bytes", "2000000"))
        (_, entry) = (await describe(node, BROKER, "")).configs
        assert (entry.name, entry.value) == ("message.max.bytes", "2000000")
        assert entry.config_source == ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG


async def test_setting_of_one_broker_applies_to_it_alone(database_url: str) -> None:
    """The setting is shown as source 2 (DYNAMIC_BROKER_CONFIG), and is deleted under the broker's id. If it is deleted,
    the default for all brokers applies.
    """
    name = "message.max.bytes"
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2") as other:
        await node.membership.renew()
        assert (await alter(node, BROKER, "1", (SET, name, "2000000"))).error_code == ErrorCode.NONE
        assert (await alter(node, BROKER, "", (SET, name, "3000000"))).error_code == ErrorCode.NONE
        assert await value_of(node, BROKER, "1", name) == ("2000000", ConfigSource.DYNAMIC_BROKER_CONFIG)
        assert await value_of(node, BROKER, "", name) == ("3000000", ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG)
        assert node.catalog.broker.message_max_bytes == 2_000_000
        assert await value_of(other, BROKER, "2", name) == ("3000000", ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG)
        assert other.catalog.broker.message_max_bytes == 3_000_000
        # A node accepts changes of another node's settings.
        assert (await alter(other, BROKER, "1", (SET, name, "4000000"))).error_code == ErrorCode.NONE
        assert other.catalog.broker.message_max_bytes == 3_000_000
        await node.catalog.refresh_if_changed()
        assert node.catalog.broker.message_max_bytes == 4_000_000
        assert (await alter(node, BROKER, "1", (DELETE, name, ""))).error_code == ErrorCode.NONE
        assert await value_of(node, BROKER, "1", name) == ("3000000", ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG)
        assert node.catalog.broker.message_max_bytes == 3_000_000


async def test_append_to_a_list_of_all_brokers_extends_the_cluster_value(database_url: str) -> None:
    name = "log.cleanup.policy"
    async with admin_node(database_url) as node:
        assert (await alter(node, BROKER, "1", (SET, name, ""))).error_code == ErrorCode.NONE
        assert (await alter(node, BROKER, "", (APPEND, name, "compact"))).error_code == ErrorCode.NONE
        assert (await value_of(node, BROKER, "", name))[0] == "delete,compact"
        assert (await alter(node, BROKER, "1", (APPEND, name, "compact"))).error_code == ErrorCode.NONE
        assert (await value_of(node, BROKER, "1", name))[0] == "compact"


async def test_unknown_broker_setting_is_stored_and_its_value_hidden(database_url: str) -> None:
    async with admin_node(database_url) as node:
        with structlog.testing.capture_logs() as logged:
            assert (await alter(node, BROKER, "1", (SET, "plugin.password", "secret"))).error_code == ErrorCode.NONE
        assert "plugin.password" in str(logged)
        assert "secret" not in str(logged)
        (entry,) = (await describe(node, BROKER, "1", "plugin.password")).configs
        assert (entry.value, entry.is_sensitive) == (None, True)
        assert entry.config_source == ConfigSource.DYNAMIC_BROKER_CONFIG
        assert (await alter(node, BROKER, "1", (DELETE, "plugin.password", None))).error_code == ErrorCode.NONE
        assert (await describe(node, BROKER, "1", "plugin.password")).configs == ()


async def test_broker_setting_with_a_long_name_is_refused(database_url: str) -> None:
    long = "".join(random.Random(1).choices(string.ascii_letters, k=30_000))
    async with admin_node(database_url) as node:
        for name in (long, f"listener.name.{long}.ssl.keystore.type"):
            refused = await alter(node, BROKER, "1", (SET, name, "PEM"))
            assert refused.error_code == ErrorCode.INVALID_REQUEST
            assert refused.error_message.endswith("the name has more than 1024 bytes")


async def test_internal_topic_setting_is_accepted_and_shown_if_set(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("set", configs={"internal.segment.bytes": "1000"})
        await node.create("unset")
        assert await value_of(node, TOPIC, "set", "internal.segment.bytes") == ("1000", ConfigSource.TOPIC_CONFIG)
        assert "internal.segment.bytes" not in {entry.name for entry in (await describe(node, TOPIC, "unset")).configs}


# --- altering a topic -----------------------------------------------------------------------------------------------


async def test_incremental_operations(database_url: str) -> None:
    async with admin_node(database_url) as node:
        before = await node.create("orders", configs={"segment.ms": "500"}, factor=3)
        for version in (0, 1):
            response = await alter(
                node,
                TOPIC,
                "orders",
                (SET, "retention.ms", f"100{version}"),
                (DELETE, "segment.ms", None),
                (APPEND, "cleanup.policy", "compact"),
                version=version,
            )
            assert (response.error_code, response.error_message) == (ErrorCode.NONE, None)
            topic = node.catalog.get("orders")
            assert topic is not None
            assert topic.configs == {
                "retention.ms": f"100{version}",
                "cleanup.policy": "delete,compact",
                REPLICATION_FACTOR: "3",
            }
            assert topic.partitions == before.partitions
            config = node.catalog.config(topic)
            assert config.retention_ms == 1000 + version, "must be in effect at once"
            assert config.cleanup_compact
            assert await node.topics.find("orders") == topic
        await alter(node, TOPIC, "orders", (SUBTRACT, "cleanup.policy", "delete,nothing"))
        assert await value_of(node, TOPIC, "orders", "cleanup.policy") == ("compact", ConfigSource.TOPIC_CONFIG)
        await alter(node, TOPIC, "orders", (DELETE, "cleanup.policy", None), (DELETE, "never.was", None))
        assert await value_of(node, TOPIC, "orders", "cleanup.policy") == ("delete", ConfigSource.DEFAULT_CONFIG)


@pytest.mark.parametrize("operation", [APPEND, SUBTRACT])
async def test_long_lists_are_changed_in_time(database_url: str, operation: Operation) -> None:
    """The event loop waits until the entries are compared."""
    throttled = "leader.replication.throttled.replicas"
    async with admin_node(database_url) as node:
        await node.create("orders", configs={throttled: ",".join(["0:1"] * 8_000)})
        others = ",".join(["1:1"] * 8_000)
        started_s = time.process_time()
        assert (await alter(node, TOPIC, "orders", (operation, throttled, others))).error_code == ErrorCode.NONE
        assert time.process_time() - started_s < 0.5


async def test_list_that_no_answer_can_show_is_refused(database_url: str) -> None:
    """Each APPEND adds to the list. Clients cannot read a string of more than 32,767 bytes."""
    throttled = "leader.replication.throttled.replicas"
    async with admin_node(database_url) as node:
        await node.create("orders", configs={throttled: ",".join(f"{part:05}:1" for part in range(4_000))})
        more = (APPEND, throttled, ",".join(f"{part:05}:2" for part in range(4_000)))
        refused = await alter(node, TOPIC, "orders", more)
        assert refused.error_code == ErrorCode.INVALID_CONFIG
        assert "may have 32767 bytes" in refused.error_message
        assert (await describe(node, TOPIC, "orders", throttled, version=3)).configs


@pytest.mark.parametrize(("kind", "name"), [(TOPIC, "orders"), (BROKER, "")])
async def test_concurrent_changes_do_not_undo_each_other(database_url: str, kind: int, name: str) -> None:
    kept, dropped = {TOPIC: ("segment.ms", "retention.ms"), BROKER: ("log.roll.ms", "log.retention.ms")}[
        ResourceType(kind)
    ]
    async with admin_node(database_url) as node:
        await node.create("orders")
        await alter(node, kind, name, (SET, dropped, "7"))
        async with locked_catalog(database_url) as watcher:
            deleting = asyncio.create_task(alter(node, kind, name, (DELETE, dropped, None)))
            await until_blocked(watcher, 1)
            setting = asyncio.create_task(alter(node, kind, name, (SET, kept, "500")))
            await until_blocked(watcher, 2)
        await asyncio.gather(deleting, setting)
        stored = await node.topics.load_broker_configs()
        if kind == TOPIC:
            topic = await node.topics.find("orders")
            assert topic is not None
            stored = dict(topic.configs)
        assert stored == {kept: "500"}
        assert node.catalog.broker.dynamic == ({} if kind == TOPIC else stored), "the node obeys what is stored"


async def test_legacy_alter_configs_resets_unnamed_settings(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("orders", configs={"segment.ms": "500", "retention.ms": "1"}, factor=3)
        for version in (0, 1, 2):
            response = await replace(node, TOPIC, "orders", [("retention.ms", f"{version}")], version=version)
            assert (response.error_code, response.error_message) == (ErrorCode.NONE, None)
            topic = node.catalog.get("orders")
            assert topic is not None
            assert topic.configs == {"retention.ms": f"{version}", REPLICATION_FACTOR: "3"}
            assert await node.topics.find("orders") == topic


async def test_validate_only_changes_nothing(database_url: str) -> None:
    async with admin_node(database_url) as node:
        topic = await node.create("orders", configs={"segment.ms": "500"})
        for response in (
            await replace(node, TOPIC, "orders", [("retention.ms", "1")], validate_only=True),
            await alter(node, TOPIC, "orders", (SET, "retention.ms", "1"), validate_only=True),
            await alter(node, BROKER, "", (SET, "message.max.bytes", "1"), validate_only=True),
        ):
            assert response.error_code == ErrorCode.NONE
        bad = await alter(node, TOPIC, "orders", (SET, "retention.ms", "x"), validate_only=True)
        assert bad.error_code == ErrorCode.INVALID_CONFIG
        assert await node.topics.find("orders") == topic
        assert await node.topics.load_broker_configs() == {}
        assert node.catalog.broker.message_max_bytes == 1048588


async def test_topic_refusals_change_nothing(database_url: str) -> None:
    async with admin_node(database_url) as node:
        topic = await node.create("orders", configs={"max.compaction.lag.ms": "10"})
        config, request = ErrorCode.INVALID_CONFIG, ErrorCode.INVALID_REQUEST
        for changes, code in (
            ([(SET, "no.such", "1")], config),
            ([(SET, "retention.ms", "x")], config),
            ([(SET, "retention.ms", "-2")], config),
            ([(SET, "cleanup.policy", "shred")], config),
            ([(SET, "compression.type", "brotli")], config),
            ([(SET, "remote.storage.enable", "true")], config),
            ([(SET, REPLICATION_FACTOR, "1")], config),
            ([(SET, "min.compaction.lag.ms", "11")], config),
            ([(APPEND, "retention.ms", "1")], config),
            ([(APPEND, "no.such", "1")], config),
            ([(SET, "retention.ms", None)], request),
            ([(APPEND, "cleanup.policy", None)], request),
            ([(7, "retention.ms", "1")], request),
            ([(SET, "retention.ms", "1"), (SET, "retention.ms", "2")], request),
            ([(SET, "retention.ms", "1"), (SET, "segment.ms", "x")], config),
        ):
            response = await alter(node, TOPIC, "orders", *changes)
            assert response.error_code == code, changes
            assert response.error_message
        for configs, code in (
            ([("retention.ms", "x")], config),
            ([("retention.ms", None)], request),
            ([("retention.ms", "1"), ("retention.ms", "1")], request),
        ):
            assert (await replace(node, TOPIC, "orders", configs)).error_code == code
        assert await node.topics.find("orders") == topic == node.catalog.get("orders")


async def test_groups_have_settings_within_the_brokers_bounds(database_url: str) -> None:
    session, interval = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
    async with admin_node(database_url) as node:

        async def shown() -> dict[str, tuple[str | None, int]]:
            described = await describe(node, GROUP, "g")
            return {
                entry.name: (entry.value, entry.config_source) for entry in described.configs if entry.name in names
            }

        default, names = ConfigSource.DEFAULT_CONFIG, (session, interval)
        assert await shown() == {session: ("45000", default), interval: ("5000", default)}
        for changes in (
            [(SET, interval, "4999")],
            [(SET, interval, "15001")],
            [(SET, session, "44999")],
            [(SET, session, "x")],
            [(SET, session, "50000"), (SET, "shared.session.timeout.ms", "45000")],
            [(APPEND, session, "1")],
        ):
            response = await alter(node, GROUP, "g", *changes)
            assert response.error_code == ErrorCode.INVALID_CONFIG, changes
            assert response.error_message
        assert node.catalog.group_configs == {}
        assert (await alter(node, GROUP, "g", (SET, session, "50000"))).error_code == ErrorCode.NONE
        assert (await alter(node, GROUP, "g", (SET, interval, "6000"))).error_code == ErrorCode.NONE
        own = ConfigSource.GROUP_CONFIG
        assert await shown() == {session: ("50000", own), interval: ("6000", own)}
        assert node.catalog.group_configs == {"g": {session: "50000", interval: "6000"}}
        request = ListConfigResourcesRequest(resource_types=(GROUP,))
        listed = await node.ask(ApiKey.LIST_CONFIG_RESOURCES, request, 1)
        assert [(each.resource_type, each.resource_name) for each in listed.config_resources] == [(GROUP, "g")]
        assert (await alter(node, GROUP, "g", (DELETE, session, None))).error_code == ErrorCode.NONE
        assert await shown() == {session: ("45000", default), interval: ("6000", own)}
        assert (await replace(node, GROUP, "g", [])).error_code == ErrorCode.NONE
        assert node.catalog.group_configs == {}


async def test_size_of_a_groups_settings_is_bounded(database_url: str) -> None:
    name, longest = "errors.deadletterqueue.topic.name", "x" * 249
    async with admin_node(database_url) as node:
        assert (await alter(node, GROUP, "g", (SET, name, longest))).error_code == ErrorCode.NONE
        assert (await alter(node, GROUP, "g", (SET, name, "x" * 32_000))).error_code == ErrorCode.POLICY_VIOLATION
        assert node.catalog.group_configs == {"g": {name: longest}}
        session, interval = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
        nuls = "\0" * 1_024
        assert (await alter(node, GROUP, nuls, (SET, session, "50000"))).error_code == ErrorCode.NONE
        second = await alter(node, GROUP, nuls, (SET, interval, "6000"))
        assert second.error_code == ErrorCode.POLICY_VIOLATION
        assert (await alter(node, GROUP, nuls, (DELETE, session, None))).error_code == ErrorCode.NONE


async def test_size_of_a_brokers_settings_is_bounded(database_url: str) -> None:
    async with admin_node(database_url) as node:
        many = [(SET, f"plugin.{number}", "x" * 32_000) for number in range(32)]
        assert (await alter(node, BROKER, "", *many)).error_code == ErrorCode.NONE
        more = await alter(node, BROKER, "", (SET, "plugin.one.more", "x" * 32_000))
        assert more.error_code == ErrorCode.POLICY_VIOLATION
        assert (await alter(node, BROKER, "1", (SET, "plugin.one.more", "x"))).error_code == ErrorCode.NONE
        assert (await alter(node, BROKER, "", (DELETE, "plugin.1", None))).error_code == ErrorCode.NONE


async def test_group_setting_shows_the_effective_value_alone(database_url: str) -> None:
    """Kafka does the same: the broker's value is shown as a default, and values of wider scope are not listed as
    synonyms.
    """
    session, interval = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
    async with admin_node(database_url, broker={"group.consumer.heartbeat.interval.ms": "7000"}) as node:
        assert (await alter(node, GROUP, "g", (SET, session, "50000"))).error_code == ErrorCode.NONE
        asked = DescribeConfigsResource(resource_type=GROUP, resource_name="g", configuration_keys=(session, interval))
        request = DescribeConfigsRequest(resources=(asked,), include_synonyms=True)
        answer = await node.ask(ApiKey.DESCRIBE_CONFIGS, request, 4)
        assert {
            entry.name: (entry.value, [(each.name, each.value, each.source) for each in entry.synonyms])
            for entry in answer.results[0].configs
        } == {
            session: ("50000", [(session, "50000", ConfigSource.GROUP_CONFIG)]),
            interval: ("7000", [(interval, "7000", ConfigSource.DEFAULT_CONFIG)]),
        }


async def test_streams_groups_have_settings_of_their_own(database_url: str) -> None:
    session, interval = "streams.session.timeout.ms", "streams.heartbeat.interval.ms"
    replicas, delay = "streams.num.standby.replicas", "streams.initial.rebalance.delay.ms"
    async with admin_node(database_url) as node:
        described = await describe(node, GROUP, "g", include_synonyms=True)
        shown = {
            entry.name: [(each.source, each.name, each.value) for each in entry.synonyms] for entry in described.configs
        }
        for name, value in ((session, "45000"), (interval, "5000"), (replicas, "0"), (delay, "3000")):
            assert shown[name] == [(ConfigSource.DEFAULT_CONFIG, name, value)]
        for change in (
            (SET, session, "44999"),
            (SET, interval, "15001"),
            (SET, replicas, "3"),
            (SET, replicas, "-1"),
            (SET, delay, "-1"),
        ):
            assert (await alter(node, GROUP, "g", change)).error_code == ErrorCode.INVALID_CONFIG, change
        changes = [(SET, session, "50000"), (SET, interval, "6000"), (SET, replicas, "2"), (SET, delay, "0")]
        assert (await alter(node, GROUP, "g", *changes)).error_code == ErrorCode.NONE
        settings = group_settings(node.catalog.broker, node.catalog.group_configs)
        assert settings.streams_of == {
            "g": StreamsSettings(
                session_timeout_ms=50_000,
                heartbeat_interval_ms=6_000,
                num_standby_replicas=2,
                initial_rebalance_delay_ms=0,
            )
        }
        assert settings.streams == StreamsSettings()
        assert settings.consumer_of["g"] == settings.consumer


async def test_group_may_set_its_handoff_mode(database_url: str) -> None:
    mode, timeout = "group.handoff.mode", "group.handoff.timeout.ms"
    async with admin_node(database_url) as node:
        described = await describe(node, GROUP, "g")
        assert {(entry.name, entry.value) for entry in described.configs} >= {(mode, "ack"), (timeout, "30000")}
        for change in ((SET, mode, "never"), (SET, timeout, "0"), (SET, timeout, "x"), (SET, timeout, "3600001")):
            assert (await alter(node, GROUP, "g", change)).error_code == ErrorCode.INVALID_CONFIG, change
        assert (await alter(node, GROUP, "g", (SET, mode, "drain"), (SET, timeout, "500"))).error_code == ErrorCode.NONE
        settings = group_settings(node.catalog.broker, node.catalog.group_configs)
        assert settings.handoff_of("g") == HandoffSettings(HandoffMode.DRAIN, 500)
        assert settings.consumer_of["g"].handoff == HandoffSettings(HandoffMode.DRAIN, 500)
        assert settings.handoff_of("another") == HandoffSettings()
        assert settings.drains


async def test_each_resource_succeeds_or_fails_alone(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await node.create("good")
        await node.create("twice")

        def setting(kind: int, name: str, value: str = "1") -> incremental.AlterConfigsResource:
            entry = incremental.AlterableConfig(name="retention.ms", config_operation=SET, value=value)
            return incremental.AlterConfigsResource(resource_type=kind, resource_name=name, configs=(entry,))

        request = incremental.IncrementalAlterConfigsRequest(
            resources=(
                setting(TOPIC, "missing"),
                setting(TOPIC, "twice"),
                setting(TOPIC, "good"),
                setting(TOPIC, "twice"),
                setting(GROUP, "g"),
                setting(ResourceType.CLIENT_METRICS, "m"),
                setting(0, "x"),
            )
        )
        answer = await node.ask(ApiKey.INCREMENTAL_ALTER_CONFIGS, request, 1)
        assert {response.resource_name: response.error_code for response in answer.responses} == {
            "missing": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            "twice": ErrorCode.INVALID_REQUEST,
            "good": ErrorCode.NONE,
            "g": ErrorCode.INVALID_CONFIG,
            "m": ErrorCode.INVALID_REQUEST,
            "x": ErrorCode.INVALID_REQUEST,
        }
        twice = node.catalog.get("twice")
        assert twice is not None
        assert twice.configs == {}


@pytest.mark.parametrize("validate_only", [False, True])
async def test_settings_are_validated_before_their_topic_is_looked_up(database_url: str, validate_only: bool) -> None:
    async with admin_node(database_url) as node:
        for name, value, code in (
            ("no.such.key", "1", ErrorCode.INVALID_CONFIG),
            ("retention.ms", "soon", ErrorCode.INVALID_CONFIG),
            ("retention.ms", "1", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ):
            changed = incremental.AlterConfigsResource(
                resource_type=TOPIC,
                resource_name="missing",
                configs=(incremental.AlterableConfig(name=name, config_operation=Operation.SET, value=value),),
            )
            replaced = legacy.AlterConfigsResource(
                resource_type=TOPIC,
                resource_name="missing",
                configs=(legacy.AlterableConfig(name=name, value=value),),
            )
            for api_key, version, request in (
                (
                    ApiKey.INCREMENTAL_ALTER_CONFIGS,
                    1,
                    incremental.IncrementalAlterConfigsRequest(resources=(changed,), validate_only=validate_only),
                ),
                (
                    ApiKey.ALTER_CONFIGS,
                    2,
                    legacy.AlterConfigsRequest(resources=(replaced,), validate_only=validate_only),
                ),
            ):
                (answer,) = (await node.ask(api_key, request, version)).responses
                assert answer.error_code == code, (api_key, name, value)


# --- altering brokers -----------------------------------------------------------------------------------------------


async def test_broker_settings_take_effect_at_once_on_all_nodes(database_url: str) -> None:
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2") as other:
        topic = await node.create("orders")
        own = await node.create("own", configs={"max.message.bytes": "77"})
        response = await alter(
            node, BROKER, "", (SET, "message.max.bytes", "2000"), (SET, "log.cleanup.policy", "compact")
        )
        assert (response.error_code, response.error_message) == (ErrorCode.NONE, None)
        assert node.catalog.config(topic).max_message_bytes == 2000
        assert node.catalog.config(topic).cleanup_compact
        assert node.catalog.config(own).max_message_bytes == 77
        source = ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG
        assert await value_of(node, TOPIC, "orders", "max.message.bytes") == ("2000", source)
        assert await value_of(node, BROKER, "1", "message.max.bytes") == ("2000", source)
        assert await value_of(other, BROKER, "2", "message.max.bytes") == ("2000", source)
        # The second node extends and deletes values that the first node has set.
        await alter(other, BROKER, "", (SET, "log.retention.ms", "5"), (DELETE, "message.max.bytes", None))
        assert await node.topics.load_broker_configs() == {"log.cleanup.policy": "compact", "log.retention.ms": "5"}
        response = await replace(node, BROKER, "", [("log.retention.bytes", "9")])
        assert response.error_code == ErrorCode.NONE
        assert await node.topics.load_broker_configs() == {"log.retention.bytes": "9"}
        assert node.catalog.config(topic).retention_bytes == 9
        assert not node.catalog.config(topic).cleanup_compact


async def test_broker_refusals_change_nothing(database_url: str) -> None:
    """Kafka does the same: an invalid setting of a broker is INVALID_REQUEST, of other resources INVALID_CONFIG
    (KAFKA-13609).
    """
    async with admin_node(database_url) as node:
        for name, changes in (
            ("", [(SET, "num.partitions", "3")]),
            ("1", [(SET, "num.partitions", "3")]),
            ("", [(SET, "advertised.listeners", "PLAINTEXT://x:1")]),
            ("", [(SET, "compression.type", "brotli")]),
            ("1", [(SET, "message.max.bytes", "many")]),
            ("", [(SET, "message.max.bytes", "1"), (SET, "num.partitions", "3")]),
            ("one", [(SET, "message.max.bytes", "1")]),
            ("2", [(SET, "message.max.bytes", "1")]),
        ):
            response = await alter(node, BROKER, name, *changes)
            assert response.error_code == ErrorCode.INVALID_REQUEST, changes
            assert response.error_message
        assert await node.topics.load_broker_configs() == {}
        assert node.catalog.broker.dynamic == {}


# --- ListConfigResources --------------------------------------------------------------------------------------------


async def test_list_config_resources(database_url: str) -> None:
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2"):
        await node.membership.renew()
        await node.topics.create([plan_internal("__consumer_offsets", node.catalog.broker)])
        await node.create("orders")

        async def listed(*kinds: int, version: int = 1) -> set[tuple[str, int]]:
            request = ListConfigResourcesRequest(resource_types=kinds)
            answer = await node.ask(ApiKey.LIST_CONFIG_RESOURCES, request, version)
            assert answer.error_code == ErrorCode.NONE
            return {(each.resource_name, each.resource_type) for each in answer.config_resources}

        topics = {("orders", TOPIC), ("__consumer_offsets", TOPIC)}
        brokers = {("1", BROKER), ("2", BROKER)}
        loggers = {(name, ResourceType.BROKER_LOGGER) for name, _ in brokers}
        assert await listed() == topics | brokers | loggers
        assert await listed(TOPIC) == topics
        assert await listed(BROKER) == brokers
        assert await listed(ResourceType.BROKER_LOGGER) == loggers
        assert await listed(GROUP, ResourceType.CLIENT_METRICS) == set()
        assert await listed(version=0) == set()
        with pytest.raises(KafkaError) as refused:
            await listed(TOPIC, 3)
        assert refused.value.code is ErrorCode.UNSUPPORTED_VERSION


async def test_setting_of_another_release_is_hidden_and_deletable(database_url: str) -> None:
    """A stored setting that this release refuses stops neither a node, nor the settings stored beside it, nor changes
    of other settings."""
    refused = "delegation.token.max.lifetime.ms"
    stored = {refused: "soon", "log.retention.ms": "7"}
    async with admin_node(database_url) as node:
        await node.topics.set_broker_configs(stored, (), broker="")
    async with admin_node(database_url) as node:
        await node.catalog.refresh_if_changed()
        assert node.catalog.broker.dynamic == {"log.retention.ms": "7"}
        assert (await alter(node, BROKER, "", (SET, "message.max.bytes", "2000000"))).error_code == ErrorCode.NONE
        assert (await alter(node, BROKER, "", (SET, refused, "later"))).error_code == ErrorCode.INVALID_REQUEST
        assert (await alter(node, BROKER, "", (DELETE, refused, ""))).error_code == ErrorCode.NONE
        assert await node.topics.load_broker_configs() == {"log.retention.ms": "7", "message.max.bytes": "2000000"}
