"""Requests decoded and answers encoded in a thread, where they are too long for the event loop.

The one idea: what coding costs follows the number of elements, so both sides are counted while, or before, they are
worked on; the usual request never comes here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.net.collection import LEFTOVERS_S, full_collections
from protocol.buffer import Buffer
from protocol.codec import decode_request, encode_response
from protocol.framing import Frame

AT_ONCE_ELEMENTS = 2_000
"""What is coded on the event loop: two milliseconds, about."""


async def decode_in_thread(api_key: int, version: int, frame: Frame, position: int) -> tuple[Any, Callable[[], None]]:
    """As `decode_request`, and what is to be called when the request is done with."""
    resume = full_collections.pause()
    try:
        return await asyncio.to_thread(decode_request, api_key, version, frame, position), resume
    except BaseException:
        resume()
        raise


async def encode_in_thread(response: Any, version: int) -> list[Buffer]:
    """As `encode_response`."""
    resume = full_collections.pause()
    try:
        return await asyncio.to_thread(encode_response, response, version)
    finally:
        asyncio.get_running_loop().call_later(LEFTOVERS_S, resume)
