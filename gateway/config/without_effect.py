"""Settings of a Kafka broker that have no effect here, as DescribeConfigs lists them: `without_effect.toml`.

The one idea: tools read all of Kafka's settings from a broker, and some tools fail if one is missing. So these settings
are listed with Kafka's default, or with the value that is true of a node if that differs. The documentation of each
says that it has no effect, and why. One that is set is accepted and shown with the given value, and a warning repeats
why nothing changes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from types import MappingProxyType
from typing import NotRequired, TypedDict

from gateway.config.definition import ConfigKey, ConfigType, ConfigValue, Update

NO_EFFECT = "Has no effect here"
_UPDATES = {False: Update.AT_START, True: Update.DYNAMIC, "of one node": Update.OF_ONE_NODE}


class _Facts(TypedDict):
    """One setting in the file."""

    type: str
    default: NotRequired[ConfigValue]
    """Kafka's default."""
    here: NotRequired[ConfigValue]
    """The value that is true for a node, if it differs from Kafka's default."""
    dynamic: NotRequired[bool | str]


def _read() -> Iterator[ConfigKey]:
    text = (resources.files("gateway.config") / "without_effect.toml").read_text("utf-8")
    for part in tomllib.loads(text)["settings"]:
        why = part.pop("why")
        for name, facts in part.items():
            yield _key(name, facts, why)


def _key(name: str, facts: _Facts, why: str) -> ConfigKey:
    shown = facts.get("here", facts.get("default"))
    update = _UPDATES[facts.get("dynamic", False)]
    return ConfigKey(name, ConfigType[facts["type"]], shown, f"{NO_EFFECT}: {why}", update=update)


WITHOUT_EFFECT: Mapping[str, ConfigKey] = MappingProxyType({key.name: key for key in _read()})
"""Settings without effect, by name. `default` is the value that is shown."""
