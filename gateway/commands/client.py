"""A Kafka client for commands: one request after the other, to a broker that can answer it.

The one idea: a command asks `Cluster` and gets a response or a `CommandError` that says what to do next. It speaks only
Kafka's protocol, so every command works with any broker. It first asks the broker which versions it serves, and uses
the highest that both know. Every wait is bounded by the command's timeout.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TypeVar

from gateway.commands.arguments import Address
from gateway.commands.errors import CommandError, PassingError, UnreachableError
from gateway.commands.refusals import code_name, reason
from gateway.commands.security import ClientSecurity
from gateway.config.suggestions import SUGGESTIONS, did_you_mean
from protocol import codec
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, ProtocolError
from protocol.headers import RequestHeader, decode_response_header, encode_request_header
from protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse, MetadataResponseTopic
from protocol.schema import MessageSchema, message_schema

T = TypeVar("T")
R = TypeVar("R")
"""Class of a response."""

CLIENT_ID = "sluice-cli"
MAX_ANSWER_BYTES = 512 * 1024 * 1024
PASSING_CODES = frozenset(
    {
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.CONCURRENT_TRANSACTIONS,
    }
)
"""Errors that disappear without an action, usually within a second."""

_RETRY_DELAY_S = 0.1
_SHOWN_WITHIN_S = 2.0
_TLS_ALERT = b"\x15\x03"


class Coordinated(IntEnum):
    """Kinds of keys that have a coordinator, with Kafka's numbers."""

    GROUP = 0
    TRANSACTION = 1


class _Connection:
    """One socket to one broker, and the API versions that this broker serves."""

    def __init__(self, address: Address, deadline: float, security: ClientSecurity) -> None:
        self._address = address
        self._security = security
        self._correlation_id = 0
        try:
            self._socket = socket.create_connection(address, timeout=_left(deadline))
        except (OSError, ValueError, OverflowError) as error:  # a host that is no name, or a port that no host has
            raise UnreachableError(f"{_shown(address)} cannot be reached: {error}") from error
        try:
            self._socket = security.wrap(self._socket, address[0])
        except OSError as error:
            self._socket.close()
            said = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else str(error)
            advice = security.advice(error)
            raise CommandError(f"{_shown(address)}: the TLS handshake failed: {said}; {advice}") from error
        answer = self._ask(ApiVersionsResponse, ApiVersionsRequest(), 0, deadline)
        if answer.error_code:
            raise CommandError(f"{_shown(address)} answers ApiVersions with {code_name(answer.error_code)}")
        self._served = {line.api_key: (line.min_version, line.max_version) for line in answer.api_keys}
        if security.mechanism is not None:
            self._authenticate(security, security.mechanism, deadline)

    def _authenticate(self, security: ClientSecurity, mechanism: str, deadline: float) -> None:
        from protocol.messages.sasl_authenticate import SaslAuthenticateRequest, SaslAuthenticateResponse
        from protocol.messages.sasl_handshake import SaslHandshakeRequest, SaslHandshakeResponse

        handshake = self._ask(SaslHandshakeResponse, SaslHandshakeRequest(mechanism=mechanism), 1, deadline)
        if handshake.error_code:
            file, enabled = security.file, " or ".join(handshake.mechanisms)
            step = (
                f"set sasl.mechanism to {enabled}" if enabled else "the listener has no SASL: check security.protocol"
            )
            raise CommandError(f"{_shown(self._address)} answers {code_name(handshake.error_code)}; {step} in {file}")

        def send(token: bytes) -> bytes:
            answer = self.ask(SaslAuthenticateResponse, SaslAuthenticateRequest(auth_bytes=token), deadline, None)
            if answer.error_code:
                said = answer.error_message or code_name(answer.error_code)
                step = f"check username and password in {security.file}"
                raise CommandError(f"{_shown(self._address)}: {said.rstrip('.')}; {step}")
            return answer.auth_bytes

        security.authenticate(send)

    def serves(self, api_key: ApiKey, version: int | None = None) -> bool:
        lowest, highest = self._served.get(api_key, (0, -1))
        return lowest <= (highest if version is None else version) <= highest

    def ask(self, response_type: type[R], request: object, deadline: float, at_most: int | None) -> R:
        schema = _schema(request)
        ours = schema.versions
        lowest, highest = self._served.get(schema.api_key, (0, -1))
        version = min(highest, ours.highest if at_most is None else min(at_most, ours.highest))
        if version < max(lowest, ours.lowest):
            raise CommandError(
                f"{_shown(self._address)} serves no version of {schema.api_key.name} that this command knows"
            )
        return self._ask(response_type, request, version, deadline)

    def _ask(self, response_type: type[R], request: object, version: int, deadline: float) -> R:
        api_key = _schema(request).api_key
        self._correlation_id += 1
        header = encode_request_header(RequestHeader(int(api_key), version, self._correlation_id, CLIENT_ID))
        try:
            frame = header + b"".join(codec.encode(request, version))
        except ValueError as error:  # for example a number of more than 32 bits, or a name that is not UTF-8
            raise CommandError(f"a value does not fit into a request: {error}") from error
        try:
            self._socket.settimeout(_left(deadline))
            self._socket.sendall(len(frame).to_bytes(4, "big") + frame)
            answer = self._receive(deadline)
        except OSError as error:
            advice = self._security.advice(error)
            raise PassingError(f"{_shown(self._address)} did not answer {api_key.name}: {error}; {advice}") from error
        try:
            correlation_id, position = decode_response_header(api_key, version, answer)
            response, _ = codec.decode(response_type, version, answer, position)
        except ProtocolError as error:
            raise CommandError(f"{_shown(self._address)} sends an unreadable answer to {api_key.name}") from error
        if correlation_id != self._correlation_id:
            raise CommandError(f"{_shown(self._address)} answers a request that was not sent")
        return response

    def _receive(self, deadline: float) -> bytes:
        head = self._exactly(4, deadline)
        if head.startswith(_TLS_ALERT):
            raise ConnectionResetError("it speaks TLS")
        size_bytes = int.from_bytes(head, "big", signed=True)
        if not 0 <= size_bytes <= MAX_ANSWER_BYTES:
            raise CommandError(
                f"{_shown(self._address)} does not speak Kafka's protocol: name a broker with --bootstrap HOST:PORT"
            )
        return self._exactly(size_bytes, deadline)

    def _exactly(self, size_bytes: int, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < size_bytes:
            self._socket.settimeout(_left(deadline))
            part = self._socket.recv(min(size_bytes - len(received), 1 << 20))
            if not part:
                raise ConnectionResetError("the connection was closed")
            received += part
        return bytes(received)

    @property
    def is_closed(self) -> bool:
        """True if the broker has closed the connection since its last response. A broker sends nothing unrequested."""
        polled = select.poll()
        polled.register(self._socket, select.POLLIN)
        return bool(polled.poll(0))

    def close(self) -> None:
        self._socket.close()


class Cluster:
    """The brokers behind a bootstrap list. `timeout_s` bounds each request, retries included."""

    def __init__(
        self, bootstrap: Sequence[Address], *, timeout_s: float, security: ClientSecurity | None = None
    ) -> None:
        self.bootstrap = tuple(bootstrap)
        self.security = security or ClientSecurity()
        self._timeout_s = timeout_s
        self._connections: dict[Address, _Connection] = {}
        self._brokers: dict[int, Address] = {}
        self._first: Address | None = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # --- questions ----------------------------------------------------------------------------------------------------

    def ask(
        self, response_type: type[R], request: object, *, node_id: int | None = None, at_most: int | None = None
    ) -> R:
        """Return the response of a broker; of any broker if `node_id` is None. `at_most` bounds the version.
        `response_type` is the class of the response to this request."""
        deadline = time.monotonic() + self._timeout_s
        # A broker closes idle connections after some minutes, and every connection when it restarts.
        for closed in [each for each, connection in self._connections.items() if connection.is_closed]:
            self._forget(closed)
        address = self._any(deadline) if node_id is None else self._address(node_id)
        try:
            return self._connection(address, deadline).ask(response_type, request, deadline, at_most)
        except CommandError as error:
            self._forget(address)
            if node_id is not None and isinstance(error, UnreachableError):
                step = "set advertised.listeners of that broker to an address that this machine reaches"
                raise PassingError(f"{error}; broker {node_id} advertises this address: {step}") from error
            raise

    def ask_controller(self, response_type: type[R], request: object) -> R:
        """Return the response of the controller. It alone changes topics in clusters of old Kafka."""
        return self.ask(response_type, request, node_id=self.metadata(()).controller_id)

    def serves(self, api_key: ApiKey, version: int | None = None) -> bool:
        """Return whether the first broker serves an API, in a certain version if one is given."""
        deadline = time.monotonic() + self._timeout_s
        return self._connection(self._any(deadline), deadline).serves(api_key, version)

    def ask_coordinator(
        self,
        response_type: type[R],
        key: str,
        request: object,
        code: Callable[[R], int],
        *,
        kind: Coordinated = Coordinated.GROUP,
        at_most: int | None = None,
    ) -> R:
        """Return the response of the coordinator of a group or of a transactional id. Repeat the request while
        `code(response)` is an error that passes by itself."""

        def attempt() -> R:
            return self.ask(response_type, request, node_id=self._coordinator(key, kind), at_most=at_most)

        return self.until_settled(attempt, code)

    def metadata(self, topics: Sequence[str] | None = None) -> MetadataResponse:
        """Return brokers and topics, all topics if `topics` is None, without creating any."""
        wanted = None if topics is None else tuple(MetadataRequestTopic(name=name) for name in topics)
        request = MetadataRequest(
            topics=wanted, allow_auto_topic_creation=False, include_topic_authorized_operations=False
        )
        response = self.ask(MetadataResponse, request)
        self._brokers = {broker.node_id: (broker.host, broker.port) for broker in response.brokers}
        return response

    def topics(self, names: Sequence[str]) -> list[MetadataResponseTopic]:
        """Return the named topics; raise CommandError if one does not exist."""

        def unsettled(response: MetadataResponse) -> int:
            return next((topic.error_code for topic in response.topics if topic.error_code), 0)

        response = self.until_settled(lambda: self.metadata(names), unsettled)
        for topic in response.topics:
            if topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise CommandError(self.no_topic(topic.name or ""))
            refuse(topic.error_code, f"topic {topic.name}", needs=f"--operation describe --topic {topic.name}")
        return list(response.topics)

    def no_topic(self, name: str) -> str:
        """Return the error for a missing topic, with the names that resemble the given one."""
        known = [topic.name for topic in self.metadata().topics if topic.name]
        return f"there is no topic {name}{did_you_mean(name, known, SUGGESTIONS)}"

    @property
    def node_ids(self) -> list[int]:
        """Ids of the brokers in the last Metadata answer."""
        if not self._brokers:
            self.metadata(())
        return sorted(self._brokers)

    # --- ways to a broker ---------------------------------------------------------------------------------------------

    def _coordinator(self, key: str, kind: Coordinated) -> int:
        from protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse

        def code(response: FindCoordinatorResponse) -> int:
            return response.coordinators[0].error_code if response.coordinators else response.error_code

        request = FindCoordinatorRequest(key=key, key_type=kind, coordinator_keys=(key,))
        response = self.until_settled(lambda: self.ask(FindCoordinatorResponse, request), code)
        if code(response):
            what = "group" if kind is Coordinated.GROUP else "transactional id"
            option = "--group" if kind is Coordinated.GROUP else "--transactional-id"
            why = reason(code(response), needs=f"--operation describe {option} {key}")
            raise CommandError(f"{what} {key} has no coordinator: {why}")
        found = response.coordinators[0] if response.coordinators else response
        self._brokers[found.node_id] = (found.host, found.port)
        return found.node_id

    def until_settled(self, attempt: Callable[[], T], code: Callable[[T], int]) -> T:
        """Return the first response of `attempt` that has no error which passes by itself, or the last in time."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            response = attempt()
            if code(response) not in PASSING_CODES or time.monotonic() + _RETRY_DELAY_S > deadline:
                return response
            time.sleep(_RETRY_DELAY_S)

    def until_shown(self, look: Callable[[], T], is_shown: Callable[[T], bool]) -> T:
        """Return the first result of `look` that shows a change, or the last after two seconds. Kafka confirms a change
        a moment before its brokers show it."""
        deadline = time.monotonic() + _SHOWN_WITHIN_S
        while True:
            found = look()
            if is_shown(found) or time.monotonic() > deadline:
                return found
            time.sleep(_RETRY_DELAY_S)

    def _address(self, node_id: int) -> Address:
        if node_id not in self._brokers:
            self.metadata(())
        if node_id not in self._brokers:
            known = ", ".join(map(str, self.node_ids))
            raise CommandError(f"there is no broker {node_id}; the brokers are {known}")
        return self._brokers[node_id]

    def _any(self, deadline: float) -> Address:
        if self._first is not None:
            return self._first
        reasons: list[str] = []
        found, passes = False, True
        for address in self.bootstrap:
            try:
                self._connection(address, deadline)
            except CommandError as error:
                found = found or not isinstance(error, UnreachableError)
                passes = passes and isinstance(error, PassingError)
                reasons.append(str(error))
                continue
            self._first = address
            return address
        advice = "" if found else "; name a broker that runs with --bootstrap HOST:PORT"
        raise (PassingError if passes else CommandError)("; ".join(reasons) + advice)

    def _connection(self, address: Address, deadline: float) -> _Connection:
        if address not in self._connections:
            self._connections[address] = _Connection(address, deadline, self.security)
        return self._connections[address]

    def _forget(self, address: Address) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()
        if self._first == address:
            self._first = None


def _schema(request: object) -> MessageSchema:
    return message_schema(type(request))


def refuse(code: int, what: str, *, needs: str = "") -> None:
    """Raise CommandError if a response's code is an error, PassingError if the error passes by itself. `needs` are the
    options of `sluice acls add` that permit the request."""
    if code:
        raise (PassingError if code in PASSING_CODES else CommandError)(f"{what}: {reason(code, needs=needs)}")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise PassingError("no answer in time; give more time by --timeout")
    return left


def _shown(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
