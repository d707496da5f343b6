"""Settings of a Kafka broker that have no effect here, as DescribeConfigs lists them: `without_effect.toml`.

The one idea: tools read all of Kafka's settings from a broker, and some miss those that are not there. So these are
listed with Kafka's default, or with what is true of a node where that is another value; each says that it has no
effect, and why. None is taken at start nor altered: whoever sets one wants something that would not happen.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

from gateway.config.definition import ConfigKey, ConfigType, Update


def _read() -> Iterator[ConfigKey]:
    text = (resources.files("gateway.config") / "without_effect.toml").read_text("utf-8")
    for part in tomllib.loads(text)["settings"]:
        why = part.pop("why")
        for name, facts in part.items():
            yield _key(name, facts, why)


def _key(name: str, facts: Mapping[str, Any], why: str) -> ConfigKey:
    shown = facts.get("here", facts.get("default"))
    return ConfigKey(name, ConfigType[facts["type"]], shown, f"Has no effect here: {why}", update=Update.FIXED)


WITHOUT_EFFECT: Mapping[str, ConfigKey] = MappingProxyType({key.name: key for key in _read()})
"""By name; `default` is the value that is shown."""
