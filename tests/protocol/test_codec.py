"""The generated codec and the grammar agree on random values of every message at every version."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# Some of these tests need values of wrong types.

from __future__ import annotations

from random import Random
from uuid import UUID

import pytest

from protocol import codec, grammar
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages.api_versions import ApiVersion, ApiVersionsRequest, ApiVersionsResponse
from protocol.messages.describe_topic_partitions import Cursor, DescribeTopicPartitionsRequest
from protocol.messages.fetch import FetchableTopicResponse, FetchResponse, LeaderIdAndEpoch, NodeEndpoint, PartitionData
from protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from protocol.messages.join_group import JoinGroupResponse, JoinGroupResponseMember
from protocol.messages.list_offsets import ListOffsetsRequest, ListOffsetsTopic
from protocol.messages.metadata import (
    MetadataRequest,
    MetadataResponse,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestTopic
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from protocol.specialise import EncodedElements
from tests.protocol.values import IDS, MESSAGE_VERSIONS, message_value

DRAWS = 25


@pytest.mark.parametrize(("schema", "version"), MESSAGE_VERSIONS, ids=IDS)
def test_specialised_functions_equal_the_grammar(schema, version):
    random = Random(f"{schema.struct_type.__name__} {version}")
    for draw in range(DRAWS):
        value = schema.struct_type() if draw == 0 else message_value(schema, version, random)
        built = grammar.build(value, version)
        assert b"".join(codec.encode(value, version)) == built
        assert grammar.parse(schema.struct_type, version, built) == (value, len(built))
        for buffer in (built, bytearray(built), memoryview(built)):
            decoded, end = codec.decode(schema.struct_type, version, buffer)
            assert end == len(built)
            assert decoded == value
            assert type(decoded) is schema.struct_type


@pytest.mark.parametrize(("schema", "version"), MESSAGE_VERSIONS, ids=IDS)
def test_message_is_decoded_in_place_and_its_end_returned(schema, version):
    value = message_value(schema, version, Random(1))
    built = b"".join(codec.encode(value, version))
    decoded, end = codec.decode(schema.struct_type, version, b"before" + built + b"after", 6)
    assert (decoded, end) == (value, 6 + len(built))


@pytest.mark.parametrize(("schema", "version"), MESSAGE_VERSIONS, ids=IDS)
def test_every_torn_message_is_refused_by_both(schema, version):
    built = b"".join(codec.encode(message_value(schema, version, Random(2), longest=2), version))
    for length in range(len(built)):
        for decode in (codec.decode, grammar.parse):
            with pytest.raises(ProtocolError):
                decode(schema.struct_type, version, built[:length])


def test_fields_that_a_version_lacks_are_dropped_and_read_as_defaults():
    response = JoinGroupResponse(
        throttle_time_ms=5,
        generation_id=3,
        protocol_name="range",
        skip_assignment=True,
        members=(JoinGroupResponseMember(member_id="a", group_instance_id="static", metadata=b"m"),),
    )
    decoded, _ = codec.decode(JoinGroupResponse, 1, b"".join(codec.encode(response, 1)))
    assert decoded == JoinGroupResponse(
        generation_id=3, protocol_name="range", members=(JoinGroupResponseMember(member_id="a", metadata=b"m"),)
    )


def test_bytes_behind_a_request_are_ignored():
    encoded = b"".join(codec.encode(HeartbeatRequest(group_id="g"), 3))
    for behind in (b"", b"\0", b"\xff" * 100):
        request = codec.decode_request(ApiKey.HEARTBEAT, 3, b"head" + encoded + behind, 4)
        assert request == HeartbeatRequest(group_id="g")


def test_three_bytes_that_librdkafka_leaves_behind_metadata_v13_are_ignored():
    request = codec.decode_request(ApiKey.METADATA, 13, bytes.fromhex("00000000010000"))
    assert request == MetadataRequest(topics=None, allow_auto_topic_creation=False)


@pytest.mark.parametrize("version", [3, 4], ids=["plain", "compact"])
def test_text_that_is_not_utf_8_is_replaced_as_upstream_does(version):
    member = b"caf\xe9"
    encoded = b"".join(codec.encode(HeartbeatRequest(group_id="g", member_id="cafe"), version)).replace(b"cafe", member)
    for buffer in (encoded, bytearray(encoded), memoryview(encoded)):
        assert codec.decode(HeartbeatRequest, version, buffer)[0].member_id == "caf\ufffd"


@pytest.mark.parametrize(
    ("api_key", "version"), [(ApiKey.HEARTBEAT, 5), (ApiKey.HEARTBEAT, -1), (ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, 0)]
)
def test_undeclared_apis_and_versions_are_refused(api_key, version):
    with pytest.raises(ProtocolError, match="no request"):
        codec.decode_request(api_key, version, b"")


def test_classes_of_an_api():
    assert codec.request_class(ApiKey.HEARTBEAT) is HeartbeatRequest
    assert codec.response_class(12) is HeartbeatResponse
    with pytest.raises(KeyError):
        codec.request_class(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS)


def test_decoded_messages_are_frozen():
    decoded, _ = codec.decode(HeartbeatResponse, 0, b"\0\x1b")
    assert decoded.error_code == 27
    with pytest.raises(AttributeError):
        decoded.error_code = 0


def test_records_are_slices_of_the_frame():
    frame = bytearray(b"".join(codec.encode(produce(b"first batch"), 9)))
    decoded = codec.decode_request(ApiKey.PRODUCE, 9, frame)
    records = decoded.topic_data[0].partition_data[0].records
    assert isinstance(records, memoryview)
    frame[frame.index(b"first")] = ord("F")
    assert records == b"First batch"


def test_decoded_fields_except_records_own_their_memory():
    request = ProduceRequest(transactional_id="txn", topic_data=(TopicProduceData(name="t"),))
    frame = bytearray(b"".join(codec.encode(request, 9)))
    decoded = codec.decode_request(ApiKey.PRODUCE, 9, frame)
    frame[:] = bytes(len(frame))
    assert decoded == request


@pytest.mark.parametrize("version", [8, 9, 13])
def test_chunks_of_records_are_sent_as_they_are(version):
    chunks = (b"first" * 500, bytearray(b"second"), memoryview(b"third" * 500))
    encoded = codec.encode(produce(chunks), version)
    for chunk in chunks:
        assert any(sent is chunk for sent in encoded)
    whole = codec.encode(produce(b"".join(chunks)), version)
    assert b"".join(encoded) == b"".join(whole) == grammar.build(produce(chunks), version)


@pytest.mark.parametrize("records", [b"", b"small", (b"sm", bytearray(b"al"), memoryview(b"l")), None])
def test_answer_of_many_partitions_with_few_bytes_is_one_chunk(records):
    partitions = tuple(PartitionData(partition_index=index, records=records) for index in range(1000))
    response = FetchResponse(responses=(FetchableTopicResponse(topic_id=UUID(int=7), partitions=partitions),))
    (encoded,) = codec.encode(response, 17)
    assert encoded == grammar.build(response, 17)


def test_null_and_empty_records_differ():
    for records, length in ((None, b"\0"), (b"", b"\1"), ((), b"\1")):
        encoded = b"".join(codec.encode(produce(records), 9))
        assert encoded.endswith(b"\0\0\0\0" + length + b"\0\0\0")


def produce(records):
    partition = PartitionProduceData(index=0, records=records)
    return ProduceRequest(topic_data=(TopicProduceData(name="t", partition_data=(partition,)),))


def test_tagged_fields_around_chunks():
    response = FetchResponse(
        responses=(
            FetchableTopicResponse(
                topic_id=UUID(int=7),
                partitions=(
                    PartitionData(records=b"batch", current_leader=LeaderIdAndEpoch(leader_id=1, leader_epoch=2)),
                ),
            ),
        ),
        node_endpoints=(NodeEndpoint(node_id=1, host="h", port=9092),),
    )
    encoded = b"".join(codec.encode(response, 17))
    assert encoded == grammar.build(response, 17)
    assert codec.decode(FetchResponse, 17, encoded) == (response, len(encoded))


def test_any_sequence_and_error_codes_can_be_encoded():
    listed = ApiVersionsResponse(
        error_code=ErrorCode.UNSUPPORTED_VERSION,
        api_keys=[ApiVersion(api_key=ApiKey.FETCH, max_version=18)],
        supported_features=[],
    )
    frozen = ApiVersionsResponse(error_code=35, api_keys=(ApiVersion(api_key=1, max_version=18),))
    assert codec.encode(listed, 3) == codec.encode(frozen, 3)
    assert grammar.build(listed, 3) == grammar.build(frozen, 3)
    request = OffsetFetchRequest(topics=(OffsetFetchRequestTopic(name="t", partition_indexes=range(3)),))
    assert b"".join(codec.encode(request, 5)).endswith(bytes((0, 0, 0, 3, *(0, 0, 0, 0), *(0, 0, 0, 1), *(0, 0, 0, 2))))


@pytest.mark.parametrize(
    ("message", "version"),
    [
        pytest.param(MetadataRequest(topics=None), 0, id="null array before it was nullable"),
        pytest.param(JoinGroupResponse(protocol_name=None), 6, id="null string before it was nullable"),
        pytest.param(JoinGroupResponse(leader=None), 9, id="null string"),
        pytest.param(HeartbeatRequest(generation_id=None), 4, id="null number"),
        pytest.param(JoinGroupResponse(skip_assignment=None), 9, id="null flag"),
        pytest.param(JoinGroupResponse(members=None), 9, id="null structs"),
        pytest.param(MetadataResponse(brokers=(None,)), 9, id="null struct"),
        pytest.param(ListOffsetsRequest(topics=(ListOffsetsTopic(name="x" * 40_000),)), 5, id="string over 32767"),
        pytest.param(HeartbeatRequest(generation_id=1 << 31), 4, id="number over 32 bits"),
        pytest.param(HeartbeatRequest(group_id="\ud800"), 4, id="half a surrogate pair"),
        pytest.param(ApiVersionsResponse(finalized_features=None), 3, id="null tagged array"),
        pytest.param(HeartbeatRequest(), 9, id="no such version"),
    ],
)
def test_value_that_cannot_be_encoded_raises_value_error(message, version):
    for encode in (codec.encode, grammar.build):
        with pytest.raises(ValueError, match=type(message).__name__):
            encode(message, version)


def test_nullable_structs():
    for cursor, encoded in ((None, b"\xff"), (Cursor(topic_name="t", partition_index=1), b"\1\2t\0\0\0\1\0")):
        request = DescribeTopicPartitionsRequest(cursor=cursor)
        assert b"".join(codec.encode(request, 0)) == b"\1\0\0\x07\xd0" + encoded + b"\0"


class TestTaggedFields:
    head = bytes.fromhex("0000 01 00000000")

    def decode(self, tagged: str) -> ApiVersionsResponse:
        encoded = self.head + bytes.fromhex(tagged)
        decoded, end = codec.decode(ApiVersionsResponse, 3, encoded)
        assert end == len(encoded)
        assert grammar.parse(ApiVersionsResponse, 3, encoded) == (decoded, end)
        return decoded

    def refuse(self, tagged: str) -> None:
        for decode in (codec.decode, grammar.parse):
            with pytest.raises(ProtocolError):
                decode(ApiVersionsResponse, 3, self.head + bytes.fromhex(tagged))

    def test_unknown_tagged_fields_are_skipped(self):
        assert self.decode("02 63 03 aabbcc 01 08 000000000000002a").finalized_features_epoch == 42
        request = ApiVersionsRequest(client_software_name="a", client_software_version="b")
        assert codec.decode(ApiVersionsRequest, 3, b"\2a\2b" + bytes.fromhex("01 0a 02 ffff")) == (request, 9)

    def test_last_of_a_repeated_tagged_field_counts_in_any_order(self):
        decoded = self.decode("03 03 01 01 01 08 0000000000000001 01 08 0000000000000002")
        assert decoded.zk_migration_ready is True
        assert decoded.finalized_features_epoch == 2

    def test_absent_tagged_fields_have_their_defaults(self):
        assert self.decode("00") == ApiVersionsResponse()

    def test_any_byte_but_zero_is_true(self):
        assert self.decode("01 03 01 ff").zk_migration_ready is True

    def test_known_tagged_field_of_a_wrong_length_is_refused(self):
        self.refuse("01 01 07 00000000000000")
        self.refuse("01 01 09 000000000000000000")

    def test_counts_and_sizes_beyond_the_message_are_refused(self):
        self.refuse("ffffffff0f 63 00")
        self.refuse("01 63 ffffffff0f 00")
        self.refuse("01 63 02 00")

    def test_varints_have_five_bytes_and_32_bits(self):
        self.decode("01 e380808000 00")
        self.refuse("01 e38080808000 00")
        self.refuse("01 ffffffff10 00")
        self.refuse("01 ffffffffff0f 00")


@pytest.mark.parametrize("version", range(14))
def test_encoded_elements_replace_structs_of_an_array(version):
    topics = tuple(
        MetadataResponseTopic(name=name, partitions=(MetadataResponsePartition(partition_index=3, leader_id=1),))
        for name in ("a", "b" * 200)
    )
    encoded = EncodedElements(codec.encode_element(MetadataResponse, "topics", topic, version) for topic in topics)
    for given, stand_in in ((topics, encoded), ((), EncodedElements())):
        expected = codec.encode(MetadataResponse(cluster_id="c", topics=given), version)
        assert codec.encode(MetadataResponse(cluster_id="c", topics=stand_in), version) == expected


def test_only_an_arrays_structs_are_encoded_as_elements():
    for field in ("cluster_id", "absent"):
        with pytest.raises(KeyError):
            codec.encode_element(MetadataResponse, field, None, 12)
    with pytest.raises(ValueError, match=r"MetadataResponse\.topics v0"):
        codec.encode_element(MetadataResponse, "topics", MetadataResponseTopic(name=None), 0)
