"""UpdateFeatures, on a real Postgres: levels that may be set, nodes that follow them, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.api_versions import ApiVersionsRequest
from protocol.messages.update_features import FeatureUpdateKey, UpdateFeaturesRequest
from tests.gateway.admin import AdminNode, admin_node

OK = ErrorCode.NONE
TRANSACTIONS, GROUPS, SHARE, STREAMS = "transaction.version", "group.version", "share.version", "streams.version"
METADATA, KRAFT = "metadata.version", "kraft.version"
ELIGIBLE = "eligible.leader.replicas.version"
UPGRADE, SAFE, UNSAFE = 1, 2, 3


def to(level: int, how: int = UPGRADE, feature: str = TRANSACTIONS) -> FeatureUpdateKey:
    """Return an update to this level. Version 0 of the request has a separate field for the direction."""
    return FeatureUpdateKey(feature=feature, max_version_level=level, allow_downgrade=how != UPGRADE, upgrade_type=how)


async def ask(node: AdminNode, *updates: FeatureUpdateKey, version: int = 1, **given: Any) -> Any:
    return await node.ask(ApiKey.UPDATE_FEATURES, UpdateFeaturesRequest(feature_updates=updates, **given), version)


async def levels(node: AdminNode) -> tuple[dict[str, int], int]:
    """Return the levels as clients receive them, and their epoch."""
    asked = ApiVersionsRequest(client_software_name="tests", client_software_version="1")
    answer = await node.ask(ApiKey.API_VERSIONS, asked, 4)
    finalized = {each.name: each.max_version_level for each in answer.finalized_features}
    return finalized, answer.finalized_features_epoch


@pytest.mark.parametrize("version", range(3))
async def test_feature_level_is_lowered_and_raised_on_every_node(database_url: str, version: int) -> None:
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2") as other:
        before, epoch = await levels(node)
        assert before == {METADATA: 33, TRANSACTIONS: 2, ELIGIBLE: 1, GROUPS: 1, SHARE: 2, STREAMS: 1}
        for level, how in ((1, SAFE), (0, SAFE), (2, UPGRADE)):
            answer = await ask(node, to(level, how), version=version)
            assert (answer.error_code, answer.error_message) == (OK, None)
            results = [(each.feature, each.error_code, each.error_message) for each in answer.results]
            assert results == ([] if version == 2 else [(TRANSACTIONS, OK, None)])
            shown = {TRANSACTIONS: level} if level else {}
            expected = {METADATA: 33, ELIGIBLE: 1, GROUPS: 1, SHARE: 2, STREAMS: 1} | shown
            now, later = await levels(node)
            assert now == expected
            assert later > epoch, "clients believe nothing else"
            epoch = later
            await other.membership.renew()
            assert await levels(other) == (expected, other.membership.read_ms)
            assert other.membership.read_ms >= epoch


async def test_update_at_a_node_that_has_not_read_the_last_one_takes_effect(database_url: str) -> None:
    async with admin_node(database_url) as node, admin_node(database_url, name="node-2") as other:
        await ask(node, to(0, SAFE))
        await ask(other, to(2))
        await node.membership.renew()
        for each in (node, other):
            assert (await levels(each))[0][TRANSACTIONS] == 2


async def test_feature_level_survives_a_restart(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await ask(node, to(1, UNSAFE))
    async with admin_node(database_url) as node:
        assert (await levels(node))[0][TRANSACTIONS] == 1


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (to(1), "Can't downgrade the version of this feature without setting the upgrade type to either safe or"),
        (to(3), "Local controller 1 only supports versions 0-2"),
        (to(-1, SAFE), "A feature version cannot be less than 0."),
        (to(1, 0), "The controller does not support the given upgrade type."),
        (to(1, 4), "The controller does not support the given upgrade type."),
        (to(1, feature="test.version"), "Local controller 1 does not support this feature."),
        (to(0, UNSAFE, METADATA), "Local controller 1 only supports versions 7-33"),
        (to(34, feature=METADATA), "Local controller 1 only supports versions 7-33"),
        (to(0, UNSAFE, ELIGIBLE), "Local controller 1 only supports versions 1-1"),
        (to(2, feature=KRAFT), "Local controller 1 only supports versions 0-1"),
        (to(0, feature=GROUPS), "Can't downgrade the version of this feature without setting the upgrade type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_invalid_level_is_refused_and_no_other_is_set(
    database_url: str, update: FeatureUpdateKey, reason: str
) -> None:
    message = f"Invalid update version {update.max_version_level} for feature {update.feature}. {reason}"
    first = to(1, SAFE) if update.feature != TRANSACTIONS else to(1, UPGRADE, feature=GROUPS)
    said = "The update failed for all features since the following feature had an error: "
    async with admin_node(database_url) as node:
        for version in (1, 2):
            with pytest.raises(KafkaError) as refused:
                await ask(node, first, update, version=version)
            assert refused.value.code is ErrorCode.INVALID_UPDATE_VERSION
            assert (refused.value.message or "").startswith(said + message)
        others = {ELIGIBLE: 1, GROUPS: 1, SHARE: 2, STREAMS: 1}
        assert (await levels(node))[0] == {METADATA: 33, TRANSACTIONS: 2} | others


async def test_a_level_is_raised_by_an_upgrade_alone(database_url: str) -> None:
    async with admin_node(database_url) as node:
        await ask(node, to(0, SAFE))
        for how in (SAFE, UNSAFE):
            with pytest.raises(KafkaError, match="Can't downgrade to a newer version"):
                await ask(node, to(2, how))
        assert (await ask(node, to(0))).results[0].error_code == OK, "as it is"


async def test_validate_only_request_changes_nothing(database_url: str) -> None:
    async with admin_node(database_url) as node:
        answer = await ask(node, to(1, SAFE), validate_only=True)
        assert answer.results[0].error_code == OK
        assert (await levels(node))[0][TRANSACTIONS] == 2


async def test_a_feature_may_be_named_once(database_url: str) -> None:
    async with admin_node(database_url) as node:
        with pytest.raises(KafkaError) as refused:
            await ask(node, to(1, SAFE), to(1, SAFE))
        assert refused.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("how", [SAFE, UNSAFE])
async def test_metadata_version_is_that_of_the_release(database_url: str, how: int) -> None:
    async with admin_node(database_url) as node:
        with pytest.raises(KafkaError, match="downgrade from 33 to 28") as refused:
            await ask(node, to(28, how, METADATA))
        assert refused.value.code is ErrorCode.INVALID_UPDATE_VERSION
        answer = await ask(node, to(33, feature=METADATA), to(0, feature=KRAFT))
        assert [each.error_code for each in answer.results] == [OK, OK], "as they are"
