"""Settings of a subscription to clients' metrics (ConfigResource type CLIENT_METRICS, KIP-714), under Kafka's names.

The one idea: a subscription is its settings; where the last of them goes, it is gone. Mirrors ClientMetricsConfigs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gateway.config.definition import ConfigError, ConfigKey, ConfigType

METRICS, INTERVAL, MATCH = "metrics", "interval.ms", "match"
MIN_INTERVAL_MS, MAX_INTERVAL_MS = 100, 3_600_000
MATCHED = frozenset(
    {
        "client_instance_id",
        "client_id",
        "client_software_name",
        "client_software_version",
        "client_source_address",
        "client_source_port",
    }
)
"""What `match` may look at."""

MAX_NAME_BYTES = 1_024
MAX_VALUE_BYTES = 4_096
MAX_SUBSCRIPTIONS = 100
"""Every node reads all of them when one has changed."""

CLIENT_METRICS_CONFIGS: Mapping[str, ConfigKey] = MappingProxyType(
    {
        key.name: key
        for key in (
            ConfigKey(
                METRICS, ConfigType.LIST, (), "Prefixes of the names of metrics that clients are to push; * for all."
            ),
            ConfigKey(INTERVAL, ConfigType.INT, 300_000, "How often they are to push them."),
            ConfigKey(
                MATCH, ConfigType.LIST, (), "Which clients: what it looks at = pattern (RE2). All where it is empty."
            ),
        )
    }
)


class IllegalSubscriptionError(ConfigError):
    """What Kafka answers with INVALID_REQUEST, where other settings have INVALID_CONFIG."""


def subscription_patterns(name: str, configs: Mapping[str, str]) -> list[tuple[str, str]]:
    """Of a subscription with these settings what `match` says, each whole and its expression, which is still to be
    compiled. Raises ConfigError for the first thing that is wrong, in upstream's words and order."""
    if not name:
        raise IllegalSubscriptionError(name, None, "", "Subscription name can't be empty")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ConfigError(name, None, "", f"The name of a subscription has at most {MAX_NAME_BYTES} bytes.")
    for key in configs.keys() - CLIENT_METRICS_CONFIGS.keys():
        raise IllegalSubscriptionError(key, None, "", f"Unknown client metrics configuration: {key}")
    for key, text in configs.items():
        if len(text.encode()) > MAX_VALUE_BYTES:
            raise ConfigError(key, None, "", f"The value of {key} has more than {MAX_VALUE_BYTES} bytes.")
    parsed = {key: CLIENT_METRICS_CONFIGS[key].parse(text) for key, text in configs.items()}
    interval_ms = parsed.get(INTERVAL, MIN_INTERVAL_MS)
    if not isinstance(interval_ms, int) or not MIN_INTERVAL_MS <= interval_ms <= MAX_INTERVAL_MS:
        raise IllegalSubscriptionError(
            INTERVAL,
            None,
            "",
            f"Invalid value {interval_ms} for {INTERVAL}, interval must be between {MIN_INTERVAL_MS} and "
            f"{MAX_INTERVAL_MS} (1 hour)",
        )
    patterns = parsed.get(MATCH, ())
    assert isinstance(patterns, tuple)
    return [(pattern, _expression(pattern)) for pattern in patterns]


def _expression(pattern: str) -> str:
    matched, *expressions = pattern.split("=")
    if matched.strip() not in MATCHED or len(expressions) != 1 or not expressions[0]:
        raise illegal_pattern(pattern)
    return expressions[0].strip()


def illegal_pattern(pattern: str) -> ConfigError:
    return ConfigError(MATCH, pattern, "", f"Illegal client matching pattern: {pattern}")
