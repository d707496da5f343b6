"""Each change of the cluster is one line of the audit log, with its author. The line is written before the client has
its answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from gateway.apis import SERVED
from gateway.apis.admin.broker_loggers import Operation
from gateway.apis.audit import AUDITED, audit_into
from gateway.net.context import ConnectionInfo, RequestContext
from gateway.net.requests import Order
from gateway.operate.audit_log import STDOUT, AuditLog
from gateway.operate.metrics import Metrics
from protocol.api_keys import ApiKey
from protocol.messages import (
    alter_client_quotas,
    alter_configs,
    alter_partition_reassignments,
    alter_share_group_offsets,
    create_acls,
    create_partitions,
    delete_acls,
    delete_records,
    delete_share_group_offsets,
    elect_leaders,
    incremental_alter_configs,
    leave_group,
    offset_commit,
    offset_delete,
    update_features,
    write_txn_markers,
)
from protocol.messages.add_raft_voter import AddRaftVoterRequest
from protocol.messages.alter_user_scram_credentials import (
    AlterUserScramCredentialsRequest,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
)
from protocol.messages.create_delegation_token import CreateDelegationTokenRequest
from protocol.messages.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from protocol.messages.delete_groups import DeleteGroupsRequest
from protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from protocol.messages.expire_delegation_token import ExpireDelegationTokenRequest
from protocol.messages.metadata import MetadataRequest
from protocol.messages.remove_raft_voter import RemoveRaftVoterRequest
from protocol.messages.renew_delegation_token import RenewDelegationTokenRequest
from protocol.messages.unregister_broker import UnregisterBrokerRequest
from protocol.messages.unregister_controller import UnregisterControllerRequest
from tests.conftest import gateways
from tests.gateway_process import ROOT, clean_environment
from tests.postgres import Databases
from tests.secured import AUTHORIZER, USERS, Secured, authenticate, plain_token, start_secured
from tests.wire import WireClient

Line = dict[str, Any]


class Audited:
    """A gateway with an audit log, and clients of it."""

    def __init__(self, secured: Secured, path: Path) -> None:
        self.secured, self.path = secured, path

    def lines(self) -> list[Line]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    async def send(self, request: Any, version: int, *, user: str = "alice") -> tuple[Any, list[Line]]:
        """Send a user's request. Return the answer and the audit lines that it added."""
        before = len(self.lines())
        async with await WireClient.connect(self.secured.sasl, client_id="admin") as client:
            assert (await authenticate(client, plain_token(user, USERS[user]))).error_code == 0
            answer = await client.send(request, version)
        return answer, self.lines()[before:]


@pytest.fixture(scope="module")
def audited(postgres: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    path = tmp_path_factory.mktemp("audit") / "audit.log"
    more = {**AUTHORIZER, "super.users": "User:alice", "delegation.token.secret.key": "not-told"}
    with gateways(postgres) as factory:
        secured = start_secured(factory, more, environment={"SLUICE_AUDIT_LOG": str(path)})
        yield Audited(secured, path)


@pytest.fixture
async def topic(audited: Audited) -> AsyncIterator[str]:
    """A topic for one test."""
    name = f"t-{os.urandom(6).hex()}"
    await audited.send(
        CreateTopicsRequest(topics=(CreatableTopic(name=name, num_partitions=1, replication_factor=1),)), 7
    )
    yield name
    await audited.send(DeleteTopicsRequest(topics=(DeleteTopicState(name=name),)), 6)


async def test_audit_log_that_accepts_no_line_leaves_the_other_threads_free(tmp_path: Path) -> None:
    """Otherwise a hung disk of the audit log would stop the whole node."""
    path = tmp_path / "audit.log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    audit = audit_into(AuditLog(path, Metrics()).append, "node")[ApiKey.DELETE_TOPICS]
    request = DeleteTopicsRequest(topics=tuple(DeleteTopicState(name="n" * 32_000) for _ in range(4)))
    connection = ConnectionInfo("c", "/127.0.0.1", "PLAINTEXT")
    context = RequestContext[object](ApiKey.DELETE_TOPICS, 6, 1, "admin", connection, None)
    waiting = [asyncio.ensure_future(audit(request, None, 0, context)) for _ in range(64)]
    loop = asyncio.get_running_loop()
    try:
        done, _ = await asyncio.wait(waiting, timeout=0.2)
        assert not done
        await asyncio.wait_for(asyncio.to_thread(int), 10)
    finally:
        loop.add_reader(reader, os.read, reader, 2**20)
        await asyncio.gather(*waiting)
        loop.remove_reader(reader)
        os.close(reader)


def test_audited_request_ends_without_its_client() -> None:
    """A request that is cancelled writes no line, although its change may have been committed."""
    cancelled = {line.api_key for line in SERVED if line.bulky or line.order is Order.PARKED}
    assert not cancelled & AUDITED


async def test_creation_names_who_made_it_and_what(audited: Audited) -> None:
    config = CreatableTopicConfig(name="retention.ms", value="86400000")
    made = CreatableTopic(name="orders", num_partitions=3, replication_factor=1, configs=(config,))
    _, (line,) = await audited.send(CreateTopicsRequest(topics=(made,)), 7)
    assert line.pop("time").endswith("+00:00")
    (answered,) = line.pop("response")["topics"]
    assert (answered["name"], answered["error_code"]) == ("orders", "NONE")
    assert line == {
        "node": audited.secured.open,
        "principal": "User:alice",
        "host": "127.0.0.1",
        "listener": "ASKING",
        "client_id": "admin",
        "api": "create_topics",
        "errors": [],
        "request": {
            "topics": [
                {
                    "name": "orders",
                    "num_partitions": 3,
                    "replication_factor": 1,
                    "assignments": [],
                    "configs": [{"name": "retention.ms", "value": "86400000"}],
                }
            ],
            "validate_only": False,
        },
    }


def requests(topic: str) -> Iterator[tuple[Any, int, list[str]]]:
    """Yield requests of the audited APIs, with their versions and the texts that their lines must show."""
    yield (
        CreateTopicsRequest(topics=(CreatableTopic(name=topic, num_partitions=1, replication_factor=1),)),
        7,
        ["TOPIC_ALREADY_EXISTS"],
    )
    yield DeleteTopicsRequest(topics=(DeleteTopicState(name="absent"),)), 6, ["absent", "UNKNOWN_TOPIC_OR_PARTITION"]
    grown = create_partitions.CreatePartitionsTopic(name=topic, count=2, assignments=None)
    yield create_partitions.CreatePartitionsRequest(topics=(grown,)), 3, ['"count": 2']
    cut = delete_records.DeleteRecordsPartition(partition_index=0, offset=0)
    cuts = (delete_records.DeleteRecordsTopic(name=topic, partitions=(cut,)),)
    yield delete_records.DeleteRecordsRequest(topics=cuts), 2, ['"offset": 0']
    configs = (alter_configs.AlterableConfig(name="retention.ms", value="4711"),)
    resource = alter_configs.AlterConfigsResource(resource_type=2, resource_name=topic, configs=configs)
    yield alter_configs.AlterConfigsRequest(resources=(resource,)), 2, ['"TOPIC"', "4711"]
    set_one = (incremental_alter_configs.AlterableConfig(name="num.partitions", config_operation=0, value="5"),)
    of_all = incremental_alter_configs.AlterConfigsResource(resource_type=4, resource_name="", configs=set_one)
    yield incremental_alter_configs.IncrementalAlterConfigsRequest(resources=(of_all,)), 1, ['"BROKER"', '"value": "5"']
    acl = create_acls.AclCreation(
        resource_type=2,
        resource_name=topic,
        resource_pattern_type=3,
        principal="User:carol",
        host="*",
        operation=3,
        permission_type=3,
    )
    yield create_acls.CreateAclsRequest(creations=(acl,)), 3, ["User:carol", '"READ"', '"ALLOW"', '"LITERAL"']
    filters = delete_acls.DeleteAclsFilter(
        resource_type_filter=2,
        resource_name_filter=topic,
        pattern_type_filter=3,
        principal_filter="User:carol",
        host_filter=None,
        operation=1,
        permission_type=1,
    )
    yield delete_acls.DeleteAclsRequest(filters=(filters,)), 3, ["matching_acls", '"host": "*"']
    upsertion = ScramCredentialUpsertion(
        name="dora", mechanism=1, iterations=4096, salt=b"salty", salted_password=b"pw"
    )
    deletion = ScramCredentialDeletion(name="emil", mechanism=1)
    changed = AlterUserScramCredentialsRequest(deletions=(deletion,), upsertions=(upsertion,))
    yield changed, 0, ["dora", "emil", "RESOURCE_NOT_FOUND", '"[hidden]"']
    entity = alter_client_quotas.EntityData(entity_type="user", entity_name="dora")
    rate = alter_client_quotas.OpData(key="producer_byte_rate", value=1000.0, remove=False)
    entry = alter_client_quotas.EntryData(entity=(entity,), ops=(rate,))
    yield alter_client_quotas.AlterClientQuotasRequest(entries=(entry,)), 1, ["producer_byte_rate", "1000.0"]
    at_three = offset_commit.OffsetCommitRequestPartition(partition_index=0, committed_offset=3)
    commits = (offset_commit.OffsetCommitRequestTopic(name=topic, partitions=(at_three,)),)
    commit = offset_commit.OffsetCommitRequest(group_id="g", generation_id_or_member_epoch=-1, topics=commits)
    yield commit, 9, ['"committed_offset": 3']
    forgotten = offset_delete.OffsetDeleteRequestPartition(partition_index=0)
    forget = (offset_delete.OffsetDeleteRequestTopic(name=topic, partitions=(forgotten,)),)
    yield offset_delete.OffsetDeleteRequest(group_id="g", topics=forget), 0, ['"group_id": "g"']
    yield DeleteGroupsRequest(groups_names=("nobody",)), 2, ["nobody"]
    static = leave_group.MemberIdentity(member_id="", group_instance_id="static-1")
    yield leave_group.LeaveGroupRequest(group_id="g", members=(static,)), 5, ["static-1"]
    start = alter_share_group_offsets.AlterShareGroupOffsetsRequestPartition(partition_index=0, start_offset=0)
    starts = (alter_share_group_offsets.AlterShareGroupOffsetsRequestTopic(topic_name=topic, partitions=(start,)),)
    yield alter_share_group_offsets.AlterShareGroupOffsetsRequest(group_id="sh", topics=starts), 0, ['"sh"']
    shared = (delete_share_group_offsets.DeleteShareGroupOffsetsRequestTopic(topic_name=topic),)
    yield delete_share_group_offsets.DeleteShareGroupOffsetsRequest(group_id="sh", topics=shared), 0, ['"sh"']
    elected = (elect_leaders.TopicPartitions(topic=topic, partitions=(0,)),)
    yield elect_leaders.ElectLeadersRequest(election_type=0, topic_partitions=elected), 2, [topic]
    moved = alter_partition_reassignments.ReassignablePartition(partition_index=0, replicas=(99,))
    moves = (alter_partition_reassignments.ReassignableTopic(name=topic, partitions=(moved,)),)
    yield alter_partition_reassignments.AlterPartitionReassignmentsRequest(topics=moves), 0, ["99"]
    feature = update_features.FeatureUpdateKey(feature="nothing", max_version_level=1)
    yield update_features.UpdateFeaturesRequest(feature_updates=(feature,)), 1, ["nothing"]
    yield write_txn_markers.WriteTxnMarkersRequest(markers=()), 1, ["markers"]
    yield UnregisterBrokerRequest(broker_id=99), 0, ["99"]
    yield UnregisterControllerRequest(controller_id=98), 0, ["98", "CONTROLLER_ID_NOT_REGISTERED"]
    voter = {"cluster_id": None, "voter_id": 97, "voter_directory_id": UUID(int=1)}
    yield AddRaftVoterRequest(timeout_ms=1, **voter), 0, ["97"]
    yield RemoveRaftVoterRequest(**voter), 0, ["97", "UNSUPPORTED_VERSION"]
    yield CreateDelegationTokenRequest(max_lifetime_ms=60_000), 3, ["token_id", '"hmac": "[hidden]"']
    yield RenewDelegationTokenRequest(hmac=b"secret-key"), 2, ["DELEGATION_TOKEN_NOT_FOUND"]
    yield ExpireDelegationTokenRequest(hmac=b"secret-key"), 2, ["DELEGATION_TOKEN_NOT_FOUND"]


async def test_each_change_is_one_line_without_secrets(audited: Audited, topic: str) -> None:
    seen: set[ApiKey] = set()
    for request, version, texts in requests(topic):
        _, lines = await audited.send(request, version)
        assert len(lines) == 1, request
        text = json.dumps(lines[0])
        assert [part for part in texts if part not in text] == [], text
        assert lines[0]["principal"] == "User:alice"
        assert not {"salty", "secret-key"} & set(text.split('"'))
        seen.add(ApiKey[lines[0]["api"].upper()])
    assert seen == AUDITED


@pytest.mark.parametrize(
    ("name", "operation"),
    [("listener.name.asking.ssl.keystore.password", Operation.SET), ("plugin.password", Operation.APPEND)],
)
async def test_a_password_among_settings_is_hidden(audited: Audited, name: str, operation: int) -> None:
    given = incremental_alter_configs.AlterableConfig(name=name, config_operation=operation, value="tell-nobody")
    resource = incremental_alter_configs.AlterConfigsResource(resource_type=4, resource_name="1", configs=(given,))
    _, (line,) = await audited.send(incremental_alter_configs.IncrementalAlterConfigsRequest(resources=(resource,)), 1)
    assert name in json.dumps(line["request"])
    assert "tell-nobody" not in json.dumps(line)


async def test_a_denied_change_is_a_line_that_says_so(audited: Audited, topic: str) -> None:
    _, (line,) = await audited.send(DeleteTopicsRequest(topics=(DeleteTopicState(name=topic),)), 6, user="bob")
    assert (line["principal"], line["errors"]) == ("User:bob", ["TOPIC_AUTHORIZATION_FAILED"])
    rate = alter_client_quotas.OpData(key="producer_byte_rate", value=1.0, remove=False)
    entity = alter_client_quotas.EntityData(entity_type="user", entity_name="alice")
    entry = alter_client_quotas.EntryData(entity=(entity,), ops=(rate,))
    _, (line,) = await audited.send(alter_client_quotas.AlterClientQuotasRequest(entries=(entry,)), 1, user="bob")
    assert line["errors"] == ["CLUSTER_AUTHORIZATION_FAILED"]


async def test_reads_and_commits_of_members_are_no_lines(audited: Audited, topic: str) -> None:
    _, lines = await audited.send(MetadataRequest(topics=None), 12)
    assert lines == []
    closing = leave_group.MemberIdentity(member_id="member", reason="the consumer is being closed")
    assert (await audited.send(leave_group.LeaveGroupRequest(group_id="g", members=(closing,)), 5))[1] == []
    part = offset_commit.OffsetCommitRequestPartition(partition_index=0, committed_offset=3)
    commits = (offset_commit.OffsetCommitRequestTopic(name=topic, partitions=(part,)),)
    commit = offset_commit.OffsetCommitRequest(
        group_id="g", generation_id_or_member_epoch=4, member_id="member", topics=commits
    )
    assert (await audited.send(commit, 9))[1] == []


def test_line_that_cannot_be_written_is_counted_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path, metrics = tmp_path / "audit.log", Metrics()
    log = AuditLog(path, metrics)
    log.append('{"first": 1}')
    path.rename(tmp_path / "audit.log.1")  # rename the file, as logrotate does
    path.mkdir()
    with capture_logs() as said:
        log.append('{"second": 2}')
    assert said[0]["event"] == "audit log cannot be written, its line is lost"
    assert metrics.registry.get_sample_value("sluice_audit_lines_lost_total") == 1
    path.rmdir()
    log.append('{"third": 3}')
    assert (tmp_path / "audit.log.1").read_text() == '{"first": 1}\n'
    assert path.read_text().split() == ['{"third":', "3}"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_lines_of_threads_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    logs = [AuditLog(path, Metrics()) for _ in range(2)]

    async def write() -> None:
        lines = [json.dumps({"number": number, "text": "x" * 10_000}) for number in range(100)]
        await asyncio.gather(*(asyncio.to_thread(logs[number % 2].append, line) for number, line in enumerate(lines)))

    asyncio.run(write())
    assert sorted(json.loads(line)["number"] for line in path.read_text().splitlines()) == list(range(100))


def test_lines_go_to_standard_output() -> None:
    program = (
        "from gateway.operate.audit_log import AuditLog, STDOUT; from gateway.operate.metrics import Metrics; "
        "AuditLog(STDOUT, Metrics()).append('{}')"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, timeout=120)
    assert (STDOUT, ran.stdout) == ("stdout", b"{}\n")


def test_node_does_not_start_if_its_audit_log_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "audit.log"
    words = ["serve", "--data-dir", str(tmp_path), "--listen", "127.0.0.1:0", "--metrics-listen", "off"]
    ran = subprocess.run(
        [sys.executable, "-m", "gateway.cli", *words, "--audit-log", str(path)],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 1
    assert f"{path} for configuration audit-log: cannot be written: No such file or directory" in ran.stderr
