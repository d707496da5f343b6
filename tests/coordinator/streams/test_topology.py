"""Number of tasks of a topology, and errors that prevent tasks, in single steps."""

from __future__ import annotations

import time
from uuid import UUID

import pytest

from gateway.coordinator.cluster import Cluster, ClusterTopic
from gateway.coordinator.streams.topology import (
    MAX_TASKS,
    InvalidTopologyError,
    StatusCode,
    Subtopology,
    TopicInfo,
    Topology,
    configure,
)


def cluster(**counts: int) -> Cluster:
    topics = {name: ClusterTopic(UUID(int=at), name, count) for at, (name, count) in enumerate(counts.items(), 1)}
    return Cluster(topics, {topic.topic_id: topic for topic in topics.values()})


COUNTING = Topology(
    0,
    (
        Subtopology("0", source_topics=("words",), repartition_sink_topics=("by_word",)),
        Subtopology(
            "1",
            repartition_source_topics=(TopicInfo("by_word"),),
            state_changelog_topics=(TopicInfo("counts", topic_configs=(("cleanup.policy", "compact"),)),),
        ),
    ),
)


def test_a_source_that_is_missing_is_named():
    configured = configure(COUNTING, cluster(other=1))
    assert configured.status is StatusCode.MISSING_SOURCE_TOPICS
    assert "words" in configured.detail
    assert not configured.missing
    assert not configured.task_counts


def test_internal_topic_has_the_partitions_of_its_inputs():
    configured = configure(COUNTING, cluster(words=3))
    assert configured.status is StatusCode.MISSING_INTERNAL_TOPICS
    assert configured.missing == (
        TopicInfo("by_word", 3),
        TopicInfo("counts", 3, topic_configs=(("cleanup.policy", "compact"),)),
    )
    assert not configured.task_counts


def test_topology_with_all_topics_has_tasks():
    configured = configure(COUNTING, cluster(words=3, by_word=3, counts=3))
    assert configured.is_ready
    assert configured.task_counts == {"0": 3, "1": 3}


@pytest.mark.parametrize(("by_word", "counts"), [(2, 3), (3, 2)])
def test_internal_topic_with_wrong_partition_count_prevents_tasks(by_word: int, counts: int):
    configured = configure(COUNTING, cluster(words=3, by_word=by_word, counts=counts))
    assert configured.status is StatusCode.INCORRECTLY_PARTITIONED_TOPICS


def test_a_repartition_topic_is_as_wide_as_its_widest_writer():
    topology = Topology(
        0,
        (
            Subtopology("0", source_topics=("narrow",), repartition_sink_topics=("joined",)),
            Subtopology("1", source_topics=("wide",), repartition_sink_topics=("joined",)),
            Subtopology("2", repartition_source_topics=(TopicInfo("joined"),), repartition_sink_topics=("next",)),
            Subtopology("3", repartition_source_topics=(TopicInfo("next"),)),
        ),
    )
    configured = configure(topology, cluster(narrow=2, wide=5))
    assert configured.missing == (TopicInfo("joined", 5), TopicInfo("next", 5))


def test_subtopology_that_reads_its_own_output_is_as_wide_as_its_sources():
    topology = Topology(
        0,
        (
            Subtopology(
                "0",
                source_topics=("words",),
                repartition_sink_topics=("again",),
                repartition_source_topics=(TopicInfo("again"),),
            ),
        ),
    )
    assert configure(topology, cluster(words=3)).missing == (TopicInfo("again", 3),)


def test_a_loop_decides_nothing():
    topology = Topology(
        0,
        (
            Subtopology("0", repartition_source_topics=(TopicInfo("a"),), repartition_sink_topics=("b",)),
            Subtopology("1", repartition_source_topics=(TopicInfo("b"),), repartition_sink_topics=("a",)),
        ),
    )
    with pytest.raises(InvalidTopologyError):
        configure(topology, cluster())


def copartitioned(*sources: str, repartition: tuple[TopicInfo, ...] = ()) -> Topology:
    group = frozenset({*sources, *(topic.name for topic in repartition)})
    return Topology(
        0,
        (
            Subtopology("w", source_topics=("feed",), repartition_sink_topics=tuple(t.name for t in repartition)),
            Subtopology("0", source_topics=sources, repartition_source_topics=repartition, copartition_groups=(group,)),
        ),
    )


def test_sources_read_together_must_agree():
    wrong = configure(copartitioned("left", "right"), cluster(feed=1, left=2, right=3))
    assert wrong.status is StatusCode.INCORRECTLY_PARTITIONED_TOPICS
    assert configure(copartitioned("left", "right"), cluster(feed=1, left=3, right=3)).task_counts == {"w": 1, "0": 3}


def test_a_repartition_topic_follows_what_it_is_read_with():
    follows = configure(copartitioned("left", repartition=(TopicInfo("re"),)), cluster(feed=7, left=4))
    assert follows.missing == (TopicInfo("re", 4),)


def test_partition_count_given_by_the_application_must_agree():
    fixed = copartitioned("left", repartition=(TopicInfo("re", 3),))
    assert configure(fixed, cluster(feed=7, left=4)).status is StatusCode.INCORRECTLY_PARTITIONED_TOPICS
    assert configure(fixed, cluster(feed=7, left=3)).missing == (TopicInfo("re", 3),)


def test_repartition_topics_alone_take_the_widest():
    topology = Topology(
        0,
        (
            Subtopology("a", source_topics=("narrow",), repartition_sink_topics=("x",)),
            Subtopology("b", source_topics=("wide",), repartition_sink_topics=("y",)),
            Subtopology(
                "c",
                repartition_source_topics=(TopicInfo("x"), TopicInfo("y")),
                copartition_groups=(frozenset({"x", "y"}),),
            ),
        ),
    )
    assert configure(topology, cluster(narrow=2, wide=6)).missing == (TopicInfo("x", 6), TopicInfo("y", 6))


def test_cost_of_a_long_chain_of_topics_is_linear():
    length = 4_000
    onwards = (
        Subtopology(str(at), (), (f"r{at}",), repartition_source_topics=(TopicInfo(f"r{at - 1}"),))
        for at in range(1, length)
    )
    topology = Topology(0, (Subtopology("0", ("words",), ("r0",)), *onwards))
    started = time.process_time()
    configured = configure(topology, cluster(words=3))
    assert time.process_time() - started < 1, "seconds: a look at every open topic for each that is settled takes five"
    assert {topic.partitions for topic in configured.missing} == {3}
    assert len(configured.missing) == length - 1


def test_cost_of_many_cyclic_subtopologies_is_linear():
    length = 2_000
    loops = (
        Subtopology(str(at), (), (f"r{at}", f"own{at}"), (), (TopicInfo(f"r{at - 1}"), TopicInfo(f"own{at}")))
        for at in range(1, length)
    )
    topology = Topology(0, (Subtopology("0", ("words",), ("r0",)), *loops))
    started = time.process_time()
    configured = configure(topology, cluster(words=3))
    assert time.process_time() - started < 1, "seconds: a look at every open topic for each that is settled takes ten"
    assert {topic.partitions for topic in configured.missing} == {3}


def test_partition_count_given_by_one_subtopology_applies_to_all():
    for infos in ((TopicInfo("r", 5), TopicInfo("r")), (TopicInfo("r"), TopicInfo("r", 5))):
        readers = (Subtopology(str(at), repartition_source_topics=(info,)) for at, info in enumerate(infos, 1))
        topology = Topology(0, (Subtopology("0", ("words",), ("r",)), *readers))
        assert configure(topology, cluster(words=3)).missing == (TopicInfo("r", 5),)


def test_negative_partition_count_is_refused():
    topology = Topology(0, (Subtopology("0", ("words",), repartition_source_topics=(TopicInfo("r", -1),)),))
    with pytest.raises(InvalidTopologyError, match="-1"):
        configure(topology, cluster(words=3))


def test_number_of_tasks_is_bounded():
    twice = Topology(0, (Subtopology("0", ("words",)), Subtopology("1", ("words",), (), (TopicInfo("counts"),))))
    configured = configure(twice, cluster(words=MAX_TASKS // 2 + 1))
    assert configured.status is StatusCode.INCORRECTLY_PARTITIONED_TOPICS
    assert str(MAX_TASKS + 2) in configured.detail
    assert not configured.task_counts
    assert not configured.missing
    assert configure(twice, cluster(words=MAX_TASKS // 2, counts=MAX_TASKS // 2)).is_ready
