"""A node's admin side without sockets: real stores on the test's own Postgres, and requests that pass the codec.

Every request is encoded and decoded at its version before the handler sees it. So is the answer, so that a test reads
what a client of that version would.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from gateway.apis.admin.acls import create_acls, delete_acls, describe_acls
from gateway.apis.admin.alter_configs import alter_configs, incremental_alter_configs
from gateway.apis.admin.brokers import unregister_broker
from gateway.apis.admin.client_quotas import alter_client_quotas, describe_client_quotas
from gateway.apis.admin.config_resources import list_config_resources
from gateway.apis.admin.create_partitions import create_partitions
from gateway.apis.admin.create_topics import create_topics
from gateway.apis.admin.delete_topics import delete_topics
from gateway.apis.admin.describe_configs import describe_configs
from gateway.apis.admin.features import update_features
from gateway.apis.admin.log_dirs import alter_replica_log_dirs, describe_log_dirs
from gateway.apis.admin.quorum import add_raft_voter, describe_quorum, remove_raft_voter
from gateway.apis.admin.replicas import alter_partition_reassignments, elect_leaders, list_partition_reassignments
from gateway.apis.admin.scram_credentials import alter_user_scram_credentials, describe_user_scram_credentials
from gateway.apis.api_versions import api_versions
from gateway.apis.coordinator_topics import InternalTopics
from gateway.apis.metadata import describe_cluster, describe_topic_partitions, metadata
from gateway.apis.metadata_cache import DescribedTopics
from gateway.building.services import Services
from gateway.cluster.membership import Membership
from gateway.config.broker_parsing import parse_broker_configs
from gateway.config.settings import load
from gateway.config.topic import TOPIC_CONFIGS
from gateway.log.catalog import Catalog
from gateway.log.tail import Tail
from gateway.net.context import ConnectionInfo, RequestContext, Role
from gateway.quotas.throttles import Throttles
from gateway.security.authorizer import Authorizer
from gateway.share.partitions import SharePartitions
from gateway.share.sessions import ShareSessions
from protocol.api_keys import ApiKey
from protocol.codec import decode, decode_request, encode, encode_response, response_class
from protocol.errors import ErrorCode
from protocol.messages.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from storage.history import HistoryStore
from storage.log import LogStore
from storage.nodes import NodeStore
from storage.pool import Database
from storage.share import ShareStore
from storage.topics import TopicStore
from storage.types import BOTH, Roles, Topic
from storage.users import UserStore

Handler = Callable[[Any, RequestContext], Awaitable[Any]]

HANDLERS: dict[ApiKey, Handler] = {
    ApiKey.METADATA: metadata,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: describe_topic_partitions,
    ApiKey.DESCRIBE_CLUSTER: describe_cluster,
    ApiKey.CREATE_TOPICS: create_topics,
    ApiKey.DELETE_TOPICS: delete_topics,
    ApiKey.CREATE_PARTITIONS: create_partitions,
    ApiKey.DESCRIBE_CONFIGS: describe_configs,
    ApiKey.ALTER_CONFIGS: alter_configs,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: incremental_alter_configs,
    ApiKey.LIST_CONFIG_RESOURCES: list_config_resources,
    ApiKey.DESCRIBE_LOG_DIRS: describe_log_dirs,
    ApiKey.ALTER_REPLICA_LOG_DIRS: alter_replica_log_dirs,
    ApiKey.DESCRIBE_QUORUM: describe_quorum,
    ApiKey.ADD_RAFT_VOTER: add_raft_voter,
    ApiKey.REMOVE_RAFT_VOTER: remove_raft_voter,
    ApiKey.UNREGISTER_BROKER: unregister_broker,
    ApiKey.UPDATE_FEATURES: update_features,
    ApiKey.ALTER_CLIENT_QUOTAS: alter_client_quotas,
    ApiKey.DESCRIBE_CLIENT_QUOTAS: describe_client_quotas,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: alter_user_scram_credentials,
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: describe_user_scram_credentials,
    ApiKey.API_VERSIONS: api_versions,
    ApiKey.DESCRIBE_ACLS: describe_acls,
    ApiKey.CREATE_ACLS: create_acls,
    ApiKey.DELETE_ACLS: delete_acls,
    ApiKey.LIST_PARTITION_REASSIGNMENTS: list_partition_reassignments,
    ApiKey.ELECT_LEADERS: elect_leaders,
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: alter_partition_reassignments,
}

CLUSTER_ID = "test-cluster"
SHOWN_CONFIGS = {name for name, key in TOPIC_CONFIGS.items() if not key.internal}


class AdminNode:
    """One node. Two instances on one database are two nodes."""

    def __init__(
        self,
        database: Database,
        listeners: dict[str, tuple[str, int]],
        rack: str | None,
        broker: dict[str, str],
        *,
        authorizes: bool = False,
        roles: Roles = BOTH,
    ) -> None:
        self.database = database
        nodes = NodeStore(database)
        self.topics = TopicStore(database, nodes.registration)
        self.log = LogStore(database)
        self.tail = Tail(2**20)
        self.catalog = Catalog(self.topics, self.tail, parse_broker_configs(broker))
        self.membership = Membership(nodes, listeners, rack, 60_000, roles=roles)
        unused = cast("Any", None)
        self.services = Services(
            settings=load({"listen": "0.0.0.0:9092"}, (), {}).settings,
            catalog=self.catalog,
            topics=self.topics,
            log=self.log,
            validator=unused,
            recompressor=unused,
            appender=unused,
            tail=self.tail,
            producers=unused,
            offsets=unused,
            groups=unused,
            membership=self.membership,
            metrics=unused,
            cluster_id=CLUSTER_ID,
            described_topics=DescribedTopics(),
            internal_topics=InternalTopics(),
            history=HistoryStore(database),
            transactions=unused,
            throttles=Throttles(lambda: self.catalog.quotas),
            share=SharePartitions(ShareStore(database)),
            share_sessions=ShareSessions(),
            share_store=ShareStore(database),
            users=UserStore(database),
            authorizer=Authorizer(lambda: self.catalog.acls, frozenset(), allow_everyone=True) if authorizes else None,
        )

    async def ask(
        self,
        api_key: ApiKey,
        request: Any,
        version: int,
        *,
        listener: str = "PLAINTEXT",
        role: Role = Role.BROKER,
    ) -> Any:
        """Send the request and return the answer as a client of this version reads it."""
        received = decode_request(api_key, version, b"".join(bytes(chunk) for chunk in encode(request, version)))
        context = RequestContext(
            api_key,
            version,
            1,
            "tests",
            ConnectionInfo("connection", "/127.0.0.1", listener),
            self.services,
            role=role,
        )
        response = await HANDLERS[api_key](received, context)
        encoded = b"".join(bytes(chunk) for chunk in encode_response(response, version))
        answer, end = decode(response_class(api_key), version, encoded)
        assert end == len(encoded)
        return answer

    async def create(
        self, name: str, partitions: int = 1, *, factor: int = -1, configs: dict[str, str] | None = None
    ) -> Topic:
        """Create a topic through CreateTopics."""
        answer = await self.ask(
            ApiKey.CREATE_TOPICS,
            CreateTopicsRequest(
                topics=(
                    CreatableTopic(
                        name=name,
                        num_partitions=partitions,
                        replication_factor=factor,
                        configs=config_entries(configs or {}),
                    ),
                )
            ),
            7,
        )
        assert answer.topics[0].error_code == ErrorCode.NONE, answer
        topic = self.catalog.get(name)
        assert topic is not None
        return topic


def config_entries(configs: dict[str, str | None] | dict[str, str]) -> tuple[Any, ...]:
    return tuple(CreatableTopicConfig(name=name, value=value) for name, value in configs.items())


@asynccontextmanager
async def admin_node(
    url: str,
    *,
    name: str = "node-1",
    listeners: dict[str, tuple[str, int]] | None = None,
    rack: str | None = None,
    broker: dict[str, str] | None = None,
    authorizes: bool = False,
    roles: Roles = BOTH,
) -> AsyncGenerator[AdminNode]:
    """Return a node that has joined and knows the catalog."""
    database = await Database.open(url, hot_connections=2, cold_connections=1)
    try:
        node = AdminNode(
            database,
            listeners or {"PLAINTEXT": (name, 9092)},
            rack,
            broker or {},
            authorizes=authorizes,
            roles=roles,
        )
        await node.membership.join()
        await node.catalog.serve_as(lambda: str(node.membership.node_id))
        yield node
    finally:
        await database.close()
