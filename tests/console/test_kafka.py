"""The console as a client of its own node, without a socket."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import asyncpg

from gateway.apis import SERVED
from gateway.console.cluster import ClusterViews
from gateway.console.groups import GroupViews
from gateway.console.kafka import Kafka, Viewer
from gateway.console.topics import Search, TopicViews
from gateway.net.dispatch import Dispatch
from gateway.operate.metrics import Metrics
from protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity
from storage.console import ConsoleStore
from storage.groups import GroupStore
from tests.gateway.admin import admin_node
from tests.gateway.data_plane import batch_of, data_plane
from tests.gateway.group_node import group_node, settle


async def test_request_of_a_viewer_leaves_no_open_connection_behind(database_url: str):
    """A node remembers a bounded number of connections, and takes longer to miss members of all others."""
    async with group_node(database_url) as node:
        first, second = node.member("g", "c1"), node.member("g", "c2")
        await settle(first, second)
        services = cast(Any, node.services)
        services.settings.listeners = (SimpleNamespace(name="PLAINTEXT"),)
        kafka = Kafka(Dispatch(SERVED, services, Metrics()), services, frozenset())
        identity = MemberIdentity(member_id=second.member_id)
        request = LeaveGroupRequest(group_id="g", members=(identity,))
        response = await kafka.ask(LeaveGroupResponse, request, Viewer())
        assert [each.error_code for each in response.members] == [0]
        assert node.groups.connections == {"c1", "c2"}


async def test_follower_of_a_topic_that_is_deleted_and_made_again_sees_the_new_records(database_url: str):
    """Its position lies above the end of the new log. So does one in a log that has lost records."""
    async with data_plane(database_url) as node:
        topic = await node.create_topic("again")
        await node.send(topic, batch_of(b"a", b"b", b"c"))
        settings = SimpleNamespace(listeners=(SimpleNamespace(name="PLAINTEXT"),))
        groups = SimpleNamespace(connection_closed=lambda connection_id, by_peer: None)
        services = cast(Any, replace(node.services, settings=cast(Any, settings), groups=cast(Any, groups)))
        kafka = Kafka(Dispatch(SERVED, services, Metrics()), services, frozenset())
        store = ConsoleStore(node.database)
        seen = GroupViews(kafka, store, GroupStore(node.database))
        views = TopicViews(kafka, store, seen, ClusterViews(kafka, store, seen))
        following = views.tail(Viewer(), Search("again", ()))
        assert (await anext(following))["records"] == []
        await node.delete_topic(topic)
        topic = await node.create_topic("again")
        assert (await anext(following))["records"] == []
        await node.send(topic, batch_of(b"d"))
        (record,) = cast("list[dict[str, Any]]", (await anext(following))["records"])
        assert record["offset"] == 0
        views.close()


async def test_page_of_many_users_leaves_the_event_loop_to_the_clients(database_url: str):
    session = await asyncpg.connect(database_url)
    async with admin_node(database_url) as node:
        await session.execute(
            "insert into sluice.scram_credential "
            "select 'user-' || n, 1, 4096, '', '', '' from generate_series(1, 100000) n"
        )
        settings = SimpleNamespace(listeners=(SimpleNamespace(name="PLAINTEXT"),))
        groups = SimpleNamespace(connection_closed=lambda connection_id, by_peer: None)
        services = cast(Any, replace(node.services, settings=cast(Any, settings), groups=cast(Any, groups)))
        kafka = Kafka(Dispatch(SERVED, services, Metrics()), services, frozenset())
        store = ConsoleStore(node.database)
        views = ClusterViews(kafka, store, GroupViews(kafka, store, GroupStore(node.database)))
        asking = asyncio.create_task(views.users(Viewer()))
        longest_s, before_s = 0.0, time.thread_time()
        while not asking.done():
            await asyncio.sleep(0.001)
            now_s = time.thread_time()
            longest_s, before_s = max(longest_s, now_s - before_s), now_s
        shown = cast("dict[str, Any]", await asking)
        assert (len(shown["users"]), shown["cut"]) == (2_000, True)
        assert longest_s < 0.1
    await session.close()
