"""The broker settings that change what a node does, under Kafka's names and with Kafka's defaults.

The one idea: a setting that the gateway obeys is a typed field of `BrokerConfig`. The fields lie in three modules:
`broker_groups.py`, `broker_log.py` and `broker_clients.py`. `broker_table.py` finds settings by name, also those that a
node only shows. `broker_parsing.py` makes a `BrokerConfig` of texts. None of these modules knows where values come from
(`gateway/config/settings.py`) nor who stores the dynamic ones (`storage/topics.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.config.broker_clients import ClientSettings
from gateway.config.broker_groups import GroupSettings
from gateway.config.broker_log import LogSettings

NODE_ID_NAMES = ("node.id", "broker.id")
"""Names of the setting for the node's id. The first one that is set counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig(ClientSettings, LogSettings, GroupSettings):
    """Every broker setting that changes what the gateway does, typed. Built by `broker_parsing.py`."""

    static: Mapping[str, str] = field(default_factory=dict[str, str])
    """Settings given at start, by Kafka's names, as texts. Never mutated."""
    dynamic: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts that AlterConfigs stored for all nodes, by Kafka's names. Never mutated."""
    own: Mapping[str, str] = field(default_factory=dict[str, str])
    """Settings that AlterConfigs stored for this node alone, as texts. They override all others. Never mutated."""

    @property
    def node_id(self) -> int | None:
        """The only id that the node may have. None if the cluster assigns an id."""
        given = [self.static[name] for name in NODE_ID_NAMES if name in self.static]
        return int(given[0]) if given else None

    def is_given(self, name: str) -> bool:
        """Return whether the setting was set, at start or by AlterConfigs."""
        return name in self.static or name in self.dynamic or name in self.own
