"""What is served: one line per API with its promised versions and its handler.

The one idea: this table is the only place that says so. ApiVersions, dispatch, request metrics, `sluice apis` and the
README's table are derived from it; the versions are Kafka 4.2's.
"""

from gateway.apis.api_versions import api_versions
from gateway.apis.classic_groups import heartbeat, join_group, leave_group, sync_group
from gateway.apis.delete_records import delete_records
from gateway.apis.fetch import fetch
from gateway.apis.find_coordinator import find_coordinator
from gateway.apis.group_admin import delete_groups, describe_groups, list_groups
from gateway.apis.init_producer_id import init_producer_id
from gateway.apis.list_offsets import list_offsets
from gateway.apis.offset_for_leader_epoch import offset_for_leader_epoch
from gateway.apis.offsets import offset_commit, offset_delete, offset_fetch
from gateway.apis.produce import produce
from gateway.connection import Hold
from gateway.dispatch import Served
from protocol.api_keys import ApiKey

SERVED: tuple[Served, ...] = (
    # librdkafka tests whether Produce v0 is inside the range before it uses compression (KAFKA-18659).
    Served(ApiKey.PRODUCE, 3, 13, produce, advertised_min=0),
    Served(ApiKey.FETCH, 4, 18, fetch, Hold.BULKY),
    Served(ApiKey.LIST_OFFSETS, 1, 11, list_offsets),
    Served(ApiKey.OFFSET_COMMIT, 2, 10, offset_commit),
    Served(ApiKey.OFFSET_FETCH, 1, 10, offset_fetch),
    Served(ApiKey.FIND_COORDINATOR, 0, 6, find_coordinator),
    Served(ApiKey.JOIN_GROUP, 0, 9, join_group, Hold.PARKED),
    Served(ApiKey.HEARTBEAT, 0, 4, heartbeat),
    Served(ApiKey.LEAVE_GROUP, 0, 5, leave_group),
    Served(ApiKey.SYNC_GROUP, 0, 5, sync_group, Hold.PARKED),
    Served(ApiKey.DESCRIBE_GROUPS, 0, 6, describe_groups),
    Served(ApiKey.LIST_GROUPS, 0, 5, list_groups),
    Served(ApiKey.API_VERSIONS, 0, 4, api_versions),
    Served(ApiKey.DELETE_RECORDS, 0, 2, delete_records),
    Served(ApiKey.INIT_PRODUCER_ID, 0, 5, init_producer_id),
    Served(ApiKey.OFFSET_FOR_LEADER_EPOCH, 2, 4, offset_for_leader_epoch),
    Served(ApiKey.DELETE_GROUPS, 0, 2, delete_groups),
    Served(ApiKey.OFFSET_DELETE, 0, 0, offset_delete),
)
