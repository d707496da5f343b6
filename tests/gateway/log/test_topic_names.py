"""Valid topic names. The rules are the same for every way to create a topic."""

from __future__ import annotations

import pytest

from gateway.apis.admin.new_topics import plan_automatic
from gateway.config.broker_parsing import parse_broker_configs
from gateway.log.topic_names import RenderedNames
from protocol.errors import ErrorCode, KafkaError
from storage.types import NewTopic

BROKER = parse_broker_configs({})


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("__cluster_metadata", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ("a/b", ErrorCode.INVALID_TOPIC_EXCEPTION),
        ("a_b", ErrorCode.INVALID_TOPIC_EXCEPTION),
    ],
)
def test_plan_of_a_topic_with_an_illegal_name_is_refused(name: str, code: ErrorCode) -> None:
    with pytest.raises(KafkaError) as refused:
        plan_automatic(name, BROKER, RenderedNames({"a_b": "a.b"}))
    assert refused.value.code is code


def test_offsets_topic_is_the_same_for_every_way_of_creation() -> None:
    planned = plan_automatic("__consumer_offsets", BROKER, RenderedNames({}))
    assert planned == NewTopic("__consumer_offsets", 50, {"cleanup.policy": "compact"}, internal=True)


def test_kafkas_own_topics_are_internal_for_every_way_of_creation() -> None:
    planned = [plan_automatic(name, BROKER, RenderedNames({})) for name in ("__share_group_state", "orders")]
    assert [plan.internal for plan in planned] == [True, False]
