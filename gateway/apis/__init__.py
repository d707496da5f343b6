"""The table of served APIs: one line per API with its promised versions and its handler.

This table is the only place that says what is served. ApiVersions, dispatch, request metrics, `sluice apis` and the
page docs/apis.md are derived from it. The versions are those of Kafka 4.4. `roles` says which APIs a controller
listener serves: those of Kafka's controllers, except the messages that controllers send to each other.
"""

from typing import Protocol

from gateway.apis import api_versions, metadata, sasl, services
from gateway.apis.admin import (
    acls,
    alter_configs,
    brokers,
    client_quotas,
    config_resources,
    create_partitions,
    create_topics,
    delegation_tokens,
    delete_topics,
    describe_configs,
    features,
    log_dirs,
    quorum,
    replicas,
    scram_credentials,
)
from gateway.apis.coordinator_topics import HasInternalTopics
from gateway.apis.data import delete_records, fetch, list_offsets, offset_for_leader_epoch, produce, share_fetch
from gateway.apis.groups import (
    classic_groups,
    consumer_groups,
    find_coordinator,
    group_admin,
    offset_commit,
    offset_delete,
    offset_fetch,
    share_group_offsets,
    share_groups,
    streams_groups,
)
from gateway.apis.metadata_cache import HasDescribedTopics
from gateway.apis.transactions import init_producer_id, lifecycle, transaction_admin, txn_offset_commit
from gateway.net.context import Role
from gateway.net.dispatch import Served
from gateway.net.requests import Order
from gateway.security.authorizer import HasAuthorizer
from protocol.api_keys import ApiKey

MAX_ADMIN_ELEMENTS = 20_000
"""Elements of a request that changes topics, settings or groups. Upstream accepts a request that makes 10,000 records,
each of which is one element or two here."""

MAX_CREDENTIALS = 10_000
"""Credentials that one request may set or delete. Upstream counts each as one record."""

MAX_LEAVING_MEMBERS = 5_000
"""Maximal number of members that one request may remove. The coordinator removes them in one step without giving
way."""

MAX_STREAMS_ELEMENTS = 25_000
"""Maximal number of elements in one streams heartbeat: a member may own all tasks that a group may have (`MAX_TASKS`).
A topology may have fewer (`streams_groups.MAX_TOPOLOGY_ELEMENTS`)."""

MAX_SHARE_TOPICS = 5_000
"""Maximal number of topics that a share group's member may name in one heartbeat. The group compares them in one
step."""

MAX_SHARED_COMMIT_BYTES = 64 * 1024
"""A larger OffsetCommit is processed alone, because it takes several times its size in memory when decoded."""

MAX_JOIN_PROTOCOLS = 2_000
"""Maximal number of assignors that one member may offer. The group weighs them in one step."""


class HandlerServices(
    services.HasAppender,
    HasAuthorizer,
    services.HasBrokerConfigs,
    services.HasCatalog,
    services.HasCertificates,
    services.HasClock,
    services.HasClusterId,
    services.HasDelegation,
    HasDescribedTopics,
    services.HasGroups,
    services.HasHistory,
    services.HasIdleOwners,
    services.HasInternalLogs,
    HasInternalTopics,
    services.HasLog,
    services.HasMarks,
    services.HasMembership,
    services.HasMetrics,
    services.HasOffsets,
    services.HasProducers,
    services.HasRecompressor,
    services.HasSettings,
    services.HasShare,
    services.HasShareSessions,
    services.HasShareStore,
    services.HasTail,
    services.HasThrottles,
    services.HasTopics,
    services.HasTransactions,
    services.HasUsers,
    services.HasValidator,
    Protocol,
):
    """The services of all handlers."""


SERVED: tuple[Served[HandlerServices], ...] = (
    # librdkafka tests whether Produce v0 is inside the range before it uses compression (KAFKA-18659).
    Served(
        ApiKey.PRODUCE,
        3,
        13,
        produce.produce,
        Order.PLACED,
        refuse=produce.refuse_produce,
        advertised_min=0,
        awaits_answer=produce.awaits_answer,
    ),
    Served(ApiKey.FETCH, 4, 18, fetch.fetch, Order.PARKED, refuse=fetch.refuse_fetch, bulky=True),
    Served(ApiKey.LIST_OFFSETS, 1, 11, list_offsets.list_offsets),
    Served(ApiKey.METADATA, 0, 13, metadata.metadata, refuse=metadata.refuse_metadata, bulky=True),
    Served(
        ApiKey.OFFSET_COMMIT,
        2,
        10,
        offset_commit.offset_commit,
        Order.PLACED,
        alone_above_bytes=MAX_SHARED_COMMIT_BYTES,
    ),
    Served(ApiKey.OFFSET_FETCH, 1, 10, offset_fetch.offset_fetch, refuse=offset_fetch.refuse_offset_fetch, bulky=True),
    Served(
        ApiKey.FIND_COORDINATOR,
        0,
        6,
        find_coordinator.find_coordinator,
        refuse=find_coordinator.refuse_find_coordinator,
    ),
    Served(
        ApiKey.JOIN_GROUP,
        0,
        9,
        classic_groups.join_group,
        Order.PARKED,
        refuse=classic_groups.refuse_join_group,
        max_elements=MAX_JOIN_PROTOCOLS,
    ),
    Served(ApiKey.HEARTBEAT, 0, 4, classic_groups.heartbeat, Order.PIPELINED),
    Served(ApiKey.LEAVE_GROUP, 0, 5, classic_groups.leave_group, max_elements=MAX_LEAVING_MEMBERS),
    Served(ApiKey.SYNC_GROUP, 0, 5, classic_groups.sync_group, Order.PARKED, max_elements=MAX_ADMIN_ELEMENTS),
    Served(ApiKey.DESCRIBE_GROUPS, 0, 6, group_admin.describe_groups, bulky=True),
    Served(ApiKey.LIST_GROUPS, 0, 5, group_admin.list_groups, bulky=True),
    Served(ApiKey.SASL_HANDSHAKE, 0, 1, sasl.sasl_handshake, roles=Role.EITHER),
    Served(ApiKey.API_VERSIONS, 0, 5, api_versions.api_versions, roles=Role.EITHER),
    Served(
        ApiKey.CREATE_TOPICS,
        2,
        7,
        create_topics.create_topics,
        max_elements=MAX_ADMIN_ELEMENTS,
        roles=Role.EITHER,
        only_if_awaited=True,
    ),
    Served(
        ApiKey.DELETE_TOPICS,
        1,
        6,
        delete_topics.delete_topics,
        max_elements=MAX_ADMIN_ELEMENTS,
        roles=Role.EITHER,
        only_if_awaited=True,
    ),
    Served(
        ApiKey.DELETE_RECORDS,
        0,
        2,
        delete_records.delete_records,
        refuse=delete_records.refuse_delete_records,
        only_if_awaited=True,
    ),
    Served(
        ApiKey.INIT_PRODUCER_ID,
        0,
        5,
        init_producer_id.init_producer_id,
        refuse=init_producer_id.refuse_init_producer_id,
        only_if_awaited=True,
    ),
    Served(ApiKey.OFFSET_FOR_LEADER_EPOCH, 2, 4, offset_for_leader_epoch.offset_for_leader_epoch),
    Served(
        ApiKey.ADD_PARTITIONS_TO_TXN,
        0,
        5,
        lifecycle.add_partitions_to_txn,
        refuse=lifecycle.refuse_add_partitions_to_txn,
        only_if_awaited=True,
    ),
    Served(
        ApiKey.ADD_OFFSETS_TO_TXN,
        0,
        4,
        lifecycle.add_offsets_to_txn,
        refuse=lifecycle.refuse_add_offsets_to_txn,
        only_if_awaited=True,
    ),
    Served(ApiKey.END_TXN, 0, 5, lifecycle.end_txn, refuse=lifecycle.refuse_end_txn, only_if_awaited=True),
    Served(
        ApiKey.WRITE_TXN_MARKERS,
        1,
        2,
        transaction_admin.write_txn_markers,
        max_elements=MAX_ADMIN_ELEMENTS,
        only_if_awaited=True,
    ),
    Served(
        ApiKey.TXN_OFFSET_COMMIT,
        0,
        6,
        txn_offset_commit.txn_offset_commit,
        refuse=txn_offset_commit.refuse_txn_offset_commit,
    ),
    Served(ApiKey.DESCRIBE_ACLS, 1, 3, acls.describe_acls, bulky=True, roles=Role.EITHER),
    Served(
        ApiKey.CREATE_ACLS,
        1,
        3,
        acls.create_acls,
        max_elements=acls.MAX_CHANGES,
        roles=Role.EITHER,
        only_if_awaited=True,
    ),
    Served(
        ApiKey.DELETE_ACLS,
        1,
        3,
        acls.delete_acls,
        max_elements=acls.MAX_CHANGES,
        roles=Role.EITHER,
        only_if_awaited=True,
    ),
    Served(ApiKey.DESCRIBE_CONFIGS, 1, 4, describe_configs.describe_configs, bulky=True, roles=Role.EITHER),
    Served(
        ApiKey.ALTER_CONFIGS,
        0,
        2,
        alter_configs.alter_configs,
        max_elements=MAX_ADMIN_ELEMENTS,
        roles=Role.EITHER,
        only_if_awaited=True,
    ),
    Served(
        ApiKey.ALTER_REPLICA_LOG_DIRS,
        1,
        2,
        log_dirs.alter_replica_log_dirs,
        refuse=log_dirs.refuse_alter_replica_log_dirs,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(
        ApiKey.DESCRIBE_LOG_DIRS, 1, 5, log_dirs.describe_log_dirs, refuse=log_dirs.refuse_describe_log_dirs, bulky=True
    ),
    Served(ApiKey.SASL_AUTHENTICATE, 0, 2, sasl.sasl_authenticate, roles=Role.EITHER),
    Served(
        ApiKey.CREATE_PARTITIONS,
        0,
        3,
        create_partitions.create_partitions,
        max_elements=MAX_ADMIN_ELEMENTS,
        roles=Role.EITHER,
        only_if_awaited=True,
    ),
    Served(
        ApiKey.CREATE_DELEGATION_TOKEN,
        1,
        3,
        delegation_tokens.create_delegation_token,
        refuse=delegation_tokens.refuse_create_delegation_token,
        roles=Role.EITHER,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(
        ApiKey.RENEW_DELEGATION_TOKEN,
        1,
        2,
        delegation_tokens.renew_delegation_token,
        refuse=delegation_tokens.refuse_renew_delegation_token,
        roles=Role.EITHER,
    ),
    Served(
        ApiKey.EXPIRE_DELEGATION_TOKEN,
        1,
        2,
        delegation_tokens.expire_delegation_token,
        refuse=delegation_tokens.refuse_expire_delegation_token,
        roles=Role.EITHER,
    ),
    Served(
        ApiKey.DESCRIBE_DELEGATION_TOKEN,
        1,
        3,
        delegation_tokens.describe_delegation_token,
        roles=Role.EITHER,
        bulky=True,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(ApiKey.DELETE_GROUPS, 0, 3, group_admin.delete_groups, max_elements=MAX_ADMIN_ELEMENTS),
    Served(
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        0,
        1,
        alter_configs.incremental_alter_configs,
        max_elements=MAX_ADMIN_ELEMENTS,
        roles=Role.EITHER,
        only_if_awaited=True,
    ),
    Served(
        ApiKey.ELECT_LEADERS,
        0,
        2,
        replicas.elect_leaders,
        refuse=replicas.refuse_elect_leaders,
        max_elements=MAX_ADMIN_ELEMENTS,
        roles=Role.EITHER,
    ),
    Served(
        ApiKey.ALTER_PARTITION_REASSIGNMENTS,
        0,
        1,
        replicas.alter_partition_reassignments,
        refuse=replicas.refuse_alter_partition_reassignments,
        max_elements=MAX_ADMIN_ELEMENTS,
        roles=Role.EITHER,
        only_if_awaited=True,
    ),
    Served(ApiKey.LIST_PARTITION_REASSIGNMENTS, 0, 0, replicas.list_partition_reassignments, roles=Role.EITHER),
    Served(ApiKey.OFFSET_DELETE, 0, 0, offset_delete.offset_delete),
    Served(
        ApiKey.DESCRIBE_CLIENT_QUOTAS,
        0,
        1,
        client_quotas.describe_client_quotas,
        refuse=client_quotas.refuse_describe_client_quotas,
        bulky=True,
    ),
    Served(
        ApiKey.ALTER_CLIENT_QUOTAS,
        0,
        1,
        client_quotas.alter_client_quotas,
        max_elements=MAX_ADMIN_ELEMENTS,
        roles=Role.EITHER,
        only_if_awaited=True,
    ),
    Served(
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
        0,
        0,
        scram_credentials.describe_user_scram_credentials,
        bulky=True,
        max_elements=MAX_ADMIN_ELEMENTS,
        roles=Role.EITHER,
    ),
    Served(
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        0,
        0,
        scram_credentials.alter_user_scram_credentials,
        refuse=scram_credentials.refuse_alter_user_scram_credentials,
        max_elements=MAX_CREDENTIALS,
        roles=Role.EITHER,
        only_if_awaited=True,
    ),
    Served(ApiKey.DESCRIBE_QUORUM, 0, 2, quorum.describe_quorum, roles=Role.EITHER, max_elements=MAX_ADMIN_ELEMENTS),
    Served(
        ApiKey.UPDATE_FEATURES,
        0,
        2,
        features.update_features,
        max_elements=MAX_ADMIN_ELEMENTS,
        roles=Role.EITHER,
        only_if_awaited=True,
    ),
    Served(
        ApiKey.DESCRIBE_CLUSTER,
        0,
        2,
        metadata.describe_cluster,
        refuse=metadata.refuse_describe_cluster,
        roles=Role.EITHER,
    ),
    Served(ApiKey.DESCRIBE_PRODUCERS, 0, 0, transaction_admin.describe_producers, bulky=True),
    Served(ApiKey.UNREGISTER_BROKER, 0, 0, brokers.unregister_broker, roles=Role.EITHER),
    Served(ApiKey.DESCRIBE_TRANSACTIONS, 0, 0, transaction_admin.describe_transactions, bulky=True),
    Served(ApiKey.LIST_TRANSACTIONS, 0, 2, transaction_admin.list_transactions, bulky=True),
    Served(ApiKey.CONSUMER_GROUP_HEARTBEAT, 0, 1, consumer_groups.consumer_group_heartbeat),
    Served(ApiKey.CONSUMER_GROUP_DESCRIBE, 0, 1, consumer_groups.consumer_group_describe, bulky=True),
    Served(
        ApiKey.STREAMS_GROUP_HEARTBEAT,
        0,
        1,
        streams_groups.streams_group_heartbeat,
        refuse=streams_groups.refuse_streams_group_heartbeat,
        max_elements=MAX_STREAMS_ELEMENTS,
    ),
    Served(ApiKey.STREAMS_GROUP_DESCRIBE, 0, 1, streams_groups.streams_group_describe, bulky=True),
    Served(
        ApiKey.STREAMS_GROUP_TOPOLOGY_DESCRIPTION_UPDATE,
        0,
        0,
        streams_groups.streams_group_topology_description_update,
        max_elements=MAX_STREAMS_ELEMENTS,
    ),
    Served(ApiKey.UNREGISTER_CONTROLLER, 0, 0, brokers.unregister_controller, roles=Role.EITHER),
    Served(ApiKey.SHARE_GROUP_HEARTBEAT, 1, 1, share_groups.share_group_heartbeat, max_elements=MAX_SHARE_TOPICS),
    Served(ApiKey.SHARE_GROUP_DESCRIBE, 1, 1, share_groups.share_group_describe, bulky=True),
    Served(
        ApiKey.SHARE_FETCH, 1, 2, share_fetch.share_fetch, Order.PARKED, bulky=True, max_elements=MAX_ADMIN_ELEMENTS
    ),
    Served(ApiKey.SHARE_ACKNOWLEDGE, 1, 2, share_fetch.share_acknowledge, max_elements=MAX_ADMIN_ELEMENTS),
    Served(ApiKey.ADD_RAFT_VOTER, 0, 1, quorum.add_raft_voter, roles=Role.EITHER, max_elements=MAX_ADMIN_ELEMENTS),
    Served(ApiKey.REMOVE_RAFT_VOTER, 0, 0, quorum.remove_raft_voter, roles=Role.EITHER),
    Served(ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, 0, 1, share_group_offsets.describe_share_group_offsets, bulky=True),
    Served(
        ApiKey.ALTER_SHARE_GROUP_OFFSETS,
        0,
        0,
        share_group_offsets.alter_share_group_offsets,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(
        ApiKey.DELETE_SHARE_GROUP_OFFSETS,
        0,
        0,
        share_group_offsets.delete_share_group_offsets,
        max_elements=MAX_ADMIN_ELEMENTS,
    ),
    Served(ApiKey.LIST_CONFIG_RESOURCES, 0, 1, config_resources.list_config_resources),
    Served(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, 0, metadata.describe_topic_partitions, bulky=True),
)
