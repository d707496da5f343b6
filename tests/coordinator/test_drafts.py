"""If a field is added to a group, every step keeps the field's value, although no step mentions it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from gateway.coordinator.classic.draft import Draft as ClassicDraft
from gateway.coordinator.classic.model import Group, GroupState
from gateway.coordinator.cluster import NO_TOPICS
from gateway.coordinator.consumer.draft import Draft as ConsumerDraft
from gateway.coordinator.consumer.model import ConsumerGroup
from gateway.coordinator.consumer.sessions import Deadlines
from gateway.coordinator.facts import MemberId
from gateway.coordinator.settings import ConsumerSettings, Settings, StreamsSettings
from gateway.coordinator.streams.draft import Draft as StreamsDraft
from gateway.coordinator.streams.model import StreamsGroup

KEPT: Mapping[str, Any] = {
    "exists": True,
    "state": GroupState.STABLE,
    # The partitions with unstable offsets follow from their owners.
    "unsettled": (),
}


def filled(kind: type[Any]) -> Any:
    """Return a group in which no field has its default, except the fields in `KEPT`."""
    missing = kind("g")
    return kind(
        **{each.name: KEPT.get(each.name) or other_than(getattr(missing, each.name)) for each in fields(kind)}
        | {name: value for name, value in KEPT.items() if hasattr(missing, name)}
    )


def other_than(default: Any) -> Any:
    match default:
        case bool():
            return not default
        case int():
            return default + 7
        case str():
            return f"{default}7"
        case Deadlines():
            return Deadlines({MemberId("m"): 7})
        case dict():
            return {"m": 7}
        case frozenset():
            return frozenset({"m"})
        case tuple():
            return ("m",)
        case _:
            return "another"


DRAFTS = [
    pytest.param(filled(Group), lambda group: ClassicDraft(group, 0, Settings()), id="classic"),
    pytest.param(
        filled(ConsumerGroup), lambda group: ConsumerDraft(group, 0, ConsumerSettings(), NO_TOPICS), id="consumer"
    ),
    pytest.param(
        filled(StreamsGroup), lambda group: StreamsDraft(group, 0, StreamsSettings(), NO_TOPICS), id="streams"
    ),
]


@pytest.mark.parametrize(("group", "draft"), DRAFTS)
def test_step_keeps_unchanged_fields(group: Any, draft: Any) -> None:
    sealed = draft(group).seal().group
    assert {each.name: getattr(sealed, each.name) for each in fields(group)} == {
        each.name: getattr(group, each.name) for each in fields(group)
    }


@pytest.mark.parametrize(("group", "draft"), DRAFTS)
def test_step_does_not_mutate_its_input(group: Any, draft: Any) -> None:
    """Code that holds the group from before the step still sees it unchanged."""
    being_changed = draft(group)
    declared = type(being_changed).__annotations__
    in_place = [name for name, kind in declared.items() if kind.startswith(("dict[", "set["))]
    assert in_place
    for name in in_place:
        assert getattr(being_changed, name) is not getattr(group, name), name
        assert isinstance(getattr(being_changed, name), dict | set), name
