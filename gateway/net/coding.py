"""Requests decoded and answers encoded, on the event loop where that is short and in a thread where it is not.

The one idea: what coding costs follows the number of elements, so both sides are counted while, or before, they are
worked on; the usual request never meets a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.net.collection import full_collections
from protocol.codec import Chunk, decode_request, encode_response, has_more_elements
from protocol.framing import Frame
from protocol.specialise import TooManyElementsError

AT_ONCE_ELEMENTS = 2_000
"""Two milliseconds of coding, about."""


async def decode_aside(
    api_key: int, version: int, frame: Frame, position: int
) -> tuple[Any, Callable[[], None] | None]:
    """As `decode_request`. Returns without an await if the request has few elements; with one that has many comes what
    is to be called when it is done with."""
    try:
        return decode_request(api_key, version, frame, position, max_elements=AT_ONCE_ELEMENTS), None
    except TooManyElementsError:
        resume = full_collections.pause()
    try:
        return await asyncio.to_thread(decode_request, api_key, version, frame, position), resume
    except BaseException:
        resume()
        raise


async def exceeds(request: Any, max_elements: int) -> bool:
    """Whether a request of many elements has more of them than its API takes."""
    return await asyncio.to_thread(has_more_elements, request, max_elements)


async def encode_aside(response: Any, version: int) -> list[Chunk]:
    """As `encode_response`. Returns without an await if the response has few elements."""
    if has_more_elements(response, AT_ONCE_ELEMENTS):
        return await asyncio.to_thread(encode_response, response, version)
    return encode_response(response, version)
