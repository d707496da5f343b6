"""Schemas by id, from a registry that speaks Confluent's protocol.

The one idea: a schema never changes under its id, so it is asked for once and kept. A registry that does not answer is
like a broker that does not: the batch is tried again, nothing is committed, and no record becomes a dead letter because
its registry was away.
"""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import PipelineError
from pipeline.kafka import UnreachableError

REQUEST_SECONDS = 10.0
MAX_SCHEMA_BYTES = 4 * 1024 * 1024
UNKNOWN_SCHEMA = 40403
"""The registry's own code in an answer 404. A 404 without it comes from another server."""
_RETRIED = frozenset((408, 429, 500, 502, 503, 504))


@dataclass(frozen=True, slots=True)
class Schema:
    kind: str
    """AVRO, JSON or PROTOBUF."""
    text: str
    refers: bool
    """True if the schema needs others."""


@dataclass(slots=True)
class Registry:
    """`url` may hold a user and a password."""

    url: str
    _known: dict[int, Schema] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PipelineError(f"--registry {self.name} is no URL.", "Write it like https://registry:8081.")

    @property
    def name(self) -> str:
        """The registry's URL without user and password."""
        return self.url.rpartition("@")[2]

    def schema(self, number: int) -> Schema | None:
        """Return the schema of an id, None if the registry knows of none.

        UnreachableError if the registry does not answer, PipelineError if it refuses.
        """
        if number not in self._known:
            found = self._ask(number)
            if found is None:
                # Not kept: the schema may be registered later.
                return None
            self._known[number] = found
        return self._known[number]

    def _ask(self, number: int) -> Schema | None:
        try:
            with urllib.request.urlopen(self._request(number), timeout=REQUEST_SECONDS) as answer:
                text = answer.read(MAX_SCHEMA_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == http.HTTPStatus.NOT_FOUND and _code(error.read(MAX_SCHEMA_BYTES)) == UNKNOWN_SCHEMA:
                    return None
            if error.code in _RETRIED:
                raise self._away(f"it answers {error.code}") from error
            raise PipelineError(
                f"The schema registry at {self.name} answers {error.code} {error.reason} to the schema {number}.",
                "Check --registry, and the user and password in it.",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._away(str(error)) from error
        try:
            told = json.loads(text) if len(text) <= MAX_SCHEMA_BYTES else {}
            return Schema(told.get("schemaType", "AVRO"), told["schema"], bool(told.get("references")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PipelineError(
                f"The answer of {self.name} to the schema {number} is none of a schema registry.", "Check --registry."
            ) from error

    def _request(self, number: int) -> urllib.request.Request:
        parts = urllib.parse.urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        url = urllib.parse.urlunsplit((parts.scheme, host, f"{parts.path.rstrip('/')}/schemas/ids/{number}", "", ""))
        request = urllib.request.Request(url, headers={"Accept": "application/vnd.schemaregistry.v1+json"})
        if parts.username is not None:
            user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            request.add_header("Authorization", f"Basic {base64.b64encode(user.encode()).decode()}")
        return request

    def _away(self, why: str) -> UnreachableError:
        return UnreachableError(
            f"The schema registry at {self.name} does not answer ({why}).",
            "Check --registry, and that it runs; then start the job again: it goes on where it was.",
        )


def _code(text: bytes) -> Any:
    try:
        return json.loads(text)["error_code"]
    except (ValueError, KeyError, TypeError):
        return None
