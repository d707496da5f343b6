"""What is served: one line per API with its promised versions and its handler.

The one idea: this table is the only place that says so. ApiVersions, dispatch, request metrics, `sluice apis` and the
README's table are derived from it; the versions are Kafka 4.2's.
"""

from gateway.apis import (
    acls,
    api_versions,
    brokers,
    classic_groups,
    client_quotas,
    configs,
    consumer_groups,
    delete_records,
    features,
    fetch,
    find_coordinator,
    group_admin,
    init_producer_id,
    list_offsets,
    log_dirs,
    metadata,
    offset_commit,
    offset_delete,
    offset_fetch,
    offset_for_leader_epoch,
    produce,
    replicas,
    sasl,
    scram_credentials,
    share_fetch,
    share_group_offsets,
    share_groups,
    streams_groups,
    topics,
    transaction_admin,
    transactions,
    txn_offset_commit,
)
from gateway.net.dispatch import Served
from gateway.net.requests import Order
from protocol.api_keys import ApiKey

MAX_ADMIN_ELEMENTS = 20_000
"""Elements of a request that changes topics, settings or groups. Upstream takes what makes 10,000 records, of which
each is an element or two here."""

MAX_CREDENTIALS = 10_000
"""That one request sets or deletes, each a record of upstream's."""

MAX_LEAVING_MEMBERS = 5_000
"""Members that leave by one request: the coordinator takes them in one step, which nobody interrupts."""

MAX_STREAMS_ELEMENTS = 25_000
"""What one streams heartbeat says: a member may own all tasks that a group may have (`MAX_TASKS`). Of a topology fewer
are taken (`streams_groups.MAX_TOPOLOGY_ELEMENTS`)."""

MAX_SHARE_TOPICS = 5_000
"""Topics that a member of a share group subscribes to by one heartbeat: the group compares them in one step."""

MAX_JOIN_PROTOCOLS = 2_000
"""Assignors that one member offers; the group weighs them in one step."""

SERVED: tuple[Served, ...] = (
    # librdkafka tests whether Produce v0 is inside the range before it uses compression (KAFKA-18659).
    Served(
        ApiKey.PRODUCE,
        3,
        13,
        produce.produce,
        produce.refuse_produce,
        Order.PLACED,
        advertised_min=0,
        awaits_answer=produce.awaits_answer,
    ),
    Served(ApiKey.FETCH, 4, 18, fetch.fetch, fetch.refuse_fetch, Order.PARKED, bulky=True),
    Served(ApiKey.LIST_OFFSETS, 1, 11, list_offsets.list_offsets, list_offsets.refuse_list_offsets),
    Served(ApiKey.METADATA, 0, 13, metadata.metadata, metadata.refuse_metadata, bulky=True),
    Served(ApiKey.OFFSET_COMMIT, 2, 10, offset_commit.offset_commit, offset_commit.refuse_offset_commit),
    Served(ApiKey.OFFSET_FETCH, 1, 10, offset_fetch.offset_fetch, offset_fetch.refuse_offset_fetch, bulky=True),
    Served(ApiKey.FIND_COORDINATOR, 0, 6, find_coordinator.find_coordinator, find_coordinator.refuse_find_coordinator),
    Served(
        ApiKey.JOIN_GROUP,
        0,
        9,
        classic_groups.join_group,
        classic_groups.refuse_join_group,
        Order.PARKED,
        max_elements=MAX_JOIN_PROTOCOLS,
    ),
    Served(ApiKey.HEARTBEAT, 0, 4, classic_groups.heartbeat, classic_groups.refuse_heartbeat, Order.PIPELINED),
    Served(
        ApiKey.LEAVE_GROUP,
        0,
        5,
        classic_groups.leave_group,
        classic_groups.refuse_leave_group,
        max_elements=MAX_LEAVING_MEMBERS,
    ),
    Served(
        ApiKey.SYNC_GROUP,
        0,
        5,
        classic_groups.sync_group,
        classic_groups.refuse_sync_group,
        Order.PARKED,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(ApiKey.DESCRIBE_GROUPS, 0, 6, group_admin.describe_groups, group_admin.refuse_describe_groups, bulky=True),
    Served(ApiKey.LIST_GROUPS, 0, 5, group_admin.list_groups, group_admin.refuse_list_groups, bulky=True),
    Served(ApiKey.SASL_HANDSHAKE, 0, 1, sasl.sasl_handshake, sasl.refuse_sasl_handshake),
    Served(ApiKey.API_VERSIONS, 0, 4, api_versions.api_versions, api_versions.refuse_api_versions),
    Served(
        ApiKey.CREATE_TOPICS, 2, 7, topics.create_topics, topics.refuse_create_topics, max_elements=MAX_ADMIN_ELEMENTS
    ),
    Served(
        ApiKey.DELETE_TOPICS, 1, 6, topics.delete_topics, topics.refuse_delete_topics, max_elements=MAX_ADMIN_ELEMENTS
    ),
    Served(ApiKey.DELETE_RECORDS, 0, 2, delete_records.delete_records, delete_records.refuse_delete_records),
    Served(ApiKey.INIT_PRODUCER_ID, 0, 5, init_producer_id.init_producer_id, init_producer_id.refuse_init_producer_id),
    Served(
        ApiKey.OFFSET_FOR_LEADER_EPOCH,
        2,
        4,
        offset_for_leader_epoch.offset_for_leader_epoch,
        offset_for_leader_epoch.refuse_offset_for_leader_epoch,
    ),
    Served(
        ApiKey.ADD_PARTITIONS_TO_TXN,
        0,
        5,
        transactions.add_partitions_to_txn,
        transactions.refuse_add_partitions_to_txn,
    ),
    Served(ApiKey.ADD_OFFSETS_TO_TXN, 0, 4, transactions.add_offsets_to_txn, transactions.refuse_add_offsets_to_txn),
    Served(ApiKey.END_TXN, 0, 5, transactions.end_txn, transactions.refuse_end_txn),
    Served(
        ApiKey.WRITE_TXN_MARKERS,
        1,
        2,
        transaction_admin.write_txn_markers,
        transaction_admin.refuse_write_txn_markers,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(
        ApiKey.TXN_OFFSET_COMMIT,
        0,
        5,
        txn_offset_commit.txn_offset_commit,
        txn_offset_commit.refuse_txn_offset_commit,
    ),
    Served(ApiKey.DESCRIBE_ACLS, 1, 3, acls.describe_acls, acls.refuse_describe_acls, bulky=True),
    Served(ApiKey.CREATE_ACLS, 1, 3, acls.create_acls, acls.refuse_create_acls, max_elements=acls.MAX_CHANGES),
    Served(
        ApiKey.DELETE_ACLS,
        1,
        3,
        acls.delete_acls,
        acls.refuse_delete_acls,
        bulky=True,
        max_elements=acls.MAX_CHANGES,
    ),
    Served(ApiKey.DESCRIBE_CONFIGS, 1, 4, configs.describe_configs, configs.refuse_describe_configs, bulky=True),
    Served(
        ApiKey.ALTER_CONFIGS, 0, 2, configs.alter_configs, configs.refuse_alter_configs, max_elements=MAX_ADMIN_ELEMENTS
    ),
    Served(ApiKey.DESCRIBE_LOG_DIRS, 1, 4, log_dirs.describe_log_dirs, log_dirs.refuse_describe_log_dirs, bulky=True),
    Served(ApiKey.SASL_AUTHENTICATE, 0, 2, sasl.sasl_authenticate, sasl.refuse_sasl_authenticate),
    Served(
        ApiKey.CREATE_PARTITIONS,
        0,
        3,
        topics.create_partitions,
        topics.refuse_create_partitions,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(
        ApiKey.DELETE_GROUPS,
        0,
        2,
        group_admin.delete_groups,
        group_admin.refuse_delete_groups,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        0,
        1,
        configs.incremental_alter_configs,
        configs.refuse_incremental_alter_configs,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(
        ApiKey.ELECT_LEADERS,
        0,
        2,
        replicas.elect_leaders,
        replicas.refuse_elect_leaders,
        bulky=True,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(
        ApiKey.ALTER_PARTITION_REASSIGNMENTS,
        0,
        1,
        replicas.alter_partition_reassignments,
        replicas.refuse_alter_partition_reassignments,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(
        ApiKey.LIST_PARTITION_REASSIGNMENTS,
        0,
        0,
        replicas.list_partition_reassignments,
        replicas.refuse_list_partition_reassignments,
    ),
    Served(ApiKey.OFFSET_DELETE, 0, 0, offset_delete.offset_delete, offset_delete.refuse_offset_delete),
    Served(
        ApiKey.DESCRIBE_CLIENT_QUOTAS,
        0,
        1,
        client_quotas.describe_client_quotas,
        client_quotas.refuse_describe_client_quotas,
        bulky=True,
    ),
    Served(
        ApiKey.ALTER_CLIENT_QUOTAS,
        0,
        1,
        client_quotas.alter_client_quotas,
        client_quotas.refuse_alter_client_quotas,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
        0,
        0,
        scram_credentials.describe_user_scram_credentials,
        scram_credentials.refuse_describe_user_scram_credentials,
        bulky=True,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        0,
        0,
        scram_credentials.alter_user_scram_credentials,
        scram_credentials.refuse_alter_user_scram_credentials,
        max_elements=MAX_CREDENTIALS,
    ),
    Served(
        ApiKey.UPDATE_FEATURES,
        0,
        2,
        features.update_features,
        features.refuse_update_features,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(ApiKey.DESCRIBE_CLUSTER, 0, 2, metadata.describe_cluster, metadata.refuse_describe_cluster),
    Served(
        ApiKey.DESCRIBE_PRODUCERS,
        0,
        0,
        transaction_admin.describe_producers,
        transaction_admin.refuse_describe_producers,
        bulky=True,
    ),
    Served(ApiKey.UNREGISTER_BROKER, 0, 0, brokers.unregister_broker, brokers.refuse_unregister_broker),
    Served(
        ApiKey.DESCRIBE_TRANSACTIONS,
        0,
        0,
        transaction_admin.describe_transactions,
        transaction_admin.refuse_describe_transactions,
        bulky=True,
    ),
    Served(
        ApiKey.LIST_TRANSACTIONS,
        0,
        2,
        transaction_admin.list_transactions,
        transaction_admin.refuse_list_transactions,
        bulky=True,
    ),
    Served(
        ApiKey.CONSUMER_GROUP_HEARTBEAT,
        0,
        1,
        consumer_groups.consumer_group_heartbeat,
        consumer_groups.refuse_consumer_group_heartbeat,
    ),
    Served(
        ApiKey.CONSUMER_GROUP_DESCRIBE,
        0,
        1,
        consumer_groups.consumer_group_describe,
        consumer_groups.refuse_consumer_group_describe,
        bulky=True,
    ),
    Served(
        ApiKey.STREAMS_GROUP_HEARTBEAT,
        0,
        0,
        streams_groups.streams_group_heartbeat,
        streams_groups.refuse_streams_group_heartbeat,
        max_elements=MAX_STREAMS_ELEMENTS,
    ),
    Served(
        ApiKey.STREAMS_GROUP_DESCRIBE,
        0,
        0,
        streams_groups.streams_group_describe,
        streams_groups.refuse_streams_group_describe,
        bulky=True,
    ),
    Served(
        ApiKey.SHARE_GROUP_HEARTBEAT,
        1,
        1,
        share_groups.share_group_heartbeat,
        share_groups.refuse_share_group_heartbeat,
        max_elements=MAX_SHARE_TOPICS,
    ),
    Served(
        ApiKey.SHARE_GROUP_DESCRIBE,
        1,
        1,
        share_groups.share_group_describe,
        share_groups.refuse_share_group_describe,
        bulky=True,
    ),
    Served(
        ApiKey.SHARE_FETCH,
        1,
        2,
        share_fetch.share_fetch,
        share_fetch.refuse_share_fetch,
        Order.PARKED,
        bulky=True,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(
        ApiKey.SHARE_ACKNOWLEDGE,
        1,
        2,
        share_fetch.share_acknowledge,
        share_fetch.refuse_share_acknowledge,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(
        ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS,
        0,
        1,
        share_group_offsets.describe_share_group_offsets,
        share_group_offsets.refuse_describe_share_group_offsets,
        bulky=True,
    ),
    Served(
        ApiKey.ALTER_SHARE_GROUP_OFFSETS,
        0,
        0,
        share_group_offsets.alter_share_group_offsets,
        share_group_offsets.refuse_alter_share_group_offsets,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(
        ApiKey.DELETE_SHARE_GROUP_OFFSETS,
        0,
        0,
        share_group_offsets.delete_share_group_offsets,
        share_group_offsets.refuse_delete_share_group_offsets,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(ApiKey.LIST_CONFIG_RESOURCES, 0, 1, configs.list_config_resources, configs.refuse_list_config_resources),
    Served(
        ApiKey.DESCRIBE_TOPIC_PARTITIONS,
        0,
        0,
        metadata.describe_topic_partitions,
        metadata.refuse_describe_topic_partitions,
        bulky=True,
    ),
)
