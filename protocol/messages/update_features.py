"""UpdateFeatures: set the levels of features (KIP-584).

Version 0 only says whether a level may be lowered. Version 1 says how, and may only validate the request (KIP-778).
Version 2 answers with one code for all features.
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int8, int16, int32, message, string, struct


@struct
class FeatureUpdateKey:
    feature: str = string()
    max_version_level: int = int16()
    allow_downgrade: bool = boolean(versions="0")
    upgrade_type: int = int8(versions="1+", default=1)


@message(ApiKey.UPDATE_FEATURES, versions="0-2", flexible="0+")
class UpdateFeaturesRequest:
    timeout_ms: int = int32(default=60_000)
    feature_updates: tuple[FeatureUpdateKey, ...] = array(FeatureUpdateKey)
    validate_only: bool = boolean(versions="1+")


@struct
class UpdatableFeatureResult:
    feature: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")


@message(ApiKey.UPDATE_FEATURES, versions="0-2", flexible="0+")
class UpdateFeaturesResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")
    results: tuple[UpdatableFeatureResult, ...] = array(UpdatableFeatureResult, versions="0-1")
