"""Group protocols that are switched off, by a feature's level or by a node's setting, as frames."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from gateway.config.broker_parsing import parse_broker_configs
from gateway.config.definition import ConfigError
from protocol.errors import ErrorCode
from protocol.messages.alter_share_group_offsets import AlterShareGroupOffsetsRequest
from protocol.messages.api_versions import ApiVersionsRequest
from protocol.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from protocol.messages.delete_share_group_offsets import DeleteShareGroupOffsetsRequest
from protocol.messages.describe_share_group_offsets import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsRequestGroup,
)
from protocol.messages.share_acknowledge import ShareAcknowledgeRequest
from protocol.messages.share_fetch import ShareFetchRequest
from protocol.messages.share_group_describe import ShareGroupDescribeRequest
from protocol.messages.share_group_heartbeat import ShareGroupHeartbeatRequest
from protocol.messages.streams_group_describe import StreamsGroupDescribeRequest
from protocol.messages.streams_group_heartbeat import StreamsGroupHeartbeatRequest
from protocol.messages.update_features import FeatureUpdateKey, UpdateFeaturesRequest
from tests.gateway_process import GatewayFactory
from tests.wire import WireClient

GROUPS, SHARE, STREAMS = "group.version", "share.version", "streams.version"
UPGRADE, SAFE_DOWNGRADE = 1, 2
OFF = (ErrorCode.UNSUPPORTED_VERSION, None)
ASKED: dict[str, tuple[tuple[Any, int], ...]] = {
    GROUPS: (
        (ConsumerGroupHeartbeatRequest(group_id="g", member_id="m", member_epoch=0), 1),
        (ConsumerGroupDescribeRequest(group_ids=("a", "b")), 1),
    ),
    SHARE: (
        (ShareGroupHeartbeatRequest(group_id="g", member_id="m", member_epoch=0), 1),
        (ShareGroupDescribeRequest(group_ids=("a", "b")), 1),
        (ShareFetchRequest(group_id="g", member_id="m"), 2),
        (ShareAcknowledgeRequest(group_id="g", member_id="m"), 2),
        (DescribeShareGroupOffsetsRequest(groups=(DescribeShareGroupOffsetsRequestGroup(group_id="g"),)), 1),
        (AlterShareGroupOffsetsRequest(group_id="g"), 0),
        (DeleteShareGroupOffsetsRequest(group_id="g"), 0),
    ),
    STREAMS: (
        (StreamsGroupHeartbeatRequest(group_id="g", member_id="m", member_epoch=0), 0),
        (StreamsGroupDescribeRequest(group_ids=("a", "b")), 0),
    ),
}
"""Requests of each feature's protocol, each with its version."""


def told(answer: Any) -> set[tuple[int, str | None]]:
    """Return the errors in an answer: one for the whole answer, or one for each group in it."""
    parts: Iterable[Any] = getattr(answer, "groups", None) or (answer,)
    return {(part.error_code, part.error_message) for part in parts}


async def what_is_off(client: WireClient) -> set[str]:
    """Return the features whose every request is refused with UNSUPPORTED_VERSION and no message. Requests of all other
    features must not be refused in this way.
    """
    off: set[str] = set()
    for feature, requests in ASKED.items():
        refused = [told(await client.send(request, version)) == {OFF} for request, version in requests]
        assert len(set(refused)) == 1, (feature, refused)
        off |= {feature} if refused[0] else set()
    return off


async def finalized(client: WireClient) -> set[str]:
    answer = await client.send(ApiVersionsRequest(client_software_name="tests", client_software_version="1"), 4)
    return {each.name for each in answer.finalized_features}


async def set_level(client: WireClient, feature: str, level: int, how: int) -> None:
    update = FeatureUpdateKey(feature=feature, max_version_level=level, upgrade_type=how)
    answer = await client.send(UpdateFeaturesRequest(feature_updates=(update,)), 1)
    assert answer.error_code == ErrorCode.NONE, answer


@pytest.fixture
async def client(request: pytest.FixtureRequest, gateway_factory: GatewayFactory) -> AsyncIterator[WireClient]:
    protocols: str | None = getattr(request, "param", None)
    settings = {} if protocols is None else {"group.coordinator.rebalance.protocols": protocols}
    async with await WireClient.connect(gateway_factory(settings).bootstrap) as connected:
        yield connected


@pytest.mark.parametrize("feature", [GROUPS, SHARE, STREAMS])
async def test_a_feature_of_level_0_switches_its_protocol_off_and_the_next_level_on_again(
    client: WireClient, feature: str
) -> None:
    assert await what_is_off(client) == set()
    await set_level(client, feature, 0, SAFE_DOWNGRADE)
    assert await what_is_off(client) == {feature}
    assert feature not in await finalized(client)
    await set_level(client, feature, 1, UPGRADE)
    assert await what_is_off(client) == set()
    assert feature in await finalized(client)


@pytest.mark.parametrize(
    ("client", "off"),
    [
        pytest.param("classic", {GROUPS, STREAMS}, id="share groups go by their feature"),
        pytest.param("classic,consumer", {STREAMS}, id="streams"),
        pytest.param("classic,consumer,streams", set[str](), id="none"),
    ],
    indirect=["client"],
)
async def test_a_node_serves_the_protocols_that_its_setting_names(client: WireClient, off: set[str]) -> None:
    assert await what_is_off(client) == off


@pytest.mark.parametrize("client", ["classic,share"], indirect=True)
async def test_share_groups_that_the_setting_names_need_no_feature(client: WireClient) -> None:
    await set_level(client, SHARE, 0, SAFE_DOWNGRADE)
    assert SHARE not in await what_is_off(client)


@pytest.mark.parametrize("protocols", ["consumer", "", "classic,connect"])
def test_invalid_group_protocols_are_refused(protocols: str) -> None:
    with pytest.raises(ConfigError):
        parse_broker_configs({"group.coordinator.rebalance.protocols": protocols})
