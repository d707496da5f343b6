"""Schemas of a Confluent-compatible registry, by the id that a record's bytes begin with.

The one idea: a schema never changes, so it is fetched once and kept, up to a bounded number. A registry that does not
answer is not asked again for some seconds, so that a page of records waits for it once. A schema that was absent may
appear, so its absence is kept for as long.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import quote

import aiohttp

from gateway.console.decode import Declared, DecodeError, Json, Schemas, avro
from gateway.console.descriptors import read_descriptor
from gateway.security.http_bodies import read_bounded

MAX_SCHEMAS = 200
MAX_FETCHED = 50
"""Maximal number of schemas that one answer waits for: a record chooses its id, and each unknown id is a request."""
MAX_SCHEMA_BYTES = 512 * 1024
MAX_REFERENCES = 20
TIMEOUT_S = 3.0
AWAY_S = 10.0
"""If a registry failed, no request is sent to it for this time. Nor is a schema asked for again that cannot be used."""


@dataclass(frozen=True, slots=True)
class AvroSchema:
    schema: Json
    references: Sequence[Json]
    form = "avro"

    def decode(self, body: bytes) -> Json:
        return avro(body, self.schema, self.references)


class JsonSchema:
    """A JSON Schema. Its values are shown as they are; the console does not validate them."""

    form = "json"

    def decode(self, body: bytes) -> Json:
        found: Json = json.loads(body)
        return found


class Registry:
    """The registry at `url`. `login` is user:password, empty for none."""

    def __init__(self, url: str, login: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Basic {b64encode(login.encode()).decode()}"} if login else {}
        self._clock = clock
        self._known: OrderedDict[int, tuple[Declared | str, float]] = OrderedDict()
        """Each schema, or the reason why it cannot be used, and the time until which that counts."""
        self._asking: dict[int, asyncio.Task[Declared | str]] = {}
        self._away_until_s = float("-inf")
        self._away = ""

    def schemas(self) -> Schemas:
        """Return a function for a thread that decodes the records of one answer. It waits for at most MAX_FETCHED
        schemas."""
        loop = asyncio.get_running_loop()
        fetched: set[int] = set()

        def find(schema_id: int) -> Declared:
            found = self._kept(schema_id)
            if found is None:
                fetched.add(schema_id)
                if len(fetched) > MAX_FETCHED:
                    raise DecodeError(f"the records have more than {MAX_FETCHED} new schemas; search again")
                found = asyncio.run_coroutine_threadsafe(self.find(schema_id), loop).result()
            if isinstance(found, str):
                raise DecodeError(found)
            return found

        return find

    async def find(self, schema_id: int) -> Declared | str:
        """Return the schema, or a sentence that says why it is missing."""
        found = self._kept(schema_id)
        if found is not None:
            self._known.move_to_end(schema_id)
            return found
        if self._clock() < self._away_until_s:
            return self._away
        asking = self._asking.get(schema_id)
        if asking is None:
            asking = self._asking[schema_id] = asyncio.create_task(self._fetch(schema_id))
            asking.add_done_callback(lambda _: self._asking.pop(schema_id, None))
        # A page that is closed must not cancel the fetch that other pages wait for.
        return await asyncio.shield(asking)

    def _kept(self, schema_id: int) -> Declared | str | None:
        found, until_s = self._known.get(schema_id, (None, 0.0))
        return found if self._clock() < until_s else None

    async def close(self) -> None:
        """Cancel the fetches in progress."""
        asking = list(self._asking.values())
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _fetch(self, schema_id: int) -> Declared | str:
        found: Declared | str
        try:
            async with asyncio.timeout(TIMEOUT_S), aiohttp.ClientSession(headers=self._headers) as session:
                found = await self._declared(session, schema_id)
        except _AbsentError:
            found = f"the registry has no schema {schema_id}"
        except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
            said = str(error) or type(error).__name__
            self._away = f"the schema registry (console.schema.registry.url) does not answer: {said}"[:200]
            self._away_until_s = self._clock() + AWAY_S
            return self._away
        except (DecodeError, ValueError, LookupError, TypeError, RecursionError) as error:
            found = f"schema {schema_id} of the registry cannot be used: {error}"[:200]
        self._known[schema_id] = found, self._clock() + AWAY_S if isinstance(found, str) else math.inf
        while len(self._known) > MAX_SCHEMAS:
            self._known.popitem(last=False)
        return found

    async def _declared(self, session: aiohttp.ClientSession, schema_id: int) -> Declared:
        answer = await self._get(session, f"/schemas/ids/{schema_id}")
        kind = str(answer.get("schemaType", "AVRO"))
        match kind:
            case "AVRO":
                references = await self._referenced(session, answer.get("references"))
                return AvroSchema(json.loads(str(answer["schema"])), references)
            case "PROTOBUF":
                serialized = await self._get(session, f"/schemas/ids/{schema_id}?format=serialized")
                return read_descriptor(b64decode(str(serialized["schema"]), validate=True))
            case "JSON":
                return JsonSchema()
            case _:
                raise DecodeError(f"its kind {kind} is unknown")

    async def _referenced(self, session: aiohttp.ClientSession, references: Json) -> list[Json]:
        """Return the schemas to which a schema refers. Each comes after the schemas to which it refers itself."""
        found: dict[tuple[str, int], Json] = {}

        async def add(listed: Json) -> None:
            for each in cast("list[dict[str, Json]]", listed or []):
                key = str(each["subject"]), int(cast(int, each["version"]))
                if key in found:
                    continue
                if len(found) >= MAX_REFERENCES:
                    raise DecodeError(f"it refers to more than {MAX_REFERENCES} schemas")
                found[key] = None
                path = f"/subjects/{quote(key[0], safe='')}/versions/{key[1]}"
                answer = await self._get(session, path)
                await add(answer.get("references"))
                del found[key]
                found[key] = json.loads(str(answer["schema"]))

        await add(references)
        return list(found.values())

    async def _get(self, session: aiohttp.ClientSession, path: str) -> dict[str, Json]:
        """Return the JSON object at a path. Raise aiohttp.ClientError, OSError, ValueError or _AbsentError."""
        async with session.get(self._url + path, allow_redirects=False) as response:
            if response.status == 404:
                raise _AbsentError
            if response.status != 200:
                raise OSError(f"status {response.status}")
            body = await read_bounded(response, MAX_SCHEMA_BYTES)
        answer: Json = json.loads(body)
        if not isinstance(answer, dict):
            raise ValueError("the answer is no object")
        return answer


class _AbsentError(Exception):
    """The registry has no such schema."""
