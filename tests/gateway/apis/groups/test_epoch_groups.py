"""The bound on topics that a member may name in a heartbeat, for every type of group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.apis.groups.consumer_groups import consumer_group_heartbeat
from gateway.apis.groups.epoch_groups import MAX_SUBSCRIBED_TOPICS
from gateway.apis.groups.share_groups import share_group_heartbeat
from gateway.config.broker import BrokerConfig
from gateway.net.context import ConnectionInfo
from gateway.net.refusals import DerivedRefusal
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from protocol.messages.share_group_heartbeat import ShareGroupHeartbeatRequest


class _SubmittedError(Exception):
    pass


def context() -> Any:
    async def resolve_all(names: tuple[str, ...]) -> None:
        """Return the known topics without a query."""

    def submit(group_id: str, event: object) -> None:
        raise _SubmittedError

    groups = SimpleNamespace(next_request_id=lambda: 1, submit=submit)
    services = SimpleNamespace(
        catalog=SimpleNamespace(resolve_all=resolve_all),
        groups=groups,
        membership=SimpleNamespace(levels={}),
        settings=SimpleNamespace(broker=BrokerConfig()),
        authorizer=None,
    )
    connection = ConnectionInfo("connection", "/127.0.0.1")
    return SimpleNamespace(services=services, connection=connection, version=1, client_id="c")


@pytest.mark.parametrize(
    ("handler", "api_key", "request_type"),
    [
        (consumer_group_heartbeat, ApiKey.CONSUMER_GROUP_HEARTBEAT, ConsumerGroupHeartbeatRequest),
        (share_group_heartbeat, ApiKey.SHARE_GROUP_HEARTBEAT, ShareGroupHeartbeatRequest),
    ],
)
async def test_subscription_to_too_many_topics_is_refused(handler: Any, api_key: ApiKey, request_type: Any) -> None:
    names = tuple(f"t{number}" for number in range(MAX_SUBSCRIBED_TOPICS + 1))
    few, many = (
        request_type(group_id="g", member_id="m", member_epoch=0, subscribed_topic_names=some)
        for some in (names[1:], names)
    )
    with pytest.raises(_SubmittedError):
        await handler(few, context())
    with pytest.raises(KafkaError) as refused:
        await handler(many, context())
    assert refused.value.code is ErrorCode.POLICY_VIOLATION
    answer: Any = DerivedRefusal(api_key)(many, 1, refused.value.code, refused.value.message)
    assert answer.error_code == ErrorCode.POLICY_VIOLATION
    assert str(MAX_SUBSCRIBED_TOPICS) in answer.error_message
