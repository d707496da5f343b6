"""The cache of encoded topics: a changed topic is encoded again, and a client that may see only few topics does not
evict it.
"""

from __future__ import annotations

from uuid import UUID

from gateway.apis.metadata_cache import DescribedTopics
from protocol.messages.metadata import MetadataResponseTopic
from storage.types import Topic

TOPICS = [Topic(UUID(int=number + 1), f"t{number}", False, {}, ()) for number in range(10)]


class Describing:
    def __init__(self) -> None:
        self.described: list[str] = []

    def __call__(self, topic: Topic) -> MetadataResponseTopic:
        self.described.append(topic.name)
        return MetadataResponseTopic(name=topic.name, topic_id=topic.topic_id)


async def test_request_that_sees_few_topics_keeps_the_encoded_ones() -> None:
    kept, describe = DescribedTopics(), Describing()
    await kept.encode(TOPICS, 12, (), describe, in_all=len(TOPICS))
    await kept.encode(TOPICS[:1], 12, (), describe, in_all=len(TOPICS))
    await kept.encode(TOPICS, 12, (), describe, in_all=len(TOPICS))
    assert describe.described == [topic.name for topic in TOPICS]


async def test_encoded_form_of_deleted_topics_is_dropped() -> None:
    kept, describe = DescribedTopics(), Describing()
    await kept.encode(TOPICS, 12, (), describe, in_all=len(TOPICS))
    await kept.encode(TOPICS[:2], 12, (), describe, in_all=2)
    assert len(describe.described) == len(TOPICS) + 2
