"""The bucket as a store of bytes: its requests, its owner, and the errors if it is unavailable."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import pytest

from storage import object_store
from storage.errors import StorageError
from storage.object_store import StoreAwayError
from storage.pool import Database
from storage.store import open_store
from tests.objects.conftest import MakeStore
from tests.objects.s3_server import BUCKET, Fault, FaultyRoad, S3Server
from tests.postgres import Databases


@pytest.fixture
def road(s3: S3Server, monkeypatch: pytest.MonkeyPatch, make_store: MakeStore) -> Iterator[FaultyRoad]:
    with FaultyRoad(s3.port) as road:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.environment(road.port)["AWS_ENDPOINT_URL"])
        yield road


async def test_large_objects_are_written_in_parts_and_read_in_ranges(make_store: MakeStore, url: str) -> None:
    store = make_store(url)
    content = os.urandom(20_000_000)
    await store.put(1, [content[:7], content[7:12_000_000], content[12_000_000:]])
    await store.put(2**50, [b"small"])
    ranges = [(0, 1), (11_999_990, 20), (19_999_990, 20), (3_000_000, 5_000_000)]
    found = await store.load(1, ranges, lambda pieces: [bytes(piece) for piece in pieces])
    assert found == [content[at : at + size] for at, size in ranges]
    assert await store.load(1, [(30_000_000, 10)], lambda pieces: bytes(pieces[0])) == b""
    assert {each.object_id: each.size_bytes for each in await store.listed()} == {1: 20_000_000, 2**50: 5}
    await store.remove([1, 3])
    store.forget(1)
    with pytest.raises(FileNotFoundError):
        await store.load(1, [(0, 1)], len)


async def test_a_prefix_does_not_see_the_objects_of_another(make_store: MakeStore, url: str) -> None:
    one, other = make_store(url), make_store(f"{url}/below")
    await one.put(1, [b"one"])
    await other.put(1, [b"other"])
    await one.create_marker(b"{}")
    assert await other.read_marker() is None
    assert [each.object_id for each in await one.listed()] == [1]
    await other.remove([1])
    assert await one.load(1, [(0, 3)], lambda pieces: bytes(pieces[0])) == b"one"


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.ERRORS, Fault.SILENT])
async def test_an_unavailable_store_is_reported_in_time_and_recovers(
    make_store: MakeStore, url: str, road: FaultyRoad, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "READ_DEADLINE_S", 2.0)
    store = make_store(url)
    await store.put(1, [b"content"])
    road.set(fault)
    begun = time.monotonic()
    outcomes = await asyncio.gather(*(store.load(1, [(0, 7)], len) for _ in range(50)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {StoreAwayError}
    assert time.monotonic() - begun < 30, "one after the other they would take 100 s"
    met = road.requests
    with pytest.raises(StoreAwayError) as told:
        await store.load(1, [(0, 7)], len)
    assert "\n" not in str(told.value)
    assert road.requests == met, "it is not asked again at once"
    road.set(Fault.NONE)
    async with asyncio.timeout(30):
        while True:
            try:
                assert await store.load(1, [(0, 7)], lambda pieces: bytes(pieces[0])) == b"content"
                break
            except StoreAwayError:
                await asyncio.sleep(0.1)


async def test_objects_of_a_slow_store_are_read(make_store: MakeStore, url: str, road: FaultyRoad) -> None:
    store = make_store(url)
    await store.put(1, [bytes(3_000_000)])
    road.set(Fault.SLOW)
    assert await store.load(1, [(0, 3_000_000)], lambda pieces: len(pieces[0])) == 3_000_000


async def test_a_store_belongs_to_one_database(
    make_store: MakeStore, url: str, database: Database, postgres: Databases
) -> None:
    nodes = await asyncio.gather(*(open_store(database, url) for _ in range(4)))
    assert all(node is not None and node.location == url for node in nodes)
    with pytest.raises(StorageError, match=f"lie in {url}: give it as --log-store"):
        await open_store(database, None)
    with pytest.raises(StorageError, match=rf"{url}-not is not where the records .* last known in {url}"):
        await open_store(database, f"{url}-not")
    other_url = postgres.create()
    other = await Database.open(other_url, hot_connections=1, cold_connections=1)
    try:
        await make_store(url).put(1, [b"records"])
        with pytest.raises(StorageError, match="holds the records of another database"):
            await open_store(other, url)
        await open_store(other, f"{url}-other")
        with pytest.raises(StorageError, match=f"holds the records of another database; this one's lie in {url}-other"):
            await open_store(other, url)
    finally:
        await other.close()
        postgres.drop(other_url)
        await database.cold.fetch("delete from log_store")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "error sending request"),
        ({"AWS_ALLOW_HTTP": "false"}, "builder error"),
    ],
)
async def test_an_unusable_store_is_reported_in_one_line(
    make_store: MakeStore,
    url: str,
    database: Database,
    changed: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "READ_DEADLINE_S", 3.0)
    with pytest.raises(StorageError, match=f"cannot use {url} for records: .*{said}") as told:
        await open_store(database, url)
    assert "\n" not in str(told.value)
    assert "wrong" not in str(told.value)


async def test_a_bucket_that_does_not_exist_is_reported(make_store: MakeStore, database: Database, url: str) -> None:
    with pytest.raises(StorageError, match="NoSuchBucket"):
        await open_store(database, url.replace(f"s3://{BUCKET}", "s3://no-such-bucket"))
