"""Drains (a new owner waits for the old owner's commit) while several nodes serve. A commit up to the mark must not end
the drain if another node may have served records in the meantime.
"""

from __future__ import annotations

import asyncio

from protocol.errors import ErrorCode
from tests.frames.handoff import MOVED, RECORDS, committed, given, moving
from tests.gateway_process import GatewayProcess

from .conftest import Cluster, balanced
from .test_metadata import group_coordinated_by

NONE, UNSTABLE = ErrorCode.NONE, ErrorCode.UNSTABLE_OFFSET_COMMIT
LONGER_THAN_A_LOOK_S = 1.5


def test_a_drain_waits_for_records_that_another_node_may_have_served(cluster: Cluster) -> None:
    """The set of live nodes has just changed, so another node may have led the partition and served records after the
    mark.
    """
    here, elsewhere = nodes = cluster(2)
    balanced(nodes)
    asyncio.run(read_on_elsewhere(here, elsewhere, group_coordinated_by(here, nodes)))


async def read_on_elsewhere(here: GatewayProcess, elsewhere: GatewayProcess, group_id: str) -> None:
    moves = moving(here, "drain", keeps_the_rule=True, group_id=group_id, elsewhere=elsewhere)
    async with moves as (scene, held):
        a, b = scene.a, scene.b
        assert await a.commit(scene.topic, RECORDS, partition=MOVED) == NONE
        await asyncio.wait((held,), timeout=LONGER_THAN_A_LOOK_S)
        assert await committed(b.client, group_id, scene.topic, stable=True) == (UNSTABLE, RECORDS)
        assert await a.commit(scene.topic, 2 * RECORDS, partition=MOVED) == NONE
        assert (await asyncio.wait_for(held, 20)).assignment == given(scene.topic, MOVED)
        async with asyncio.timeout(20):
            while await committed(b.client, group_id, scene.topic, stable=True) != (NONE, 2 * RECORDS):
                pass
