"""Open the SQL door of a node: install the public schema, and make the relay of staged records."""

from __future__ import annotations

from dataclasses import asdict

import structlog

from gateway.apis.admin.new_topics import make_automatic_topic
from gateway.building.services import Services
from gateway.cluster.wakeups import Wakeups
from gateway.config.broker import BrokerConfig
from gateway.config.broker_clients import principals
from gateway.log.relay import Relay
from storage.pool import Database
from storage.sql_door import DoorSettings, install

logger = structlog.get_logger(__name__)

NAMES = {
    "max_message_bytes": "message.max.bytes",
    "compacts": "log.cleanup.policy",
    "auto_create": "auto.create.topics.enable",
    "authorizer": "authorizer.class.name",
    "allow_if_no_acl": "allow.everyone.if.no.acl.found",
    "super_users": "super.users",
    "log_append_time": "log.message.timestamp.type",
    "timestamp_before_max_ms": "log.message.timestamp.before.max.ms",
    "timestamp_after_max_ms": "log.message.timestamp.after.max.ms",
}
"""The setting that each field of DoorSettings is made from."""


async def open_sql_door(database: Database, services: Services, wakeups: Wakeups) -> Relay:
    """Install the schema that `sql.schema` names and return the relay. Raise StorageError if the schema cannot be
    installed."""
    catalog = services.catalog
    settings = door_settings(catalog.broker)
    former = await install(database, catalog.broker.sql_schema, settings)
    if former is not None and (changed := changed_settings(former, settings)):
        logger.warning(
            "the SQL functions apply this node's settings from now on, and they differ from the former ones. Give all "
            "nodes the same settings",
            changed=changed,
        )
    return Relay(
        database,
        catalog,
        services.tail,
        lambda name: make_automatic_topic(name, services),
        listener=wakeups,
        now_ms=services.clock.now_ms,
    )


def changed_settings(former: DoorSettings, settings: DoorSettings) -> list[str]:
    """Return the names of the settings that differ."""
    values = asdict(settings)
    return [NAMES[field] for field, value in asdict(former).items() if value != values[field]]


def door_settings(broker: BrokerConfig) -> DoorSettings:
    """Return the settings that the SQL functions apply."""
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
