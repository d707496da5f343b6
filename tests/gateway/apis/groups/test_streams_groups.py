"""Topologies from messages, and the internal topics that are created for them: bounds and costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.apis.admin.new_topics import MAX_PARTITIONS_PER_REQUEST, make_internal_topics
from gateway.apis.groups.streams_groups import MAX_TOPOLOGY_CHARACTERS, MAX_TOPOLOGY_ELEMENTS, topology_of
from gateway.config.broker import BrokerConfig
from gateway.coordinator.streams.topology import TopicInfo
from gateway.log.topic_names import RenderedNames
from gateway.net.context import RequestContext
from protocol.errors import ErrorCode, KafkaError
from protocol.messages import streams_group_heartbeat as message
from storage.types import NewTopic, Refusal


def test_topology_size_is_bounded() -> None:
    sources = ("t",) * (MAX_TOPOLOGY_ELEMENTS - 1)
    largest = message.Topology(subtopologies=(message.Subtopology(source_topics=sources),))
    assert len(topology_of(largest).subtopologies[0].source_topics) == len(sources)
    larger = message.Topology(subtopologies=(message.Subtopology(source_topics=(*sources, "t")),))
    with pytest.raises(KafkaError) as refused:
        topology_of(larger)
    assert refused.value.code is ErrorCode.POLICY_VIOLATION


@pytest.mark.parametrize("place", ["subtopology_id", "sink", "changelog", "setting"])
def test_names_and_settings_of_a_topology_are_bounded(place: str) -> None:
    text = "t" * MAX_TOPOLOGY_CHARACTERS
    given = {
        "subtopology_id": {"subtopology_id": text},
        "sink": {"repartition_sink_topics": (text,)},
        "changelog": {"state_changelog_topics": (message.TopicInfo(name=text),)},
        "setting": {
            "repartition_source_topics": (message.TopicInfo(topic_configs=(message.KeyValue(key="", value=text),)),)
        },
    }
    longest: Any = given[place]
    topology_of(message.Topology(subtopologies=(message.Subtopology(**longest),)))
    with pytest.raises(KafkaError) as refused:
        topology_of(message.Topology(subtopologies=(message.Subtopology(**longest, source_topics=("t",)),)))
    assert refused.value.code is ErrorCode.POLICY_VIOLATION


class Counted(tuple[message.TopicInfo, ...]):
    """Counts how often it is iterated over."""

    times = 0

    def __iter__(self) -> Iterator[message.TopicInfo]:
        Counted.times += 1
        return super().__iter__()


def test_topics_are_not_named_again_for_each_copartition_group() -> None:
    groups = tuple(message.CopartitionGroup(repartition_source_topics=(at,)) for at in range(9))
    topics = Counted(message.TopicInfo(name=f"r{at}") for at in range(9))
    topology = message.Topology(
        subtopologies=(message.Subtopology(repartition_source_topics=topics, copartition_groups=groups),)
    )
    made = topology_of(topology).subtopologies[0]
    assert made.copartition_groups == tuple(frozenset({f"r{at}"}) for at in range(9))
    assert Counted.times < len(groups)


class Making:
    """A context that records which topics each request creates."""

    def __init__(self) -> None:
        self.made: list[list[str]] = []
        services = SimpleNamespace(
            authorizer=None,
            catalog=SimpleNamespace(broker=BrokerConfig(), rendered_names=lambda: RenderedNames({})),
            membership=SimpleNamespace(brokers=list[Any]),
            throttles=SimpleNamespace(mutations=lambda *_: SimpleNamespace(record=lambda _partitions: None)),
            topics=SimpleNamespace(create=self._create),
        )
        self.context = cast(RequestContext, SimpleNamespace(services=services))

    async def _create(self, wanted: Sequence[NewTopic]) -> list[Refusal]:
        self.made.append([plan.name for plan in wanted])
        return [Refusal.TOPIC_EXISTS] * len(wanted)


@pytest.mark.asyncio
async def test_more_internal_topics_than_one_request_allows_are_created_in_turn() -> None:
    making = Making()
    half = MAX_PARTITIONS_PER_REQUEST // 2
    wanted = (TopicInfo("a", half), TopicInfo("b", half), TopicInfo("c", 1), TopicInfo("d", 2 * half + 1))
    failures = await make_internal_topics(wanted, making.context)
    assert {name: error.code for name, error in failures.items()} == dict.fromkeys("cd", ErrorCode.POLICY_VIOLATION)
    failures = await make_internal_topics(wanted[2:], making.context)
    assert set(failures) == {"d"}
    assert making.made == [["a", "b"], ["c"]]
