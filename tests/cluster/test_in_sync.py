"""eligible.leader.replicas.version 0 with real processes: the in-sync replicas follow kills, stops and returns of
nodes."""

from __future__ import annotations

import pytest

from gateway.cluster.in_sync import FEATURE
from protocol.errors import ErrorCode
from protocol.messages.elect_leaders import ElectLeadersRequest, TopicPartitions
from protocol.messages.update_features import FeatureUpdateKey, UpdateFeaturesRequest
from tests.cluster.test_replicas import Start, alive, connected, create, placed, read, start, taken, until
from tests.cluster.test_wakeup import produce
from tests.frames.members import fresh
from tests.wire import WireClient

__all__ = ["start"]

UNCLEAN = 1


async def level(client: WireClient, level: int) -> None:
    update = FeatureUpdateKey(feature=FEATURE, max_version_level=level, upgrade_type=1 if level else 2)
    answer = await client.send(UpdateFeaturesRequest(feature_updates=(update,)), 1)
    assert answer.error_code == ErrorCode.NONE, answer


async def elected(client: WireClient, topic: str) -> int:
    """Hold an unclean election of the first partition, and return its error code."""
    asked = (TopicPartitions(topic=topic, partitions=(0,)),)
    answer = await client.send(ElectLeadersRequest(election_type=UNCLEAN, topic_partitions=asked), 2)
    return answer.replica_election_results[0].partition_result[0].error_code


async def written(client: WireClient, topic: str) -> int:
    answer = await client.send(produce(topic), 9)
    return answer.responses[0].partition_responses[0].error_code


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_only_an_in_sync_replica_leads_until_an_unclean_election(start: Start, how: str) -> None:
    zero, one, two = (start(number) for number in range(3))
    topic, elsewhere = fresh("in-sync"), fresh("elsewhere")
    async with connected(zero) as (client,):
        await level(client, 0)
        await create(client, topic, 1, 2)
        await until(lambda: placed(client, topic), (1, (1, 2), (1, 2), ()))
        assert await written(client, topic) == ErrorCode.NONE
        getattr(two, how)()
        await until(lambda: placed(client, topic), (1, (1, 2), (1,), (2,)))
        getattr(one, how)()
        await until(lambda: placed(client, topic), (-1, (1, 2), (1,), (1, 2)))
        assert await written(client, topic) == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert (await read(client, topic, 0, "")).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert await elected(client, topic) == ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE
        await create(client, elsewhere, 0)
        assert await written(client, elsewhere) == ErrorCode.NONE
        two.start()
        await alive(client, 2)
        await until(lambda: placed(client, topic), (-1, (1, 2), (1,), (1,)))
        assert await elected(client, topic) == ErrorCode.NONE
        async with connected(two) as (on_two,):
            for each in (client, on_two):
                await until(lambda each=each: placed(each, topic), (2, (1, 2), (2,), (1,)))
                assert await written(each, topic) == ErrorCode.NONE
            assert await elected(on_two, topic) == ErrorCode.ELECTION_NOT_NEEDED
            part = await read(on_two, topic, 0, "")
            assert (part.error_code, part.high_watermark) == (ErrorCode.NONE, 3)
            assert taken(part) > 0
            one.start()
            for each in (client, on_two):
                await until(lambda each=each: placed(each, topic), (2, (1, 2), (1, 2), ()))


async def test_a_cluster_that_goes_to_level_1_has_a_leader_at_once(start: Start) -> None:
    zero, one, two = (start(number) for number in range(3))
    topic = fresh("in-sync")
    async with connected(zero) as (client,):
        await level(client, 0)
        await create(client, topic, 1, 2)
        two.kill()
        await until(lambda: placed(client, topic), (1, (1, 2), (1,), (2,)))
        two.start()
        await until(lambda: placed(client, topic), (1, (1, 2), (1, 2), ()))
        two.kill()
        await until(lambda: placed(client, topic), (1, (1, 2), (1,), (2,)))
        one.kill()
        await until(lambda: placed(client, topic), (-1, (1, 2), (1,), (1, 2)))
        await level(client, 1)
        leader, *shown = await placed(client, topic)
        assert (leader, shown) == (0, [(1, 2), (), (1, 2)]), "any node leads what none of its replicas does"
        assert await written(client, topic) == ErrorCode.NONE
