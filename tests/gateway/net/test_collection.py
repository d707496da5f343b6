"""Full collections wait for requests of many elements, and not for ever."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from gateway.net import coding, collection
from gateway.net.coding import AT_ONCE_ELEMENTS, decode_in_thread
from gateway.net.collection import FullCollections
from protocol.api_keys import ApiKey
from protocol.codec import encode
from protocol.errors import ProtocolError
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests of other tests, whose loops are closed, may never have been done with."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    monkeypatch.setattr(coding, "full_collections", FullCollections())
    yield
    gc.set_threshold(*before)


async def test_full_collections_wait_until_the_last_request_is_done_with() -> None:
    usual = gc.get_threshold()
    collections = FullCollections()
    first, second = collections.pause(), collections.pause()
    assert gc.get_threshold() == (*usual[:2], 2**31 - 1)
    first()
    first()
    assert gc.get_threshold() != usual
    second()
    assert gc.get_threshold() == usual


async def test_a_pause_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "MAX_PAUSE_S", 0.01)
    usual = gc.get_threshold()
    end = FullCollections().pause()
    async with asyncio.timeout(10):
        while gc.get_threshold() != usual:  # noqa: ASYNC110 (a timer of the module changes it)
            await asyncio.sleep(0.001)
    end()
    assert gc.get_threshold() == usual


async def test_requests_upon_requests_do_not_put_it_off_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = gc.get_threshold()
    collections = FullCollections()
    first = collections.pause()
    monkeypatch.setattr(collection, "MAX_WITHOUT_S", -1.0)
    later = collections.pause()
    first()
    assert gc.get_threshold() == usual
    later()
    assert gc.get_threshold() == usual


def metadata_of(count: int) -> bytes:
    request = MetadataRequest(topics=tuple(MetadataRequestTopic(name=f"t{number}") for number in range(count)))
    return b"".join(bytes(chunk) for chunk in encode(request, 9))


async def test_a_request_of_many_elements_is_waited_for() -> None:
    usual = gc.get_threshold()
    request, done_with = await decode_in_thread(ApiKey.METADATA, 9, metadata_of(AT_ONCE_ELEMENTS + 1), 0)
    assert len(request.topics) == AT_ONCE_ELEMENTS + 1
    assert gc.get_threshold() != usual
    done_with()
    assert gc.get_threshold() == usual


async def test_a_torn_request_is_not_waited_for() -> None:
    usual = gc.get_threshold()
    with pytest.raises(ProtocolError):
        await decode_in_thread(ApiKey.METADATA, 9, metadata_of(AT_ONCE_ELEMENTS + 1)[:-20], 0)
    assert gc.get_threshold() == usual
