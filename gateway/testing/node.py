"""The node of a test server, and the actions that a test asks of it.

The one idea: an action is a method of `TestNode` whose name is in `ACTIONS`; its arguments come from JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from gateway.app import App, StartError
from gateway.commands.client import Cluster, refuse
from gateway.config.errors import ConfigurationError
from gateway.config.settings import load
from gateway.log.topic_names import INTERNAL_TOPICS
from gateway.testing.faults import Faults
from gateway.testing.members import Members
from protocol.errors import ErrorCode
from protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest, CreateTopicsResponse
from protocol.messages.delete_groups import DeleteGroupsRequest, DeleteGroupsResponse
from protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse, DeleteTopicState

T = TypeVar("T")

OPTIONS = {
    "metrics-listen": "off",
    "tail-bytes": str(16 * 1024 * 1024),
    "hot-connections": "3",
    "cold-connections": "2",
    "drain-ms": "100",
}
BROKER_SETTINGS = (
    # A test waits for each of these.
    "group.initial.rebalance.delay.ms=0",
    "group.streams.initial.rebalance.delay.ms=0",
    "console.listen=",
    *(f"group.{kind}.min.heartbeat.interval.ms=100" for kind in ("consumer", "share", "streams")),
    *(f"group.{kind}.heartbeat.interval.ms=300" for kind in ("consumer", "share", "streams")),
)
ACTION_SECONDS = 30.0
ACTIONS = frozenset(
    {"create_topic", "reset", "heal", "members", "lose_member", "rebalance", "fail_next", "slow", "restart"}
)


class TestNode:
    """One node; `start` once, `stop` once."""

    __test__ = False  # pytest takes classes of this name for tests

    def __init__(self, url: str, listen: str, assignments: Sequence[str]) -> None:
        """Take the database's URL, the address to serve on and the test's own broker settings. Raise ValueError."""
        self._url = url
        self._listen = listen
        self._assignments = (*BROKER_SETTINGS, *assignments)
        self._faults = Faults()
        self._app: App | None = None
        self._client: Cluster | None = None
        self._turn = asyncio.Lock()
        """The client asks one question at a time."""

    @property
    def bootstrap(self) -> str:
        return self._started.bootstrap

    @property
    def _started(self) -> App:
        assert self._app is not None, "the node has not been started"
        return self._app

    @property
    def _members(self) -> Members:
        groups = self._started.groups
        assert groups is not None, "the node does not serve"
        return Members(groups)

    async def start(self) -> None:
        """Return once the node serves. Raise ValueError with the reason if it cannot."""
        flags = {**OPTIONS, "listen": self._listen, "database-url": self._url}
        try:
            settings = load(flags, self._assignments, {}).settings
        except ConfigurationError as error:
            raise ValueError(str(error)) from error
        self._app = App(settings, self._faults)
        try:
            await self._app.start()
        except StartError as error:
            raise ValueError(str(error)) from error
        self._listen = self._app.bootstrap
        host, _, port = self._listen.rpartition(":")
        self._client = Cluster([(host, int(port))], timeout_s=ACTION_SECONDS)

    async def stop(self) -> None:
        if self._client is not None:
            self._client.__exit__()
        if self._app is not None:
            await self._app.stop()

    # --- actions --------------------------------------------------------------------------------------------------

    async def do(self, action: str, arguments: dict[str, object]) -> object:
        """Carry out an action and return a value for JSON. Raise the action's error."""
        if action not in ACTIONS:
            raise ValueError(f"a test server has no action {action}")
        return await getattr(self, action)(**arguments)

    async def create_topic(self, name: str, partitions: int) -> None:
        topic = CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
        request = CreateTopicsRequest(topics=(topic,), timeout_ms=int(ACTION_SECONDS * 1000))
        response = await self._ask(CreateTopicsResponse, request)
        refuse(response.topics[0].error_code, f"topic {name}")

    async def reset(self) -> None:
        """End all faults, and delete every group and topic. A group's members are dropped first."""
        self._faults.clear()
        await asyncio.gather(self._delete_groups(), self._delete_topics())

    async def _delete_groups(self) -> None:
        async def delete(group_ids: Sequence[str]) -> dict[str, ErrorCode]:
            response = await self._ask(DeleteGroupsResponse, DeleteGroupsRequest(groups_names=tuple(group_ids)))
            return {result.group_id: ErrorCode(result.error_code) for result in response.results}

        await self._members.delete_groups(delete, ACTION_SECONDS)

    async def _delete_topics(self) -> None:
        metadata = await self._in_turn(self._cluster.metadata)
        names = [topic.name for topic in metadata.topics if topic.name and topic.name not in INTERNAL_TOPICS]
        if not names:
            return
        response = await self._ask(
            DeleteTopicsResponse,
            DeleteTopicsRequest(
                topics=tuple(DeleteTopicState(name=name) for name in names), timeout_ms=int(ACTION_SECONDS * 1000)
            ),
        )
        for result in response.responses:
            refuse(result.error_code, f"topic {result.name}")

    @property
    def _cluster(self) -> Cluster:
        assert self._client is not None, "the node has not been started"
        return self._client

    async def _ask(self, response_type: type[T], request: object) -> T:
        return await self._in_turn(lambda: self._cluster.ask(response_type, request))

    async def _in_turn(self, question: Callable[[], T]) -> T:
        async with self._turn:
            return await asyncio.to_thread(question)

    async def heal(self) -> None:
        self._faults.clear()

    async def members(self, group: str) -> dict[str, str]:
        return await self._members.of(group)

    async def lose_member(self, group: str, member_id: str | None, timeout_s: float) -> str:
        return await self._members.lose(group, member_id, timeout_s)

    async def rebalance(self, group: str, timeout_s: float) -> None:
        await self._members.rebalance(group, timeout_s)

    async def fail_next(self, api: str, error: str | None, times: int) -> None:
        self._faults.fail_next(api, error, times)

    async def slow(self, api: str, ms: int) -> None:
        self._faults.slow(api, ms)

    async def restart(self) -> None:
        """Stop the node as a rolling restart does, and start it again at the same address."""
        await self.stop()
        await self.start()
