"""The protocols a group can speak, the one it chooses, and the topics its members subscribe to.

The one idea: a protocol is a candidate only if every member lists it, and each member votes for its own first
candidate. Metadata is opaque, except that members of type `consumer` list their topics in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from gateway.coordinator.classic.model import Group, Member
from gateway.coordinator.facts import MemberId
from gateway.coordinator.requests import Protocols
from protocol import consumer
from protocol.errors import ProtocolError

CONSUMER_PROTOCOL_TYPE = "consumer"
STREAMS_PROTOCOL_TYPE = "streams"


def names(protocols: Protocols) -> frozenset[str]:
    """Return the protocols one member can speak. An empty name does not count: clients cannot read a success that
    names it."""
    return frozenset(name for name, _ in protocols if name)


def offered_bytes(protocols: Protocols) -> int:
    """Return the size of the metadata that one member offers."""
    return sum(len(metadata) for _, metadata in protocols)


def metadata_of(member: Member, protocol_name: str | None) -> bytes:
    """Return the member's metadata for the protocol, or b"" if the member does not list it."""
    return next((metadata for name, metadata in member.protocols if name == protocol_name), b"")


def compatible(group: Group, protocol_type: str, protocols: Protocols) -> bool:
    """Return whether a member that offers these protocols can join the present members (`supportsProtocols`).

    The requester's own old offer counts too: a lone member cannot switch to a disjoint list. A group without members
    accepts any type, even if it was used for another type before.
    """
    if not group.members:
        return protocol_type != "" and len(names(protocols)) > 0
    everyone = len(group.members)
    return protocol_type == group.protocol_type and any(
        group.protocol_support.get(name) == everyone for name in names(protocols)
    )


def select_protocol(members: Mapping[MemberId, Member], support: Mapping[str, int], leader: Member) -> str:
    """Return the winner of the vote (`selectProtocol`); the leader's preference breaks a tie.

    `members` is not empty and each of them passed `compatible`, so a candidate exists.
    """
    candidates = {name for name, count in support.items() if count == len(members)}
    votes = Counter(_first(member.protocols, candidates) for member in members.values())
    most = max(votes.values())
    return _first(leader.protocols, {name for name, count in votes.items() if count == most})


def _first(protocols: Protocols, candidates: set[str]) -> str:
    return next(name for name, _ in protocols if name in candidates)


def subscribed_topics(
    protocol_type: str | None, protocol_name: str, members: Iterable[Member]
) -> frozenset[str] | None:
    """Return the topics of all members; None if one subscription cannot be read, or if the type is not `consumer`
    and so has no subscriptions."""
    if protocol_type != CONSUMER_PROTOCOL_TYPE:
        return None
    topics: set[str] = set()
    for member in members:
        try:
            topics.update(consumer.subscribed_topics(metadata_of(member, protocol_name)))
        except ProtocolError:
            return None
    return frozenset(topics)
