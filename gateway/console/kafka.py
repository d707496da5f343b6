"""The way from the console to Kafka's APIs: this node's dispatch, or another node's socket.

The one idea: the console is one more Kafka client. A request passes the stages of every other client's request, so the
authorizer decides about the person who looks exactly as it decides about a consumer. Only the transport differs: a
request to this node needs no socket.

A request to the coordinator of a group on another node goes there by the Kafka protocol, if that node's listener needs
no login. Otherwise the console says which node to ask, because a node has no password of the person who looks.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from gateway.cluster.clock import ClusterClock
from gateway.cluster.membership import Membership
from gateway.config.settings import Settings
from gateway.groups.groups import Groups
from gateway.log.catalog import Catalog
from gateway.net.context import ANONYMOUS, ConnectionInfo, Principal, RequestContext
from gateway.security.authorizer import HasAuthorizer, may, require
from gateway.security.kinds import CLUSTER_NAME, AclOperation, ResourceType
from protocol import codec
from protocol.api_keys import ApiKey
from protocol.buffer import Buffer
from protocol.errors import ErrorCode, KafkaError, ProtocolError
from protocol.framing import Frame
from protocol.headers import RequestHeader, decode_response_header, encode_request_header
from protocol.schema import message_schema
from storage.types import Node

R = TypeVar("R")
"""Class of a response."""

CLIENT_ID = "sluice-console"
REMOTE_TIMEOUT_S = 10.0
MAX_REMOTE_BYTES = 64 * 1024 * 1024
"""Largest answer that is read from another node."""
AT_ONCE_BYTES = 32 * 1024
"""Bytes of an answer that are decoded on the event loop. A user takes 30 bytes and ten microseconds."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """The person who uses the console: a principal at an address."""

    principal: Principal = ANONYMOUS
    host: str = "/127.0.0.1"

    @property
    def name(self) -> str:
        return str(self.principal)


class ElsewhereError(Exception):
    """Error: only another node can answer, and this node cannot send the request there in the viewer's name."""


class Handles(Protocol):
    def handle(self, frame: Frame, connection: ConnectionInfo) -> Awaitable[Sequence[Buffer]]: ...


class ConsoleServices(HasAuthorizer, Protocol):
    """The parts of the node that the console reads besides its APIs."""

    @property
    def catalog(self) -> Catalog: ...

    @property
    def clock(self) -> ClusterClock: ...

    @property
    def cluster_id(self) -> str: ...

    @property
    def groups(self) -> Groups: ...

    @property
    def membership(self) -> Membership: ...

    @property
    def settings(self) -> Settings: ...


@dataclass(slots=True)
class Kafka:
    """Kafka's APIs of this node and of other coordinators, called in a viewer's name."""

    dispatch: Handles
    services: ConsoleServices
    plain_listeners: frozenset[str]
    """Names of the listeners that need neither TLS nor a login."""
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    # --- permissions --------------------------------------------------------------------------------------------------

    def may(self, who: Viewer, operation: AclOperation, kind: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """Return whether the viewer has the permission. A denial is not counted or logged."""
        return may(self._context(who), operation, kind, name, told=False)

    def require(self, who: Viewer, operation: AclOperation, kind: ResourceType, name: str = CLUSTER_NAME) -> None:
        """Raise KafkaError if the viewer lacks the permission."""
        require(self._context(who), operation, kind, name)

    def _context(self, who: Viewer) -> RequestContext[HasAuthorizer]:
        return RequestContext(ApiKey.METADATA, 0, 0, CLIENT_ID, self._connection(who), self.services)

    def _connection(self, who: Viewer) -> ConnectionInfo:
        listener = next(each.name for each in self.services.settings.listeners)
        return ConnectionInfo(f"console-{secrets.token_hex(8)}", who.host, listener, principal=who.principal)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def ask(self, response_type: type[R], request: object, who: Viewer, *, at_most: int | None = None) -> R:
        """Return this node's response, which is of `response_type`. `at_most` bounds the version.

        Raise KafkaError if the node refuses the request without a response.
        """
        frame, api_key, version = self._frame(request, at_most)
        connection = self._connection(who)
        try:
            chunks = await self.dispatch.handle(frame, connection)
        except ProtocolError as error:
            raise KafkaError(ErrorCode.INVALID_REQUEST, str(error)) from error
        finally:
            self.services.groups.connection_closed(connection.connection_id, by_peer=False)
        # A client above a quota is muted for this time.
        await asyncio.sleep(connection.muted_until_s - asyncio.get_running_loop().time())
        return await _decoded(response_type, b"".join(chunks)[4:], api_key, version)

    async def ask_coordinator(
        self, response_type: type[R], group_id: str, request: object, who: Viewer, *, at_most: int | None = None
    ) -> R:
        """Return the response of the node that coordinates the group.

        Raise KafkaError if no node coordinates it, and ElsewhereError if this node cannot reach that node.
        """
        node = await self.coordinator(group_id)
        if node.node_id == self.services.membership.node_id:
            return await self.ask(response_type, request, who, at_most=at_most)
        return await self._ask_remote(response_type, node, request, at_most)

    async def coordinator(self, group_id: str) -> Node:
        """Return the node that coordinates the group. Raise KafkaError if no node does."""
        (found,) = await self.services.groups.coordinators_of((group_id,))
        if isinstance(found, KafkaError):
            raise found
        return found

    def _frame(self, request: object, at_most: int | None) -> tuple[bytes, ApiKey, int]:
        schema = message_schema(type(request))
        version = schema.versions.highest if at_most is None else min(at_most, schema.versions.highest)
        header = RequestHeader(int(schema.api_key), version, next(self._numbers) & 0x7FFFFFFF, CLIENT_ID)
        return encode_request_header(header) + b"".join(codec.encode(request, version)), schema.api_key, version

    async def _ask_remote(self, response_type: type[R], node: Node, request: object, at_most: int | None) -> R:
        address = next((node.listeners[name] for name in node.listeners if name in self.plain_listeners), None)
        if address is None or self.services.authorizer is not None:
            raise ElsewhereError(
                f"node {node.node_id} coordinates this group, and this node cannot ask it in your name; "
                f"open the console of node {node.node_id}"
            )
        frame, api_key, version = self._frame(request, at_most)
        try:
            async with asyncio.timeout(REMOTE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(*address)
                try:
                    writer.write(len(frame).to_bytes(4, "big") + frame)
                    await writer.drain()
                    size = int.from_bytes(await reader.readexactly(4), "big")
                    if size > MAX_REMOTE_BYTES:
                        raise ElsewhereError(f"node {node.node_id} answered with {size} bytes, which is too much")
                    return await _decoded(response_type, await reader.readexactly(size), api_key, version)
                finally:
                    writer.close()
        except (OSError, EOFError, TimeoutError) as error:
            raise ElsewhereError(
                f"node {node.node_id} at {address[0]}:{address[1]} did not answer: {error or 'timeout'}"
            ) from error


async def _decoded(response_type: type[R], frame: bytes, api_key: ApiKey, version: int) -> R:
    """Decode an answer, in a thread if it is long."""
    if len(frame) > AT_ONCE_BYTES:
        return await asyncio.to_thread(_read, response_type, frame, api_key, version)
    return _read(response_type, frame, api_key, version)


def _read(response_type: type[R], frame: bytes, api_key: ApiKey, version: int) -> R:
    _, position = decode_response_header(api_key, version, frame)
    response, _ = codec.decode(response_type, version, frame, position)
    return response


def refuse(code: int, message: str | None = None, what: Callable[[], str] | None = None) -> None:
    """Raise KafkaError if a response's code is an error."""
    if code:
        try:
            known = ErrorCode(code)
        except ValueError:
            known = ErrorCode.UNKNOWN_SERVER_ERROR
        text = message or known.name
        raise KafkaError(known, text if what is None else f"{what()}: {text}")
