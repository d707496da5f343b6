"""Topics as Metadata describes them, encoded: kept per version, and encoded again only for changed topics.

The one idea: an answer about all topics has the same bytes for every client until a topic, the set of live nodes or the
broker's settings change. So an answer is assembled from encoded pieces, and one changed topic costs one piece.
`gateway/apis/metadata.py` describes the topics.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol
from uuid import UUID

from gateway.net.pieces import in_pieces
from protocol.codec import encode_element
from protocol.messages.metadata import MetadataResponse, MetadataResponseTopic
from protocol.specialise import EncodedElements
from storage.types import Topic

MAX_VIEWS = 8
"""Views that are kept: one for each version, listener and kind of client. Every other view is encoded again."""

MIN_PARTITIONS = 200
"""Answers about fewer partitions are described and encoded like any other response."""

PARTITIONS_AT_ONCE = 1_000
"""A topic with more partitions is described and encoded in a thread."""

View = tuple[object, ...]
"""Everything besides the topic that a description depends on: version, listener, operations, live nodes, broker
settings.
"""


class DescribedTopics:
    """The node's encoded topics. Their number is at most MAX_VIEWS times the size of the catalog."""

    def __init__(self) -> None:
        self._views: OrderedDict[View, dict[UUID, tuple[Topic, bytes]]] = OrderedDict()

    async def encode(
        self,
        topics: Sequence[Topic],
        version: int,
        view: View,
        describe: Callable[[Topic], MetadataResponseTopic],
        *,
        in_all: int,
    ) -> EncodedElements:
        """Encode the topics in their order, each as an element of MetadataResponse.topics.

        `describe` must be a function of the topic and of the contents of `view`. `in_all` is the number of existing
        topics; the request may name only some.
        """
        known = self._views.get((version, view))
        if known is None:
            known = self._views[version, view] = {}
            while len(self._views) > MAX_VIEWS:
                self._views.popitem(last=False)
        self._views.move_to_end((version, view))
        if len(known) > 2 * in_all:
            self._views[version, view] = known = {}
        encoded: list[bytes] = []
        async for topic in in_pieces(topics):
            found = known.get(topic.topic_id)
            if found is None or found[0] is not topic:
                if len(topic.partitions) > PARTITIONS_AT_ONCE:
                    found = (topic, await asyncio.to_thread(_encoded, topic, version, describe))
                else:
                    found = (topic, _encoded(topic, version, describe))
                known[topic.topic_id] = found
            encoded.append(found[1])
        return EncodedElements(encoded)


class HasDescribedTopics(Protocol):
    @property
    def described_topics(self) -> DescribedTopics: ...


def _encoded(topic: Topic, version: int, describe: Callable[[Topic], MetadataResponseTopic]) -> bytes:
    return encode_element(MetadataResponse, "topics", describe(topic), version)
