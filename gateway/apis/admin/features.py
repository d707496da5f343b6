"""UpdateFeatures: the levels of features that clients and brokers use (KIP-584), and which group protocols are on.

The one idea: `transaction.version` is the level that clients see, and clients of a lower level are served as before.
`eligible.leader.replicas.version` is 1: a replica that lacks no record may lead (KIP-966). Other levels switch a group
protocol on or off, as does `group.coordinator.rebalance.protocols`. `metadata.version` is that of the release of
Kafka whose APIs are served and cannot change, because nodes write nothing by it. `kraft.version` may be raised, as
`kafka-features.sh upgrade --release-version` does, and changes nothing: voters are not added or removed by request
(`quorum.py`).
"""

from __future__ import annotations

from collections import Counter
from enum import IntEnum
from typing import Protocol

import structlog

from gateway.apis.services import HasMembership, HasSettings
from gateway.cluster.membership import Membership
from gateway.config.broker import BrokerConfig
from gateway.net.context import RequestContext
from gateway.share.dead_letters import FEATURE as SHARE
from gateway.share.dead_letters import FROM_LEVEL as DEAD_LETTERS
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.update_features import (
    FeatureUpdateKey,
    UpdatableFeatureResult,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)

logger = structlog.get_logger(__name__)

ELIGIBLE_LEADERS = "eligible.leader.replicas.version"
GROUPS, STREAMS, TRANSACTIONS = "group.version", "streams.version", "transaction.version"
LOWEST_LEVEL = 0
TRANSACTION_VERSION = 2
"""At this level producers name no partitions, and each transaction raises the epoch (KIP-890)."""

SUPPORTED = {ELIGIBLE_LEADERS: 1, GROUPS: 1, SHARE: DEAD_LETTERS, STREAMS: 1, TRANSACTIONS: TRANSACTION_VERSION}
"""Maps each feature to its highest supported level."""
LOWEST = {ELIGIBLE_LEADERS: 1}
"""Maps each feature to its lowest supported level, if that is not 0."""
PROTOCOLS = {GROUPS: "consumer", SHARE: "share", STREAMS: "streams"}
"""Maps each feature to the group protocol that it enables (KIP-848, KIP-932, KIP-1071), by the protocol's name in
`group.coordinator.rebalance.protocols`.
"""

METADATA, KRAFT = "metadata.version", "kraft.version"
OLDEST_METADATA, METADATA_4_4, METADATA_4_5 = 7, 33, 34
"""Levels of metadata.version: 3.3-IV3, from which on Kafka 4.4 works; 4.4-IV2; and 4.5-IV0, which may still change."""

HIGHEST_KRAFT = 1

FIRST_VERSION_WITH_UPGRADE_TYPE = 1


class ChecksFeatures(HasMembership, HasSettings, Protocol): ...


class UpgradeType(IntEnum):
    """Upstream: FeatureUpdate.UpgradeType."""

    UPGRADE = 1
    SAFE_DOWNGRADE = 2
    UNSAFE_DOWNGRADE = 3


def supported(broker: BrokerConfig) -> dict[str, tuple[int, int]]:
    """Map each feature to its lowest and its highest supported level."""
    return {
        METADATA: (OLDEST_METADATA, _metadata_version(broker)),
        KRAFT: (LOWEST_LEVEL, HIGHEST_KRAFT),
        **{name: (LOWEST.get(name, LOWEST_LEVEL), highest) for name, highest in SUPPORTED.items()},
    }


def finalized(membership: Membership, broker: BrokerConfig) -> dict[str, int]:
    """Map each feature to its finalized level, which clients use to choose protocols."""
    levels = {name: membership.levels.get(name, highest) for name, highest in SUPPORTED.items()}
    return {
        METADATA: _metadata_version(broker),
        KRAFT: membership.levels.get(KRAFT, LOWEST_LEVEL),
        **levels,
    }


def _metadata_version(broker: BrokerConfig) -> int:
    return METADATA_4_5 if broker.unstable_feature_versions_enable else METADATA_4_4


def require_protocol(feature: str, context: RequestContext[ChecksFeatures]) -> None:
    """Raise UNSUPPORTED_VERSION, without a message as upstream, if the feature's group protocol is off.

    The feature's level or this node's setting can switch it off; for share groups both must be off (upstream:
    KafkaApis.isConsumerGroupProtocolEnabled and similar methods).
    """
    is_named = PROTOCOLS[feature] in context.services.settings.broker.group_coordinator_rebalance_protocols
    has_level = context.services.membership.levels.get(feature, SUPPORTED[feature]) > LOWEST_LEVEL
    is_on = is_named or has_level if feature == SHARE else is_named and has_level
    if not is_on:
        raise KafkaError(ErrorCode.UNSUPPORTED_VERSION)


async def update_features(
    request: UpdateFeaturesRequest, context: RequestContext[ChecksFeatures]
) -> UpdateFeaturesResponse:
    """Change all features or none, as upstream from 4.0 on. Lowering a level loses nothing, so the upgrade type does
    not matter."""
    if any(count > 1 for count in Counter(update.feature for update in request.feature_updates).values()):
        raise KafkaError(ErrorCode.INVALID_REQUEST, "a feature appears more than once")
    membership = context.services.membership
    # Another node may have changed a level since this node last read the levels.
    await membership.look()
    levels = finalized(membership, context.services.settings.broker)
    for update in request.feature_updates:
        level, current = update.max_version_level, levels.get(update.feature, LOWEST_LEVEL)
        reason = _why_not(update, current, context)
        if reason is not None:
            reason = f"Invalid update version {level} for feature {update.feature}. {reason}"
        elif update.feature == METADATA and level != current:
            reason = f"Unsupported metadata.version downgrade from {current} to {level}. Nodes write nothing by it."
        if reason is not None:
            said = "The update failed for all features since the following feature had an error: "
            raise KafkaError(ErrorCode.INVALID_UPDATE_VERSION, said + reason)
    asked = {update.feature: update.max_version_level for update in request.feature_updates}
    changed = {name: level for name, level in asked.items() if level != levels[name]}
    if changed and not request.validate_only:
        await membership.finalize(changed)
        logger.info("features finalized", levels=changed)
    done = (UpdatableFeatureResult(feature=name, error_message=None) for name in asked)
    return UpdateFeaturesResponse(error_message=None, results=tuple(done))


def _why_not(update: FeatureUpdateKey, current: int, context: RequestContext[ChecksFeatures]) -> str | None:
    if context.version < FIRST_VERSION_WITH_UPGRADE_TYPE:
        kind = UpgradeType.SAFE_DOWNGRADE if update.allow_downgrade else UpgradeType.UPGRADE
    elif update.upgrade_type in frozenset(UpgradeType):
        kind = UpgradeType(update.upgrade_type)
    else:
        return "The controller does not support the given upgrade type."
    level, known = update.max_version_level, supported(context.services.settings.broker).get(update.feature)
    here = f"Local controller {context.services.membership.node_id}"
    if level < LOWEST_LEVEL:
        return "A feature version cannot be less than 0."
    if known is None:
        return f"{here} does not support this feature."
    lowest, highest = known
    if not lowest <= level <= highest:
        return f"{here} only supports versions {lowest}-{highest}"
    if level < current and kind is UpgradeType.UPGRADE:
        return (
            "Can't downgrade the version of this feature without setting the upgrade type to either safe or unsafe"
            " downgrade."
        )
    if level > current and kind is not UpgradeType.UPGRADE:
        return "Can't downgrade to a newer version."
    return None
