"""Schemas by id, from a registry that speaks Confluent's protocol.

The one idea: a schema never changes under its id, so the job requests it once and keeps it. If the registry does not
respond, the batch is tried again, as if a broker did not respond. Nothing is committed, and no record becomes a dead
letter because its registry was unreachable.
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
MAX_REFERENCES = 200
"""Maximal number of schemas to which one schema refers, directly or indirectly."""
_UNKNOWN = frozenset((40401, 40402, 40403))
"""The registry's own error codes in a 404 answer: no such subject, version or schema. A 404 of another server has no
such code.
"""
_RETRIED = frozenset((408, 429, 500, 502, 503, 504))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects. Otherwise urllib would send the password of --registry to any server that a redirect names."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


@dataclass(frozen=True, slots=True)
class Reference:
    """A schema, identified by its place in the registry."""

    subject: str
    version: int


@dataclass(frozen=True, slots=True)
class Schema:
    kind: str
    """One of AVRO, JSON and PROTOBUF."""
    text: str
    references: tuple[Reference, ...] = ()


@dataclass(slots=True)
class Registry:
    """`url` may hold a user and a password."""

    url: str
    _known: dict[str, Schema] = field(default_factory=dict[str, Schema])
    """Schemas that are already known, by their paths in the registry."""

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PipelineError(f"--registry {self.name} is no URL.", "Write it like https://registry:8081.")

    @property
    def name(self) -> str:
        """The registry's URL without user and password."""
        return self.url.rpartition("@")[2]

    def schema(self, number: int) -> Schema | None:
        """Return the schema of an id, None if the registry does not have it.

        Raise UnreachableError if the registry does not respond, and PipelineError if it refuses.
        """
        return self._schema(f"/schemas/ids/{number}")

    def referred(self, schema: Schema) -> list[Schema]:
        """Return the schemas that a schema refers to, directly or not, each after those that it refers to itself.

        Raise LookupError if the registry lacks one of them, or if there are more than MAX_REFERENCES. UnreachableError
        and PipelineError are raised as in `schema`.
        """
        found: dict[Reference, Schema] = {}
        opened: set[Reference] = set()
        waiting: list[Reference] = list(reversed(schema.references))
        while waiting:
            each = waiting[-1]
            if each in found:
                waiting.pop()
                continue
            # Other schemas may still refer to a deleted version.
            path = f"/subjects/{urllib.parse.quote(each.subject, safe='')}/versions/{each.version}?deleted=true"
            told = self._schema(path)
            if told is None:
                raise LookupError(f"version {each.version} of {each.subject}, which the registry lacks")
            if len(opened | set(told.references)) > MAX_REFERENCES:
                raise LookupError(f"more than {MAX_REFERENCES} schemas")
            if each in opened:
                found[each] = told
                waiting.pop()
                continue
            opened.add(each)
            waiting += [other for other in reversed(told.references) if other not in opened]
        return list(found.values())

    def _schema(self, path: str) -> Schema | None:
        if path not in self._known:
            found = self._ask(path)
            if found is None:
                # A missing schema is not remembered, because it may be registered later.
                return None
            self._known[path] = found
        return self._known[path]

    def _ask(self, path: str) -> Schema | None:
        try:
            with _OPENER.open(self._request(path), timeout=REQUEST_SECONDS) as answer:
                text = answer.read(MAX_SCHEMA_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == http.HTTPStatus.NOT_FOUND and _code(error.read(MAX_SCHEMA_BYTES)) in _UNKNOWN:
                    return None
            if error.code in _RETRIED:
                raise self._away(f"it answers {error.code}") from error
            raise PipelineError(
                f"The schema registry at {self.name} answers {error.code} {error.reason} to {path}.",
                "Check --registry, and the user and password in it.",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._away(str(error)) from error
        try:
            told: Any = json.loads(text) if len(text) <= MAX_SCHEMA_BYTES else {}
            references = tuple(
                Reference(str(each["subject"]), int(each["version"])) for each in told.get("references") or ()
            )
            return Schema(str(told.get("schemaType") or "AVRO"), str(told["schema"]), references)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PipelineError(
                f"The answer of {self.name} to {path} is none of a schema registry.", "Check --registry."
            ) from error

    def _request(self, path: str) -> urllib.request.Request:
        parts = urllib.parse.urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        url = f"{parts.scheme}://{host}{parts.path.rstrip('/')}{path}"
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
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
