"""Reports of denials: each denial is counted, and the log has a limited number of them per second."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
import structlog.testing

from gateway.building.services import Services
from gateway.cluster.membership import Membership
from gateway.config.broker_clients import STANDARD_AUTHORIZER, principals
from gateway.config.broker_parsing import parse_broker_configs
from gateway.config.definition import ConfigError
from gateway.net.context import ConnectionInfo, Principal, RequestContext
from gateway.operate.loggers import FINEST
from gateway.security import authorizer as authorizing
from gateway.security.acls import Acls
from gateway.security.authorizer import MAX_LINES_PER_S, Authorizer, may
from gateway.security.kinds import AclOperation, ResourceType
from protocol.api_keys import ApiKey
from storage.nodes import NodeStore
from storage.pool import Database


class Time:
    now_s = 10.0

    def monotonic(self) -> float:
        return self.now_s


async def test_refusals_are_counted_and_the_log_is_not_flooded(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    monkeypatch.setattr(authorizing, "time", time)
    counted: Counter[tuple[ResourceType, AclOperation]] = Counter()
    nobody = Authorizer(
        Acls, frozenset(), allow_everyone=False, denied=lambda kind, operation: counted.update([(kind, operation)])
    )
    services = cast("Services", type("Services", (), {"authorizer": nobody}))
    context = RequestContext(ApiKey.FETCH, 12, 1, "c", ConnectionInfo("c", "/10.0.0.1"), services)

    def ask(times: int, *, told: bool = True) -> list[Any]:
        with structlog.testing.capture_logs() as lines:
            for _ in range(times):
                assert not may(context, AclOperation.READ, ResourceType.TOPIC, "t", told=told)
        return lines

    assert ask(3, told=False) == []
    (line,) = ask(1)
    assert line == {
        "event": "denied",
        "log_level": "info",
        "principal": "User:ANONYMOUS",
        "operation": "READ",
        "host": "10.0.0.1",
        "resource": "TOPIC:LITERAL:t",
        "request": "FETCH",
    }
    with structlog.testing.capture_logs() as lines:
        assert not may(context, AclOperation.READ, ResourceType.GROUP, "g" * 30_000)
    assert lines[0]["resource"] == "GROUP:LITERAL:" + "g" * 249
    assert len(ask(100)) == MAX_LINES_PER_S - 2
    time.now_s += 1
    more, _ = ask(1)
    assert (more["event"], more["times"]) == ("more denied", 102 - MAX_LINES_PER_S)
    assert counted.pop((ResourceType.GROUP, AclOperation.READ)) == 1
    assert counted == {(ResourceType.TOPIC, AclOperation.READ): 102}


async def test_allowed_requests_are_logged_at_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    everybody = Authorizer(Acls, frozenset(), allow_everyone=True)
    services = cast("Services", type("Services", (), {"authorizer": everybody}))
    context = RequestContext(ApiKey.FETCH, 12, 1, "c", ConnectionInfo("c", "/10.0.0.1"), services)
    with structlog.testing.capture_logs() as lines:
        assert may(context, AclOperation.READ, ResourceType.TOPIC, "t")
        assert lines == []
        monkeypatch.setattr(FINEST, "is_debug", True)
        assert may(context, AclOperation.READ, ResourceType.TOPIC, "t")
    (line,) = lines
    assert (line["event"], line["log_level"], line["operation"]) == ("allowed", "debug", "READ")
    assert (line["principal"], line["resource"]) == ("User:ANONYMOUS", "TOPIC:LITERAL:t")


def test_super_users() -> None:
    assert principals(" User:a; User:CN=b,O=c;;") == {"User:a", "User:CN=b,O=c"}
    for wrong in ("alice", "User:", ":alice"):
        with pytest.raises(ConfigError, match=f"principalType:principalName but got {wrong}"):
            parse_broker_configs({"super.users": wrong})


def test_one_authorizer_is_served() -> None:
    with pytest.raises(ConfigError):
        parse_broker_configs({"authorizer.class.name": "kafka.security.authorizer.AclAuthorizer"})


async def test_nodes_with_different_authorizers_log_that_once(database_url: str) -> None:
    database = await Database.open(database_url, hot_connections=1, cold_connections=1)
    try:
        nodes = [
            Membership(NodeStore(database), {"PLAINTEXT": ("127.0.0.1", port)}, None, 60_000, authorizer=authorizer)
            for port, authorizer in ((1, STANDARD_AUTHORIZER), (2, ""), (3, STANDARD_AUTHORIZER))
        ]
        first, second, third = nodes
        with structlog.testing.capture_logs() as lines:
            for node in nodes:
                await node.join()
            for node in (*nodes, *nodes):
                await node.renew()
    finally:
        await database.close()
    told = [(line["here"], line["others"]) for line in lines if "disagree" in line["event"]]
    by_first, by_third = {second.node_id: ""}, {first.node_id: STANDARD_AUTHORIZER}
    assert told == [
        ("", by_third),
        (STANDARD_AUTHORIZER, by_first),
        (STANDARD_AUTHORIZER, by_first),
        ("", {**by_third, third.node_id: STANDARD_AUTHORIZER}),
    ]


def test_users_and_tokens_need_an_acl() -> None:
    """Without this rule any authenticated client could create a token of any other user, super users included, and
    authenticate with it.
    """
    everybody = Authorizer(Acls, frozenset({"User:root"}), allow_everyone=True)
    alice, root = (ConnectionInfo("c", "/10.0.0.1", principal=Principal(name)) for name in ("alice", "root"))
    for kind, operation in (
        (ResourceType.USER, AclOperation.CREATE_TOKENS),
        (ResourceType.USER, AclOperation.DESCRIBE_TOKENS),
        (ResourceType.DELEGATION_TOKEN, AclOperation.DESCRIBE),
    ):
        assert not everybody.allows(alice, operation, kind, "User:root")
        assert everybody.allows(root, operation, kind, "User:root")
    assert everybody.allows(alice, AclOperation.READ, ResourceType.TOPIC, "t")
