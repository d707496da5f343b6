"""Decode requests and encode answers in a thread if they are too long for the event loop.

The one idea: the cost of coding follows the number of elements and the length of strings. So both sides are measured
before or during the work, and the usual request never comes here. The size of a heavy answer is known, bounded and
counted among the node's held bytes before its first byte is made.
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
from protocol.specialise import TooManyElementsError

AT_ONCE_ELEMENTS = 2_000
"""Elements coded on the event loop: about two milliseconds. Long strings count by their length."""

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Bound on an answer without its records, which Fetch bounds. A larger answer is refused."""

PATIENCE_S = 5.0
"""How long a heavy answer waits while the node is full. Within this time the node closes peers that accept none of
their answers."""


async def decode_in_thread(
    api_key: int, version: int, frame: Frame, position: int
) -> tuple[object, Callable[[], None]]:
    """Do the same as `decode_request`. Also return the function to call when the request is done with."""
    resume = full_collections.pause()
    try:
        return await asyncio.to_thread(decode_request, api_key, version, frame, position), resume
    except BaseException:
        resume()
        raise


async def decode_anywhere(
    api_key: int, version: int, frame: Frame, position: int
) -> tuple[Any, Callable[[], None] | None]:
    """Decode a request, in a thread if it has many elements. Then also return the function to call when the request is
    done with."""
    try:
        return decode_request(api_key, version, frame, position, max_elements=AT_ONCE_ELEMENTS), None
    except TooManyElementsError:
        return await decode_in_thread(api_key, version, frame, position)


async def encode_in_thread(response: object, version: int, holdings: Holdings) -> list[Buffer]:
    """Do the same as `encode_response`. Raise KafkaError for an answer of more than `MAX_ANSWER_BYTES`."""
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
        # From here on, the connection itself counts the answer.
        share.become(0)
        asyncio.get_running_loop().call_later(LEFTOVERS_S, resume)
