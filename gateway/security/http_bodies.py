"""Read the body of an HTTP response up to a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp


async def read_bounded(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return the body. Raise ValueError if it is longer than `most_bytes`, and aiohttp.ClientError or OSError if it
    cannot be read."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most_bytes:
            raise ValueError(f"it is longer than {most_bytes} bytes")
    return bytes(body)
