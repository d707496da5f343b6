"""Which node answers a request of a client that cannot choose its node, because all nodes share one address.

The one idea: what a request concerns is in its first fields, so nearly all requests are routed without decoding them.
Requests of groups go to the group's coordinator, and so do those that fetch a share group's records. Requests of a
transactional id go to the node to which FindCoordinator would send the client. Every node answers all others.

A request about several groups is decoded and split, and the responses are merged. ListGroups goes to every node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from gateway.cluster.leases import Leases
from gateway.cluster.membership import Membership
from gateway.net.coding import AT_ONCE_ELEMENTS, decode_anywhere
from gateway.net.dispatch import MAX_STRUCTURED_BYTES, encode_answer
from gateway.net.forwarding import Part, Several, Whole
from gateway.net.holdings import Holdings
from gateway.net.pieces import in_pieces
from gateway.net.shared_read import SharedRead
from gateway.transactions.coordinator import Transactions
from protocol.api_keys import ApiKey
from protocol.buffer import Buffer
from protocol.codec import decode, decode_request, encode, response_class
from protocol.errors import KafkaError, ProtocolError
from protocol.framing import Frame
from protocol.headers import (
    decode_request_header,
    decode_response_header,
    leading_strings,
)
from storage.errors import StorageError
from storage.types import Node

logger = structlog.get_logger(__name__)

MAX_AT_ONCE_BYTES = 64 * 1024
"""Size of a response that is decoded on the event loop."""

REFRESH_S = 0.1
"""Shortest interval between two reads of the coordinators. Clients wait as long before they try again."""
MAX_SPLIT = 20_000
"""Groups of one request. More are left to this node, which refuses those of other nodes."""

GROUP_FIRST = (
    *(ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP, ApiKey.HEARTBEAT, ApiKey.LEAVE_GROUP),
    *(ApiKey.OFFSET_COMMIT, ApiKey.OFFSET_DELETE),
    *(ApiKey.CONSUMER_GROUP_HEARTBEAT, ApiKey.SHARE_GROUP_HEARTBEAT, ApiKey.STREAMS_GROUP_HEARTBEAT),
    ApiKey.STREAMS_GROUP_TOPOLOGY_DESCRIPTION_UPDATE,
    *(ApiKey.ALTER_SHARE_GROUP_OFFSETS, ApiKey.DELETE_SHARE_GROUP_OFFSETS),
    *(ApiKey.SHARE_FETCH, ApiKey.SHARE_ACKNOWLEDGE),
)
"""APIs whose first field is a group id."""
TRANSACTION_FIRST = (
    *(ApiKey.INIT_PRODUCER_ID, ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.END_TXN),
)
"""APIs whose first field is a transactional id; AddPartitionsToTxn only in the versions of clients."""
LAST_WORDS = frozenset({ApiKey.LEAVE_GROUP, ApiKey.SHARE_ACKNOWLEDGE})
"""Requests that a client may send just before it closes its connection, and that end something."""
LEAVING = frozenset(
    {ApiKey.CONSUMER_GROUP_HEARTBEAT, ApiKey.SHARE_GROUP_HEARTBEAT, ApiKey.STREAMS_GROUP_HEARTBEAT},
)
"""Heartbeats, by which a member leaves if its epoch is negative."""
FIRST_ADD_PARTITIONS_OF_BROKERS, FIRST_OFFSET_FETCH_OF_GROUPS = 4, 8


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields by which requests about several groups are split, and their responses merged."""

    asked: str
    """Field of the request: group ids, or structs with a group id."""
    answered: str
    """Field of the response: structs with a group id."""


SEVERAL = {
    ApiKey.DESCRIBE_GROUPS: Fields("groups", "groups"),
    ApiKey.DELETE_GROUPS: Fields("groups_names", "results"),
    ApiKey.CONSUMER_GROUP_DESCRIBE: Fields("group_ids", "groups"),
    ApiKey.SHARE_GROUP_DESCRIBE: Fields("group_ids", "groups"),
    ApiKey.STREAMS_GROUP_DESCRIBE: Fields("group_ids", "groups"),
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS: Fields("groups", "groups"),
    ApiKey.OFFSET_FETCH: Fields("groups", "groups"),
    ApiKey.LIST_GROUPS: Fields("", "groups"),
}


class GroupRouter:
    """The router of one node (`gateway.net.forwarding.Router`)."""

    def __init__(self, leases: Leases, transactions: Transactions, membership: Membership) -> None:
        self._leases = leases
        self._transactions = transactions
        self._membership = membership
        self._look = SharedRead(membership.look)
        self._refreshed_s = float("-inf")
        self._routes: dict[int, Callable[[Frame], Whole | Several | None]] = {
            **{int(key): _SeveralGroups(key, fields, self._parts).of_request for key, fields in SEVERAL.items()},
            **dict.fromkeys(map(int, GROUP_FIRST), self._by_group),
            **dict.fromkeys(map(int, TRANSACTION_FIRST), self._by_transaction),
            int(ApiKey.TXN_OFFSET_COMMIT): self._by_second_string,
        }
        self._many = self._routes[int(ApiKey.OFFSET_FETCH)]
        self._routes[int(ApiKey.OFFSET_FETCH)] = self._offset_fetch

    def route(self, frame: Frame) -> Whole | Several | None:
        """Return where the request goes; None: to this node, which also refuses malformed requests."""
        if len(frame) < 4:
            return None
        find = self._routes.get(frame[0] << 8 | frame[1])
        return None if find is None or len(frame) > MAX_STRUCTURED_BYTES else find(frame)

    def outlives_client(self, frame: Frame) -> bool:
        """Return whether a request of a client that has gone is still forwarded: only those that end something. A late
        JoinGroup would fence the static member that has taken the client's place, a late heartbeat would count as newer
        than those of the client's next connection, and a late ShareFetch would end the share session there."""
        key = frame[0] << 8 | frame[1]
        if key not in LEAVING:
            return key in LAST_WORDS
        try:
            header, position = decode_request_header(frame)
            return (
                decode_request(key, header.api_version, frame, position, max_elements=AT_ONCE_ELEMENTS).member_epoch < 0
            )
        except ProtocolError:
            return False

    async def refresh(self, group_ids: Sequence[str]) -> None:
        """Read anew which nodes are alive, and which of them coordinate the groups. Do nothing if the node has just
        done so, because it then read the coordinators of all groups."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._refreshed_s + REFRESH_S:
            return
        self._refreshed_s = now_s
        try:
            await self._look.get()
            await self._leases.look_up(group_ids)
        except StorageError as error:
            logger.warning("live nodes not read: Postgres does not answer", error=str(error))

    def _by_group(self, frame: Frame) -> Whole | None:
        return self._coordinator(_string(frame, 1))

    def _by_second_string(self, frame: Frame) -> Whole | None:
        return self._coordinator(_string(frame, 2))

    def _coordinator(self, group_id: str | None) -> Whole | None:
        if not group_id:
            return None
        try:
            node = self._leases.coordinator_of(group_id)
        except KafkaError:
            return Whole(None, (group_id,))
        return None if node.node_id == self._membership.node_id else Whole(node, (group_id,))

    def _by_transaction(self, frame: Frame) -> Whole | None:
        key, version = frame[0] << 8 | frame[1], frame[2] << 8 | frame[3]
        if key == ApiKey.ADD_PARTITIONS_TO_TXN and version >= FIRST_ADD_PARTITIONS_OF_BROKERS:
            return None
        transactional_id = _string(frame, 1)
        if not transactional_id:
            return None
        node = self._transactions.coordinator_of(transactional_id)
        return None if node.node_id == self._membership.node_id else Whole(node)

    def _offset_fetch(self, frame: Frame) -> Whole | Several | None:
        version = frame[2] << 8 | frame[3]
        return self._by_group(frame) if version < FIRST_OFFSET_FETCH_OF_GROUPS else self._many(frame)

    async def _parts(self, group_ids: Sequence[str] | None) -> dict[int, tuple[Node | None, list[int]]]:
        """Return the nodes that coordinate the groups, by id, each with the places of its groups. None stands for all
        groups of all nodes. A group without a known coordinator is left to this node, which refuses it."""
        here = self._membership.node_id
        if group_ids is None:
            return {n.node_id: (None if n.node_id == here else n, []) for n in self._membership.brokers()}
        found: dict[int, tuple[Node | None, list[int]]] = {}
        async for place, group_id in in_pieces(enumerate(group_ids)):
            whole = self._coordinator(group_id)
            node = None if whole is None else whole.node
            found.setdefault(here if node is None else node.node_id, (node, []))[1].append(place)
        return found


_Parts = Callable[[Sequence[str] | None], Any]


@dataclass(frozen=True, slots=True)
class _SeveralGroups:
    """One API about several groups (`gateway.net.forwarding.Several`)."""

    api_key: ApiKey
    fields: Fields
    find: _Parts

    def of_request(self, _frame: Frame) -> _SeveralGroups:
        return self

    async def parts(self, frame: Frame) -> list[Part]:
        try:
            header, position = decode_request_header(frame)
            request, done_with = await decode_anywhere(self.api_key, header.api_version, frame, position)
        except ProtocolError:
            return [Part(None, frame)]
        try:
            asked: Sequence[Any] | None = getattr(request, self.fields.asked) if self.fields.asked else None
            if asked is not None and len(asked) > MAX_SPLIT:
                return [Part(None, frame)]
            ids: list[str] | None = None if asked is None else [_group_id(each) for each in asked]
            parts: list[Part] = []
            for node, places in (await self.find(ids)).values():
                own = frame
                if asked is not None and len(places) < len(asked):
                    some = replace(request, **{self.fields.asked: tuple(asked[place] for place in places)})
                    own = bytes(frame[:position]) + b"".join(encode(some, header.api_version))
                group_ids: list[str] = [] if ids is None else [ids[places[0]]]
                parts.append(Part(node, own, group_ids))
            return parts or [Part(None, frame)]
        finally:
            if done_with is not None:
                done_with()

    async def merged(self, frame: Frame, answers: Sequence[bytes], holdings: Holdings) -> Sequence[Buffer]:
        header, _ = decode_request_header(frame)
        responses = [await _response(self.api_key, header.api_version, answer) for answer in answers]
        elements = [each async for response in in_pieces(responses) for each in getattr(response, self.fields.answered)]
        # A node that cannot be reached has an error, and the client asks again.
        base = max(responses, key=lambda response: getattr(response, "error_code", 0) != 0)
        throttle_ms = max(getattr(response, "throttle_time_ms", 0) for response in responses)
        whole = replace(base, **{self.fields.answered: tuple(elements)})
        return await encode_answer(
            self.api_key, header.api_version, header.correlation_id, whole, holdings, throttle_ms
        )


def _string(frame: Frame, count: int) -> str | None:
    """Return the last of the first `count` strings of a request; None if it is null, or if the request is no such
    request, which this node then refuses."""
    try:
        return leading_strings(frame, count)[-1]
    except ProtocolError:
        return None


def _group_id(asked: Any) -> str:
    return asked if isinstance(asked, str) else asked.group_id


async def _response(api_key: ApiKey, version: int, answer: bytes) -> Any:
    _, position = decode_response_header(api_key, version, answer)
    if len(answer) <= MAX_AT_ONCE_BYTES:
        return decode(response_class(api_key), version, answer, position)[0]
    return (await asyncio.to_thread(decode, response_class(api_key), version, answer, position))[0]
