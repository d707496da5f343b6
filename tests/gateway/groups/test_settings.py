"""The coordinator's view of the settings of many groups. These tests use no Postgres."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.apis.admin.alter_configs import incremental_alter_configs
from gateway.apis.admin.config_resources import ResourceType
from gateway.config.broker_parsing import parse_broker_configs
from gateway.coordinator.handoff import HandoffMode
from gateway.groups.settings import group_settings
from protocol.errors import ErrorCode
from protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from tests.turns import HELD_MS

BROKER = parse_broker_configs({})
SESSION = "consumer.session.timeout.ms"


def test_cost_of_a_change_follows_one_group() -> None:
    configs = {f"group-{number}": {SESSION: "50000", "group.handoff.mode": "off"} for number in range(10_000)}
    began = time.thread_time()
    settings = group_settings(BROKER, configs)
    assert (time.thread_time() - began) * 1000 < HELD_MS
    assert settings.consumer_of["group-7"].session_timeout_ms == 50_000
    assert settings.handoff_of("group-7").mode is HandoffMode.OFF


def test_setting_out_of_bounds_falls_back_to_the_broker() -> None:
    settings = group_settings(BROKER, {"good": {SESSION: "50000"}, "bad": {SESSION: "1"}})
    for of_groups in (settings.consumer_of, settings.share_of, settings.streams_of):
        assert list(of_groups) == ["good"]
        assert len(of_groups) == 1
        assert of_groups.get("bad") is None
        with pytest.raises(KeyError):
            _ = of_groups["bad"]
    assert settings.consumer_of.get("bad", settings.consumer) is settings.consumer
    assert settings.consumer_of.get("good") is settings.consumer_of["good"]
    assert not settings.drains
    assert group_settings(BROKER, {"g": {"group.handoff.mode": "drain"}}).drains


def test_guard_falls_back_to_the_broker() -> None:
    configs = {"on": {"group.cooperative.guard": "true"}, "off": {"group.cooperative.guard": "false"}, "g": {}}
    for broker in (BROKER, parse_broker_configs({"group.cooperative.guard": "true"})):
        settings = group_settings(broker, configs)
        guards = [settings.guards(group_id) for group_id in ("on", "off", "g", "another")]
        assert guards == [True, False, broker.group_cooperative_guard, broker.group_cooperative_guard]


async def test_number_of_groups_with_own_settings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.apis.admin.alter_configs.MAX_GROUPS_WITH_CONFIGS", 2)
    stored: dict[str, dict[str, str]] = {}

    async def refresh() -> None:
        """Do nothing, because no other node changes settings."""

    async def store(group_id: str, changed: dict[str, str], removed: object) -> None:
        stored[group_id] = {**stored.get(group_id, {}), **changed}

    catalog = SimpleNamespace(broker=BROKER, group_configs=stored, refresh_if_changed=refresh)
    services = SimpleNamespace(catalog=catalog, topics=SimpleNamespace(set_group_configs=store), authorizer=None)
    context: Any = SimpleNamespace(services=services)

    async def alter(*group_ids: str) -> list[int]:
        resources = tuple(
            AlterConfigsResource(
                resource_type=ResourceType.GROUP,
                resource_name=group_id,
                configs=(AlterableConfig(name=SESSION, config_operation=0, value="50000"),),
            )
            for group_id in group_ids
        )
        answer = await incremental_alter_configs(IncrementalAlterConfigsRequest(resources=resources), context)
        return [response.error_code for response in answer.responses]

    assert await alter("a", "b", "c") == [ErrorCode.NONE, ErrorCode.NONE, ErrorCode.POLICY_VIOLATION]
    assert await alter("b") == [ErrorCode.NONE]
    assert set(stored) == {"a", "b"}
