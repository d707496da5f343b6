"""SASL frame by frame: which requests are accepted when, what is answered, and what ends the connection."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from collections.abc import Iterator

import pytest

from protocol.errors import ErrorCode
from protocol.messages.alter_user_scram_credentials import (
    AlterUserScramCredentialsRequest,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
)
from protocol.messages.api_versions import ApiVersionsRequest
from protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from protocol.messages.metadata import MetadataRequest
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from protocol.messages.sasl_authenticate import SaslAuthenticateRequest
from protocol.messages.sasl_handshake import SaslHandshakeRequest
from protocol.records import Record, build_batch
from tests.clients.workers import counted
from tests.conftest import gateways
from tests.frames.members import create_topic, fresh
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.postgres import Databases
from tests.secured import MECHANISMS, USERS, ScramClient, Secured, authenticate, plain_token, start_secured
from tests.wire import WireClient, encode_frame

DELAY_S = 0.095
"""The value of `connection.failed.authentication.delay.ms`, minus the time by which a timer may fire early."""
SALTED = bytes(range(32))
GENERIC = "Authentication failed during authentication due to invalid credentials with SASL mechanism "
ALICE = plain_token("alice", USERS["alice"])


@pytest.fixture(scope="module")
def secured(postgres: Databases) -> Iterator[Secured]:
    with gateways(postgres) as factory:
        yield start_secured(factory)


def total(gateway: GatewayProcess, name: str) -> float:
    return sum(counted(gateway, name).values())


async def closed_unanswered(client: WireClient, *, after_s: float = 0.0) -> None:
    began_s = time.monotonic()
    await client.closed_by_peer(seconds=10)
    assert time.monotonic() - began_s >= after_s


def produce_request(topic: str) -> ProduceRequest:
    records = build_batch([Record(0, 1_000, None, b"smuggled")])
    data = TopicProduceData(name=topic, partition_data=(PartitionProduceData(index=0, records=records),))
    return ProduceRequest(transactional_id=None, acks=-1, timeout_ms=10_000, topic_data=(data,))


async def end_offset(bootstrap: str, topic: str) -> int:
    part = ListOffsetsPartition(partition_index=0, timestamp=-1, current_leader_epoch=-1)
    async with await WireClient.connect(bootstrap) as client:
        asked = ListOffsetsRequest(replica_id=-1, topics=(ListOffsetsTopic(name=topic, partitions=(part,)),))
        return (await client.send(asked, 7)).topics[0].partitions[0].offset


@pytest.mark.parametrize("version", [0, 1, 2])
async def test_known_user_is_authenticated(secured: Secured, version: int) -> None:
    async with await WireClient.connect(secured.sasl) as client:
        versions = await client.send(ApiVersionsRequest(client_software_name="a", client_software_version="1"), 4)
        assert {17, 36, 50, 51} <= {line.api_key for line in versions.api_keys}
        answer = await authenticate(client, ALICE, version=version)
        assert (answer.error_code, answer.error_message, answer.auth_bytes) == (0, None, b"")
        assert answer.session_lifetime_ms == 0
        assert (await client.send(MetadataRequest(topics=()), 12)).brokers


async def test_handshake_names_the_enabled_mechanisms(secured: Secured) -> None:
    async with await WireClient.connect(secured.sasl) as client:
        answer = await client.send(SaslHandshakeRequest(mechanism="GSSAPI"), 1)
        assert answer.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM
        assert answer.mechanisms == MECHANISMS
        await client.closed_by_peer()


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (plain_token("alice", "wrong"), "Authentication failed: Invalid username or password"),
        (plain_token("nobody", "wrong"), "Authentication failed: Invalid username or password"),
        (plain_token("nobody", ""), GENERIC + "PLAIN"),
        (plain_token("", "secret"), GENERIC + "PLAIN"),
        (b"alice\0secret", GENERIC + "PLAIN"),
        (b"", GENERIC + "PLAIN"),
        (b"\0alice\0alice-secret\0", GENERIC + "PLAIN"),
        (
            plain_token("alice", USERS["alice"], "bob"),
            "Authentication failed: Client requested an authorization id that is different from username",
        ),
    ],
)
async def test_failed_authentication_is_answered_late_and_closed(secured: Secured, token: bytes, message: str) -> None:
    failed = total(secured.gateway, "failed_authentication_total")
    async with await WireClient.connect(secured.sasl) as client:
        began_s = time.monotonic()
        answer = await authenticate(client, token)
        assert time.monotonic() - began_s >= DELAY_S
        assert (answer.error_code, answer.error_message) == (ErrorCode.SASL_AUTHENTICATION_FAILED, message)
        await client.closed_by_peer()
    assert total(secured.gateway, "failed_authentication_total") == failed + 1


async def test_produce_in_one_segment_is_not_served_before_authentication(secured: Secured) -> None:
    topic = fresh("smuggled")
    async with await WireClient.connect(secured.open) as opened:
        await create_topic(opened, topic)
    handshake = encode_frame(SaslHandshakeRequest(mechanism="PLAIN"), 1, 1)
    wrong = encode_frame(SaslAuthenticateRequest(auth_bytes=plain_token("alice", "wrong")), 2, 2)
    produce = encode_frame(produce_request(topic), 9, 3)
    host, _, port = secured.sasl.rpartition(":")
    for frames in (produce, handshake + produce, handshake + wrong + produce):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(frames)
        await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert await end_offset(secured.open, topic) == 0
    right = encode_frame(SaslAuthenticateRequest(auth_bytes=ALICE), 2, 2)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(handshake + right + produce)
    for correlation_id in (1, 2, 3):
        (size,) = struct.unpack(">i", await asyncio.wait_for(reader.readexactly(4), 10))
        assert struct.unpack(">i", (await reader.readexactly(size))[:4]) == (correlation_id,)
    writer.close()
    assert await end_offset(secured.open, topic) == 1, "what comes behind the right password is taken"


@pytest.mark.parametrize("count", [0, 1])
async def test_other_requests_before_the_handshake_end_the_connection(secured: Secured, count: int) -> None:
    async with await WireClient.connect(secured.sasl) as client:
        for _ in range(count):
            await client.send(ApiVersionsRequest(client_software_name="a", client_software_version="1"), 3)
        client.send_only(MetadataRequest(topics=None), 12)
        await closed_unanswered(client)


async def test_api_versions_may_be_repeated_only_after_an_unsupported_version(secured: Secured) -> None:
    asked = ApiVersionsRequest(client_software_name="a", client_software_version="1")
    async with await WireClient.connect(secured.sasl) as client:
        client.send_bytes(struct.pack(">ihhih", 10, 18, 99, 1, -1))
    host, _, port = secured.sasl.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(struct.pack(">ihhih", 10, 18, 99, 7, -1))
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    answer = await reader.readexactly(size)
    assert struct.unpack(">ih", answer[:6]) == (7, ErrorCode.UNSUPPORTED_VERSION)
    writer.write(encode_frame(asked, 3, 8))
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    assert struct.unpack(">ih", (await reader.readexactly(size))[:6]) == (8, 0)
    writer.write(encode_frame(asked, 3, 9))
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


async def test_other_request_in_place_of_a_token_is_refused_by_its_code(secured: Secured) -> None:
    async with await WireClient.connect(secured.sasl) as client:
        await client.send(SaslHandshakeRequest(mechanism="PLAIN"), 1)
        began_s = time.monotonic()
        answer = await client.send(ApiVersionsRequest(client_software_name="a", client_software_version="1"), 3)
        assert answer.error_code == ErrorCode.ILLEGAL_SASL_STATE
        assert time.monotonic() - began_s >= DELAY_S
        await client.closed_by_peer()
    async with await WireClient.connect(secured.sasl) as client:
        await client.send(SaslHandshakeRequest(mechanism="PLAIN"), 1)
        answer = await client.send(produce_request("t"), 9)
        assert answer.responses[0].partition_responses[0].error_code == ErrorCode.ILLEGAL_SASL_STATE


async def test_tokens_are_unframed_after_a_handshake_of_version_0(secured: Secured) -> None:
    host, _, port = secured.sasl.rpartition(":")
    for token, is_in in ((ALICE, True), (plain_token("alice", "wrong"), False)):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(encode_frame(SaslHandshakeRequest(mechanism="PLAIN"), 0, 1))
        (size,) = struct.unpack(">i", await reader.readexactly(4))
        assert struct.unpack(">ih", (await reader.readexactly(size))[:6]) == (1, 0)
        writer.write(struct.pack(">i", len(token)) + token)
        if is_in:
            assert await asyncio.wait_for(reader.readexactly(4), 10) == bytes(4)
            writer.write(encode_frame(MetadataRequest(topics=()), 12, 2))
            (size,) = struct.unpack(">i", await reader.readexactly(4))
            assert struct.unpack(">i", (await reader.readexactly(size))[:4]) == (2,)
        else:
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_requests_before_authentication_are_bounded(gateway_factory: GatewayFactory) -> None:
    secured = start_secured(gateway_factory, {"sasl.server.max.receive.size": "2000"})
    async with await WireClient.connect(secured.sasl) as client:
        client.send_bytes(struct.pack(">i", 2001))
        await closed_unanswered(client)
    async with await WireClient.connect(secured.sasl) as client:
        assert (await authenticate(client, ALICE)).error_code == 0
        client.send_bytes(b"")
        many = MetadataRequest(topics=None, allow_auto_topic_creation=False)
        await client.send(many, 12)
        client.send_bytes(struct.pack(">i", 3_000) + bytes.fromhex("0012000400000063ffff"))
        with pytest.raises(TimeoutError):
            await client.closed_by_peer(seconds=0.3)


async def test_sasl_on_a_listener_without_authentication_is_refused(secured: Secured) -> None:
    async with await WireClient.connect(secured.open) as client:
        answer = await client.send(SaslHandshakeRequest(mechanism="PLAIN"), 1)
        assert (answer.error_code, answer.mechanisms) == (ErrorCode.ILLEGAL_SASL_STATE, ())
        answer = await client.send(SaslAuthenticateRequest(auth_bytes=ALICE), 2)
        assert answer.error_code == ErrorCode.ILLEGAL_SASL_STATE
        assert answer.error_message == "SaslAuthenticate request received after successful authentication"
    async with await WireClient.connect(secured.sasl) as client:
        await authenticate(client, ALICE)
        answer = await client.send(SaslHandshakeRequest(mechanism="PLAIN"), 1)
        assert answer.error_code == ErrorCode.ILLEGAL_SASL_STATE, "sessions do not end: nothing to do again"
        assert (await client.send(MetadataRequest(topics=()), 12)).brokers


# --- SCRAM ------------------------------------------------------------------------------------------------------------


async def set_password(bootstrap: str, user: str, password: str, mechanism: int, iterations: int = 4096) -> None:
    name = {1: "sha256", 2: "sha512"}[mechanism]
    salted = hashlib.pbkdf2_hmac(name, password.encode(), b"salt", iterations)
    asked = AlterUserScramCredentialsRequest(
        upsertions=(
            ScramCredentialUpsertion(
                name=user, mechanism=mechanism, iterations=iterations, salt=b"salt", salted_password=salted
            ),
        )
    )
    async with await WireClient.connect(bootstrap) as client:
        (result,) = (await client.send(asked, 0)).results
        assert (result.user, result.error_code, result.error_message) == (user, 0, None)


async def scram(client: WireClient, mechanism: str, hash_name: str, user: str, password: str) -> tuple[int, str | None]:
    """Return the last answer's code and message."""
    exchange = ScramClient(hash_name, user, password)
    answer = await authenticate(client, exchange.first, mechanism=mechanism)
    if answer.error_code:
        return answer.error_code, answer.error_message
    last = await client.send(SaslAuthenticateRequest(auth_bytes=exchange.final(answer.auth_bytes)), 2)
    if not last.error_code:
        assert last.auth_bytes == exchange.expected
    return last.error_code, last.error_message


async def test_scram_holds_on_every_node_at_once(postgres: Databases, gateway_factory: GatewayFactory) -> None:
    one = start_secured(gateway_factory)
    other = start_secured(gateway_factory, database_url=one.gateway.database_url)
    refused = ErrorCode.SASL_AUTHENTICATION_FAILED
    for number, (mechanism, hash_name) in enumerate((("SCRAM-SHA-256", "sha256"), ("SCRAM-SHA-512", "sha512")), 1):

        async def outcome(password: str, named: str = mechanism, hashed: str = hash_name) -> tuple[int, str | None]:
            async with await WireClient.connect(other.sasl) as client:
                return await scram(client, named, hashed, "carol", password)

        assert await outcome("first") == (refused, GENERIC + mechanism)
        await set_password(one.open, "carol", "first", number)
        assert await outcome("first") == (0, None)
        assert await outcome("second") == (refused, GENERIC + mechanism)
        await set_password(one.open, "carol", "second", number, 8192)
        assert await outcome("first") == (refused, GENERIC + mechanism)
        assert await outcome("second") == (0, None)
        deletion = ScramCredentialDeletion(name="carol", mechanism=number)
        async with await WireClient.connect(one.open) as client:
            assert (
                not (await client.send(AlterUserScramCredentialsRequest(deletions=(deletion,)), 0))
                .results[0]
                .error_code
            )
        assert await outcome("second") == (refused, GENERIC + mechanism)


async def test_connection_is_closed_without_a_refusal_if_the_user_cannot_be_read(
    gateway_factory: GatewayFactory,
) -> None:
    """A client that receives an authentication failure gives up; a client whose connection ends tries again."""
    secured = start_secured(gateway_factory, embedded=True)
    await set_password(secured.open, "carol", "password", 1)
    secured.gateway.pause_postgres()
    try:
        async with await WireClient.connect(secured.sasl) as client:
            assert (await authenticate(client, ALICE)).error_code == 0, "PLAIN's users are not in Postgres"
        async with await WireClient.connect(secured.sasl) as client:
            await client.send(SaslHandshakeRequest(mechanism="SCRAM-SHA-256"), 1)
            first = SaslAuthenticateRequest(auth_bytes=ScramClient("sha256", "carol", "password").first)
            with pytest.raises(ConnectionError):
                await client.send(first, 2, seconds=60)
    finally:
        secured.gateway.resume_postgres()
    deadline_s = time.monotonic() + 30
    while True:
        async with await WireClient.connect(secured.sasl) as client:
            try:
                assert await scram(client, "SCRAM-SHA-256", "sha256", "carol", "password") == (0, None)
                return
            except ConnectionError:
                assert time.monotonic() < deadline_s


# --- sessions that end (KIP-368) --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(postgres: Databases) -> Iterator[Secured]:
    with gateways(postgres) as factory:
        yield start_secured(factory, {"listener.name.asking.plain.connections.max.reauth.ms": "1500"})


async def test_session_announces_its_lifetime_and_ends(short: Secured) -> None:
    expired = total(short.gateway, "expired_connections_killed_total")
    async with await WireClient.connect(short.sasl) as client:
        assert (await authenticate(client, ALICE)).session_lifetime_ms == 1500
        assert (await client.send(MetadataRequest(topics=()), 12)).brokers
        with pytest.raises(TimeoutError):
            await client.closed_by_peer(seconds=1.8)
        client.send_only(MetadataRequest(topics=()), 12)
        await client.closed_by_peer()
    assert total(short.gateway, "expired_connections_killed_total") == expired + 1


async def test_session_continues_after_reauthentication(short: Secured) -> None:
    again = total(short.gateway, "successful_reauthentication_total")
    async with await WireClient.connect(short.sasl) as client:
        await authenticate(client, ALICE)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await client.closed_by_peer(seconds=1.2)
            answer = await authenticate(client, ALICE)
            assert (answer.error_code, answer.session_lifetime_ms) == (0, 1500)
            assert (await client.send(MetadataRequest(topics=()), 12)).brokers
        answer = await client.send(SaslHandshakeRequest(mechanism="PLAIN"), 1)
        assert answer.error_code == ErrorCode.ILLEGAL_SASL_STATE, "again within a second"
    assert total(short.gateway, "successful_reauthentication_total") == again + 2


async def test_reauthentication_as_another_principal_is_refused(short: Secured) -> None:
    async with await WireClient.connect(short.sasl) as client:
        await authenticate(client, ALICE)
        answer = await authenticate(client, plain_token("bob", USERS["bob"]))
        assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
        assert answer.error_message == ("Cannot change principals during re-authentication from User.alice: User.bob")
        await client.closed_by_peer()


async def test_reauthentication_with_another_mechanism_is_refused(short: Secured) -> None:
    async with await WireClient.connect(short.sasl) as client:
        await authenticate(client, ALICE)
        assert (await client.send(SaslHandshakeRequest(mechanism="SCRAM-SHA-256"), 1)).error_code == 0
        client.send_only(SaslAuthenticateRequest(auth_bytes=ScramClient("sha256", "alice", "x").first), 2)
        await closed_unanswered(client, after_s=DELAY_S * 0.9)


async def test_requests_during_reauthentication_are_refused(short: Secured) -> None:
    async with await WireClient.connect(short.sasl) as client:
        await authenticate(client, ALICE)
        handshake = client.send_nowait(SaslHandshakeRequest(mechanism="PLAIN"), 1)
        refused = client.send_nowait(MetadataRequest(topics=()), 12)
        assert (await handshake).error_code == 0
        assert not (await refused).brokers
        await client.closed_by_peer()
