"""What is served: one line per API with its promised versions and its handler.

The one idea: this table is the only place that says so. ApiVersions, dispatch, request metrics, `sluice apis` and the
README's table are derived from it; the versions are Kafka 4.2's.
"""

from gateway.apis.api_versions import api_versions
from gateway.apis.classic_groups import heartbeat, join_group, leave_group, sync_group
from gateway.apis.configs import alter_configs, describe_configs, incremental_alter_configs, list_config_resources
from gateway.apis.consumer_groups import consumer_group_describe, consumer_group_heartbeat
from gateway.apis.delete_records import delete_records
from gateway.apis.fetch import fetch
from gateway.apis.find_coordinator import find_coordinator
from gateway.apis.group_admin import delete_groups, describe_groups, list_groups
from gateway.apis.init_producer_id import init_producer_id
from gateway.apis.list_offsets import list_offsets
from gateway.apis.log_dirs import describe_log_dirs
from gateway.apis.metadata import describe_cluster, describe_topic_partitions, metadata
from gateway.apis.offset_for_leader_epoch import offset_for_leader_epoch
from gateway.apis.offsets import offset_commit, offset_delete, offset_fetch
from gateway.apis.produce import produce
from gateway.apis.topics import create_partitions, create_topics, delete_topics
from gateway.net.connection import Hold
from gateway.net.dispatch import Served
from protocol.api_keys import ApiKey

SERVED: tuple[Served, ...] = (
    # librdkafka tests whether Produce v0 is inside the range before it uses compression (KAFKA-18659).
    Served(ApiKey.PRODUCE, 3, 13, produce, Hold.PIPELINED, advertised_min=0),
    Served(ApiKey.FETCH, 4, 18, fetch, Hold.BULKY),
    Served(ApiKey.LIST_OFFSETS, 1, 11, list_offsets),
    Served(ApiKey.METADATA, 0, 13, metadata, Hold.BULKY),
    Served(ApiKey.OFFSET_COMMIT, 2, 10, offset_commit),
    Served(ApiKey.OFFSET_FETCH, 1, 10, offset_fetch, Hold.BULKY),
    Served(ApiKey.FIND_COORDINATOR, 0, 6, find_coordinator),
    Served(ApiKey.JOIN_GROUP, 0, 9, join_group, Hold.PARKED),
    Served(ApiKey.HEARTBEAT, 0, 4, heartbeat, Hold.PIPELINED),
    Served(ApiKey.LEAVE_GROUP, 0, 5, leave_group),
    Served(ApiKey.SYNC_GROUP, 0, 5, sync_group, Hold.PARKED),
    Served(ApiKey.DESCRIBE_GROUPS, 0, 6, describe_groups, Hold.BULKY),
    Served(ApiKey.LIST_GROUPS, 0, 5, list_groups, Hold.BULKY),
    Served(ApiKey.API_VERSIONS, 0, 4, api_versions),
    Served(ApiKey.CREATE_TOPICS, 2, 7, create_topics),
    Served(ApiKey.DELETE_TOPICS, 1, 6, delete_topics),
    Served(ApiKey.DELETE_RECORDS, 0, 2, delete_records),
    Served(ApiKey.INIT_PRODUCER_ID, 0, 5, init_producer_id),
    Served(ApiKey.OFFSET_FOR_LEADER_EPOCH, 2, 4, offset_for_leader_epoch),
    Served(ApiKey.DESCRIBE_CONFIGS, 1, 4, describe_configs, Hold.BULKY),
    Served(ApiKey.ALTER_CONFIGS, 0, 2, alter_configs),
    Served(ApiKey.DESCRIBE_LOG_DIRS, 1, 4, describe_log_dirs, Hold.BULKY),
    Served(ApiKey.CREATE_PARTITIONS, 0, 3, create_partitions),
    Served(ApiKey.DELETE_GROUPS, 0, 2, delete_groups),
    Served(ApiKey.INCREMENTAL_ALTER_CONFIGS, 0, 1, incremental_alter_configs),
    Served(ApiKey.OFFSET_DELETE, 0, 0, offset_delete),
    Served(ApiKey.DESCRIBE_CLUSTER, 0, 2, describe_cluster),
    Served(ApiKey.CONSUMER_GROUP_HEARTBEAT, 0, 1, consumer_group_heartbeat),
    Served(ApiKey.CONSUMER_GROUP_DESCRIBE, 0, 1, consumer_group_describe, Hold.BULKY),
    Served(ApiKey.LIST_CONFIG_RESOURCES, 0, 1, list_config_resources),
    Served(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, 0, describe_topic_partitions, Hold.BULKY),
)
