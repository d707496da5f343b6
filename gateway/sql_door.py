"""Open the SQL door of a node: install the public schema, and make the relay of staged records."""

from __future__ import annotations

from gateway.apis.topics import make_automatic_topic
from gateway.building.services import Services
from gateway.cluster.wakeups import Wakeups
from gateway.config.broker import BrokerConfig, principals
from gateway.log.relay import Relay
from storage.pool import Database
from storage.sql_door import DoorSettings, install


async def open_sql_door(database: Database, services: Services, wakeups: Wakeups) -> Relay:
    """Install the schema that `sql.schema` names and return the relay. Raise StorageError if the schema cannot be
    installed."""
    catalog = services.catalog
    await install(database, catalog.broker.sql_schema, _settings(catalog.broker))
    return Relay(
        database,
        catalog,
        services.tail,
        lambda name: make_automatic_topic(name, services),
        listener=wakeups,
        now_ms=services.clock.now_ms,
    )


def _settings(broker: BrokerConfig) -> DoorSettings:
    return DoorSettings(
        max_message_bytes=broker.message_max_bytes,
        compacts="compact" in broker.log_cleanup_policy,
        auto_create=broker.auto_create_topics_enable,
        authorizer=bool(broker.authorizer_class_name),
        allow_if_no_acl=broker.allow_everyone_if_no_acl_found,
        super_users=sorted(principals(broker.super_users)),
        log_append_time=broker.log_message_timestamp_type == "LogAppendTime",
        timestamp_before_max_ms=broker.log_message_timestamp_before_max_ms,
        timestamp_after_max_ms=broker.log_message_timestamp_after_max_ms,
    )
