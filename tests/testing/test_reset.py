"""The reset of a test server. It also deletes groups that `Groups.list` does not show at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest
import pytest_asyncio

from gateway.testing.members import Members
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.delete_groups import DeleteGroupsRequest
from storage.types import GroupRecord
from tests.gateway.group_node import GroupNode, group_node, settle
from tests.steps.waiting import until

G = "g"
PATIENCE_S = 60.0


@pytest_asyncio.fixture
async def node(database_url: str) -> AsyncGenerator[GroupNode, None]:
    async with group_node(database_url) as started:
        yield started


class Deletions:
    """Sends DeleteGroups to a node, and keeps the answers."""

    def __init__(self, node: GroupNode) -> None:
        self._node = node
        self.answers: list[dict[str, ErrorCode]] = []

    async def __call__(self, group_ids: Sequence[str]) -> dict[str, ErrorCode]:
        response = await self._node.ask(DeleteGroupsRequest(groups_names=tuple(group_ids)), 2)
        answer = {result.group_id: ErrorCode(result.error_code) for result in response.results}
        self.answers.append(answer)
        return answer


async def test_reset_waits_for_the_lease_of_a_group_and_then_deletes_it(node: GroupNode) -> None:
    member = node.member(G, "c1")
    await settle(member)
    node.lease_clock.seconds += 3600
    assert await member.beat() is ErrorCode.NOT_COORDINATOR
    assert await node.groups.list() == []
    delete = Deletions(node)
    reset = asyncio.create_task(Members(node.groups).delete_groups(delete, PATIENCE_S))
    await until(lambda: reset.done() or delete.answers)
    assert delete.answers[:1] == [{G: ErrorCode.NOT_COORDINATOR}]
    await node.leases.renew()
    await reset
    assert await node.stored(G) is None
    assert await node.groups.list() == []


async def test_reset_deletes_a_group_that_a_client_joins_while_the_node_reads_it(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, list_groups = node.store.load, node.store.list
    may_load, listed = asyncio.Event(), asyncio.Event()

    async def load_later(group_ids: Sequence[str]) -> dict[str, GroupRecord]:
        await may_load.wait()
        return await load(group_ids)

    async def note_the_list() -> list[tuple[str, str, str | None, str]]:
        found = await list_groups()
        listed.set()
        return found

    monkeypatch.setattr(node.store, "load", load_later)
    monkeypatch.setattr(node.store, "list", note_the_list)
    join = node.member(G, "c1").join()
    reset = asyncio.create_task(Members(node.groups).delete_groups(Deletions(node), PATIENCE_S))
    await until(listed.is_set)
    may_load.set()
    await asyncio.gather(join, reset)
    assert await node.groups.list() == []


async def test_reset_fails_for_a_group_that_stays_without_a_lease(node: GroupNode) -> None:
    await settle(node.member(G, "c1"))
    node.lease_clock.seconds += 3600
    with pytest.raises(KafkaError, match=f"NOT_COORDINATOR: group {G} cannot be deleted"):
        await Members(node.groups).delete_groups(Deletions(node), 0.0)
