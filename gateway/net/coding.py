"""Requests decoded and answers encoded in a thread, where they are too long for the event loop.

The one idea: what coding costs follows the number of elements and the length of strings, so both sides are weighed
while, or before, they are worked on; the usual request never comes here. How many bytes a heavy answer takes is known,
bounded and counted among what the node holds before the first of them is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.net.collection import LEFTOVERS_S, full_collections
from gateway.net.holdings import Holdings, Share
from protocol.buffer import Buffer
from protocol.codec import decode_request, encode_response
from protocol.errors import ErrorCode, KafkaError
from protocol.framing import Frame
from protocol.sizes import encoded_bytes

AT_ONCE_ELEMENTS = 2_000
"""What is coded on the event loop: two milliseconds, about. Long strings count by their length."""

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Of an answer, but for the records in it, which Fetch bounds. A larger one is refused."""

PATIENCE_S = 5.0
"""How long a heavy answer waits while the node is full, which closes peers that take none of theirs by then."""


async def decode_in_thread(api_key: int, version: int, frame: Frame, position: int) -> tuple[Any, Callable[[], None]]:
    """As `decode_request`, and what is to be called when the request is done with."""
    resume = full_collections.pause()
    try:
        return await asyncio.to_thread(decode_request, api_key, version, frame, position), resume
    except BaseException:
        resume()
        raise


async def encode_in_thread(response: Any, version: int, holdings: Holdings) -> list[Buffer]:
    """As `encode_response`. Raises KafkaError for an answer of more than `MAX_ANSWER_BYTES`."""
    resume = full_collections.pause()
    share = Share(holdings)
    try:
        size = await asyncio.to_thread(encoded_bytes, response)
        if size > MAX_ANSWER_BYTES:
            raise KafkaError(ErrorCode.POLICY_VIOLATION, f"The answer would be larger than {MAX_ANSWER_BYTES} bytes.")
        await holdings.room(PATIENCE_S)
        share.become(size)
        return await asyncio.to_thread(encode_response, response, version)
    finally:
        # The connection counts the answer itself from here on.
        share.become(0)
        asyncio.get_running_loop().call_later(LEFTOVERS_S, resume)
