"""Requests that another node must answer: forwarded unchanged, for clients of a shared listener.

The one idea: a client's connection has one connection of its own to each node that it needs (`upstream.py`). So the
called node sees members, their order and the client's end as if the client had connected there. This module is between
the connection and dispatch. A `Router` finds the node for each frame. This node's dispatch serves all other requests.

If the node does not respond, the client gets the code that its API has for an outage of Postgres, and tries again.
This node does not repeat a request: an older commit of offsets could overtake a newer one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog

from gateway.net.context import ConnectionInfo
from gateway.net.errors import UNAVAILABLE_CODES
from gateway.net.holdings import Holdings, Share
from gateway.net.requests import Admission, Order, Requests
from gateway.net.upstream import Called, Upstream, UpstreamError
from gateway.operate.metrics import Metrics
from protocol.api_keys import ApiKey
from protocol.buffer import Buffer
from protocol.errors import ErrorCode, KafkaError
from protocol.framing import SCRATCH_BYTES, Frame
from storage.types import Node, NodeId

logger = structlog.stdlib.get_logger(__name__)

LOG_INTERVAL_S = 1.0
SEARCHED_BYTES = 64 * 1024
"""Length of the head of a response in which a refusal is searched for. Only responses with records are longer."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A request that one other node answers."""

    node: Node | None
    """None if this node does not know which node that is."""
    group_ids: Sequence[str] = ()
    """The groups whose coordinator the node is."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a request that one node answers."""

    node: Node | None
    """None for this node."""
    frame: Frame
    group_ids: Sequence[str] = ()


class Several(Protocol):
    """A request that may concern several nodes."""

    async def parts(self, frame: Frame) -> list[Part]:
        """Return the parts, at least one."""
        ...

    async def merged(self, frame: Frame, answers: Sequence[bytes], holdings: Holdings) -> Sequence[Buffer]:
        """Return the response to the whole request from the responses to its parts. Raise KafkaError if it is too
        large."""
        ...


class Router(Protocol):
    def route(self, frame: Frame) -> Whole | Several | None:
        """Return where the request goes; None: to this node. It must not wait, because requests keep their order."""
        ...

    def outlives_client(self, frame: Frame) -> bool:
        """Return whether the request is forwarded although its client has gone. The client may have repeated it through
        another node while this node was frozen, and no lease of this node fences it."""
        ...

    async def refresh(self, group_ids: Sequence[str]) -> None:
        """Read anew which nodes are alive, and which of them coordinate the groups."""
        ...


class Forwarder:
    """Handler of the requests of shared listeners."""

    def __init__(
        self, requests: Requests, router: Router, call: Callable[[Node], Called | None], metrics: Metrics
    ) -> None:
        """`requests` serves the requests that are not forwarded. `call` returns how a node is called; None if it
        cannot be called."""
        self._requests = requests
        self._router = router
        self._call = call
        self._metrics = metrics
        self._scratch = bytearray(SCRATCH_BYTES)
        self._upstreams: set[Upstream] = set()
        self._of_connection: dict[str, dict[NodeId, Upstream]] = {}
        self._is_draining = False
        self._logged_s = float("-inf")
        metrics.upstreams.set_function(lambda: self.upstreams)

    @property
    def upstreams(self) -> int:
        """Number of connections to other nodes."""
        return len(self._upstreams)

    def admission(self, frame: Frame) -> Admission:
        return self._requests.admission(frame)

    async def refuse(self, frame: Frame, code: ErrorCode, message: str | None) -> Sequence[Buffer]:
        return await self._requests.refuse(frame, code, message)

    def handle(self, frame: Frame, connection: ConnectionInfo) -> Coroutine[object, None, Sequence[Buffer]]:
        route = self._router.route(frame)
        if route is None:
            return self._requests.handle(frame, connection)
        return self._forward(route, frame, connection)

    def drop_gone(self, alive: Collection[Node]) -> None:
        """End the connections to nodes that are no longer alive. A host that has vanished closes none. Call this
        regularly."""
        processes = {(node.node_id, node.incarnation) for node in alive}
        for upstream in list(self._upstreams):
            if (upstream.node.node_id, upstream.node.incarnation) not in processes:
                upstream.fail("the node is not alive")

    def drain(self) -> None:
        """Refuse the requests that wait at other nodes for other clients or for data, now and from now on, because this
        node stops. Tell these nodes, so that they do not take the clients for gone."""
        self._is_draining = True
        for upstream in self._upstreams:
            upstream.give_up_parked()
            upstream.say_farewell()

    # --- one request ----------------------------------------------------------------------------------------------

    def _send(self, node: Node | None, frame: Frame, connection: ConnectionInfo) -> asyncio.Future[Frame]:
        called = None if node is None else self._call(node)
        if node is None or called is None:
            failed: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
            failed.set_exception(UpstreamError("no node is known that could answer"))
            return failed
        upstream = self._upstream(called, connection)
        answer = upstream.send(frame, is_parked=self.admission(frame).order is Order.PARKED)
        if self._is_draining:
            upstream.give_up_parked()
        if connection.peer_gone:
            upstream.finish()
        return answer

    def _upstream(self, called: Called, connection: ConnectionInfo) -> Upstream:
        of_client = self._of_connection.setdefault(connection.connection_id, {})
        upstream = of_client.get(called.node.node_id)
        if upstream is None or not upstream.is_open:
            upstream = Upstream(called, connection, self._scratch, partial(self._ended, connection.connection_id))
            self._upstreams.add(upstream)
            of_client[called.node.node_id] = upstream
            connection.when_gone = partial(self._gone, connection.connection_id)
        return upstream

    def _gone(self, connection_id: str) -> None:
        for upstream in list(self._of_connection.get(connection_id, {}).values()):
            upstream.finish()

    def _ended(self, connection_id: str, upstream: Upstream) -> None:
        self._upstreams.discard(upstream)
        of_client = self._of_connection.get(connection_id, {})
        if of_client.get(upstream.node.node_id) is upstream:
            del of_client[upstream.node.node_id]
        if not of_client:
            self._of_connection.pop(connection_id, None)

    async def _forward(self, route: Whole | Several, frame: Frame, connection: ConnectionInfo) -> Sequence[Buffer]:
        # All requests wait for one turn of the event loop, so they keep their order.
        await asyncio.sleep(0)  # The end of the connection may lie behind the request.
        if connection.peer_gone and not self._router.outlives_client(frame):
            logger.info("a request was not forwarded because its client has gone", api=_api_name(frame))
            connection.skipped = True
            return ()
        if isinstance(route, Whole):
            return await self._answered(self._send(route.node, frame, connection), frame, route.group_ids)
        return await self._merged(route, frame, connection)

    async def _answered(
        self, answer: asyncio.Future[Frame], frame: Frame, group_ids: Sequence[str]
    ) -> Sequence[Buffer]:
        api_name = _api_name(frame)
        self._metrics.forwarded_requests.labels(api_name).inc()
        try:
            response = await answer
        except UpstreamError as error:
            self._metrics.forwarding_failed.labels(api_name).inc()
            self._log(error, api_name)
            await self._router.refresh(group_ids)
            code = UNAVAILABLE_CODES.get(ApiKey[api_name.upper()], ErrorCode.REQUEST_TIMED_OUT)
            return await self._requests.refuse(frame, code, "the node that must answer cannot be reached")
        if _may_refuse(response):
            # Other bytes may look like this code. Then the answer is only late by one read.
            await self._router.refresh(group_ids)
        return (len(response).to_bytes(4, "big"), response)

    async def _merged(self, several: Several, frame: Frame, connection: ConnectionInfo) -> Sequence[Buffer]:
        parts = await several.parts(frame)
        if len(parts) == 1:
            return await self._part(parts[0], connection)
        held, held_bytes, is_over = Share(connection.holdings), 0, False

        async def answered(part: Part) -> Sequence[Buffer]:
            nonlocal held_bytes
            chunks = await self._part(part, connection)
            held_bytes += sum(map(len, chunks))
            if not is_over:  # another part may have failed
                held.become(held_bytes)
            return chunks

        try:
            chunks = await asyncio.gather(*map(answered, parts))
            return await several.merged(frame, [b"".join(each)[4:] for each in chunks], connection.holdings)
        except KafkaError as error:
            return await self._requests.refuse(frame, error.code, error.message)
        finally:
            is_over = True
            held.become(0)

    async def _part(self, part: Part, connection: ConnectionInfo) -> Sequence[Buffer]:
        if part.node is None:
            return await self._requests.handle(part.frame, connection)
        return await self._answered(self._send(part.node, part.frame, connection), part.frame, part.group_ids)

    def _log(self, error: UpstreamError, api_name: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._logged_s + LOG_INTERVAL_S:
            self._logged_s = now_s
            logger.warning("a request could not be forwarded: its client tries again", api=api_name, why=str(error))


def _api_name(frame: Frame) -> str:
    return ApiKey(frame[0] << 8 | frame[1]).name.lower()


_REFUSAL = int(ErrorCode.NOT_COORDINATOR).to_bytes(2, "big")


def _may_refuse(response: Frame) -> bool:
    """Return whether a response may contain the refusal of a node that no longer coordinates the group."""
    return response.find(_REFUSAL, 4, SEARCHED_BYTES) >= 0
