"""Objects of a bucket that hold the bytes of chunks: S3 and compatible stores, Google's and Azure's.

The one idea: an object is written once and whole, read in ranges through a cache of blocks, and removed. No other
feature of a store is needed. A store that answers late or with an error counts as unreachable: reads fail within the
time that clients wait, and for a moment no other read asks the store.

obstore reads address and credentials from the environment under their usual names (`AWS_...`, `GOOGLE_...`,
`AZURE_...`). It sends, signs and repeats requests.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError
from obstore.store import from_url

from storage.block_cache import BlockCache
from storage.byte_store import MARKER, Buffer, FoundObject, Range, T

if TYPE_CHECKING:
    # obstore declares these names for type checkers only.
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Bucket

LOOKERS = 4
"""Number of threads that process the bytes that were read."""

PART_BYTES = 8 * 1024 * 1024
"""Size of one part of a multipart upload. A smaller object is sent in one request."""
PARTS_AT_ONCE = 4
REMOVALS_AT_ONCE = 10
"""Number of concurrent requests of one removal. A caller gives up after seconds, and begins again with the first."""

READ_DEADLINE_S = 10.0
"""Deadline for reading one range, including retries. It is shorter than any client waits for a Fetch."""
WRITE_DEADLINE_S = 120.0
"""Deadline for writing an object, listing, or removing."""
AWAY_S = 1.0
"""If the store did not respond to a read, no further read is sent for this long."""

_CLIENT: ClientConfig = {"connect_timeout": timedelta(seconds=3), "timeout": timedelta(seconds=60)}
_RETRIES: RetryConfig = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
_RANGE_REFUSED = " 416 "
"""HTTP status for a range behind the end of an object."""
_NAME = re.compile(r"^([0-9a-f]{16})\.object$")
_VARIABLES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}


class StoreAwayError(OSError):
    """The store failed to execute a request, but may succeed later."""


class ObjectStore:
    """The objects below one prefix of a bucket."""

    listing_interval_s = 600.0

    def __init__(self, url: str, bucket: Bucket) -> None:
        self._url = url
        self._bucket = bucket
        self._cache = BlockCache(self._fetch)
        self._threads = ThreadPoolExecutor(LOOKERS, thread_name_prefix="object-reader")
        self._away_until = 0.0
        self._away_why = ""

    @classmethod
    def at(cls, url: str) -> ObjectStore:
        """Return the store at `url` without contacting it. Raise OSError if the environment is incomplete."""
        # obstore reads this variable itself only if it is given no client configuration.
        allow_http = os.environ.get(f"{_VARIABLES[url.partition('://')[0]]}_ALLOW_HTTP", "")
        client: ClientConfig = {**_CLIENT, "allow_http": allow_http.strip().lower() in {"1", "true", "yes", "on"}}
        with _as_os_errors():
            return cls(url, from_url(url, client_options=client, retry_config=_RETRIES))

    @property
    def location(self) -> str:
        return self._url

    def name(self, object_id: int) -> str:
        return f"{self._url.rstrip('/')}/{_name(object_id)}"

    async def put(self, object_id: int, pieces: Sequence[Buffer]) -> None:
        """Write an object, replacing an existing one: a number is assigned once, so an existing object belongs to a
        history that was lost."""
        async with asyncio.timeout(WRITE_DEADLINE_S):
            with _as_os_errors():
                if sum(map(len, pieces)) <= PART_BYTES:
                    await obstore.put_async(self._bucket, _name(object_id), b"".join(pieces), use_multipart=False)
                else:
                    await obstore.put_async(
                        self._bucket,
                        _name(object_id),
                        _parts(pieces),
                        use_multipart=True,
                        chunk_size=PART_BYTES,
                        max_concurrency=PARTS_AT_ONCE,
                    )
        self.forget(object_id)

    async def load(self, object_id: int, ranges: Sequence[Range], look: Callable[[list[bytearray]], T]) -> T:
        blocks = await self._cache.load(object_id, ranges)
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: look(self._cache.cut(blocks, ranges))
        )

    def forget(self, object_id: int | None) -> None:
        self._cache.forget(object_id)

    async def remove(self, object_ids: Sequence[int]) -> None:
        async with asyncio.timeout(WRITE_DEADLINE_S):
            with _as_os_errors():
                if object_ids and self._url.startswith("s3:"):
                    await obstore.delete_async(self._bucket, [_name(object_id) for object_id in object_ids])
                    return
                # Stores other than S3 refuse to remove what does not exist.
                turns = asyncio.Semaphore(REMOVALS_AT_ONCE)
                await asyncio.gather(*(self._remove(object_id, turns) for object_id in object_ids))

    async def _remove(self, object_id: int, turns: asyncio.Semaphore) -> None:
        async with turns:
            with suppress(FileNotFoundError):
                await obstore.delete_async(self._bucket, _name(object_id))

    async def listed(self) -> list[FoundObject]:
        found: list[FoundObject] = []
        now = datetime.now(UTC)
        async with asyncio.timeout(WRITE_DEADLINE_S):
            with _as_os_errors():
                pages = obstore.list(self._bucket, chunk_size=1000)  # pyright: ignore[reportUnknownMemberType]
                async for page in pages:
                    for listed in page:
                        if match := _NAME.match(listed["path"]):
                            age_s = (now - listed["last_modified"]).total_seconds()
                            found.append(FoundObject(int(match[1], 16), listed["size"], age_s))
        return found

    async def read_marker(self) -> bytes | None:
        async with asyncio.timeout(READ_DEADLINE_S):
            with _as_os_errors():
                try:
                    return bytes(await (await obstore.get_async(self._bucket, MARKER)).bytes_async())
                except FileNotFoundError:
                    return None

    async def create_marker(self, marker: bytes) -> None:
        async with asyncio.timeout(READ_DEADLINE_S):
            with _as_os_errors():
                try:
                    await obstore.put_async(self._bucket, MARKER, marker, mode="create")
                except AlreadyExistsError as error:
                    raise FileExistsError(f"{self._url} has a marker already") from error
                except NotSupportedError:
                    # This store lacks conditional writes. If two databases claim it at the same time, the next node
                    # that reads the marker notices.
                    await obstore.put_async(self._bucket, MARKER, marker)

    async def replace_marker(self, marker: bytes) -> None:
        async with asyncio.timeout(READ_DEADLINE_S):
            with _as_os_errors():
                await obstore.put_async(self._bucket, MARKER, marker)

    def close(self) -> None:
        self._cache.close()
        self._threads.shutdown(wait=False)

    async def _fetch(self, object_id: int, start: int, end: int) -> tuple[memoryview, int]:
        if time.monotonic() < self._away_until:
            raise StoreAwayError(self._away_why)
        try:
            async with asyncio.timeout(READ_DEADLINE_S):
                with _as_os_errors():
                    got = await obstore.get_async(self._bucket, _name(object_id), options={"range": (start, end)})
                    return memoryview(await got.bytes_async()), got.meta["size"]
        except FileNotFoundError:
            raise
        except TimeoutError:
            error = StoreAwayError(f"{self._url} has not answered for {READ_DEADLINE_S:.0f} s")
        except OSError as refused:
            if _RANGE_REFUSED in str(refused):
                return memoryview(b""), start
            error = refused
        self._away_until = time.monotonic() + AWAY_S
        self._away_why = str(error)
        raise error


def _name(object_id: int) -> str:
    return f"{object_id:016x}.object"


def _parts(pieces: Sequence[Buffer]) -> Iterator[bytes]:
    """Yield the same bytes in parts of equal size; only the last may be smaller."""
    part = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        while view:
            taken = view[: PART_BYTES - len(part)]
            part += taken
            view = view[len(taken) :]
            if len(part) == PART_BYTES:
                yield bytes(part)
                part = bytearray()
    if part:
        yield bytes(part)


@contextmanager
def _as_os_errors() -> Generator[None]:
    """Convert obstore's errors to OSError with a one-line message."""
    try:
        yield
    except BaseError as error:
        raise StoreAwayError(_one_line(error)) from error
    except ValueError as error:
        raise StoreAwayError(str(error)) from error


def _one_line(error: BaseException) -> str:
    """Return the error's text without the trace and the XML page around it."""
    said = str(error).partition("\n\nDebug source")[0]
    code = re.search(r"<Code>([^<]*)</Code>", said)
    said = re.sub(r"<\?xml.*|<!DOCTYPE.*|<html.*", "", said, flags=re.DOTALL | re.IGNORECASE)
    said = " ".join(said.split()).removesuffix(":")
    return f"{said}: {code[1]}" if code else said
