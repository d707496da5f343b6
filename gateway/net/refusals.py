"""Derive refusals from the declarations of APIs' requests and responses.

The one idea: a refusal is a response with one error code in every place where clients of that API look for it. If the
response has a code at the top level, the code stands there. Otherwise the response names each element that the request
names, with the code. The declarations say which fields that are: an array of the response answers the array of the
request that has its name, or the only one. A handler module declares what does not follow from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages import find_message
from protocol.schema import Direction, Field, Kind, StructSchema, struct_schema

_IDENTITIES = frozenset(
    {
        *("entity", "group_id", "index", "name", "partition", "partition_id", "partition_index", "producer_id"),
        *("resource_name", "resource_type", "topic", "topic_id"),
    }
)
"""Fields that identify an element. A refusal repeats them as the request has them."""

_CODE, _MESSAGE = "error_code", "error_message"


@dataclass(frozen=True, slots=True)
class _Part:
    """How one struct of a refusal is made from its counterpart in the request, at one version."""

    struct_type: Callable[..., object]
    constants: Mapping[str, object]
    has_code: bool
    has_message: bool
    copied: tuple[tuple[str, str, object], ...]
    """Fields of the response, each with a field of the request, and with a value for null if the response field cannot
    be null.
    """
    named: str | None
    """The field that receives an element of the request if the element is not a struct."""
    arrays: tuple[tuple[str, str, _Part], ...]
    """Arrays of the response, each with an array of the request and the way to make an element."""

    def make(self, asked: object, code: ErrorCode, message: str | None) -> object:
        values = dict(self.constants)
        if self.has_code:
            values[_CODE] = code
        if self.has_message:
            values[_MESSAGE] = message
        if self.named is not None:
            values[self.named] = asked
        for name, source, null in self.copied:
            value: object = getattr(asked, source)
            values[name] = null if value is None else value
        for name, source, part in self.arrays:
            elements: Iterable[object] = getattr(asked, source) or ()
            values[name] = tuple([part.make(element, code, message) for element in elements])
        return self.struct_type(**values)


class DerivedRefusal:
    """Refuse requests of one API. Calling it returns the response in which everything requested failed."""

    def __init__(
        self,
        api_key: ApiKey,
        *,
        values: Mapping[str, object] | None = None,
        answers: Mapping[str, str] | None = None,
        elements: bool = False,
        code_at: Callable[[int, ErrorCode], ErrorCode] | None = None,
    ) -> None:
        """Take what does not follow from the declarations of an API.

        `values`: fields of the response, at any depth, with values that differ from their wire defaults. None counts
        only in versions in which the field is nullable.
        `answers`: a field of the response → the field of the request that it repeats or whose elements it answers.
        `elements`: True if elements have the code even if the top level has it too.
        `code_at`: returns the code that clients of a version know.
        """
        request, response = find_message(api_key, Direction.REQUEST), find_message(api_key, Direction.RESPONSE)
        if request is None or response is None:
            raise TypeError(f"{api_key.name} is not declared")
        self._request, self._response = request, response
        self._values = values or {}
        self._answers = answers or {}
        self._elements = elements
        self._code_at = code_at
        self._plans: dict[int, _Part] = {}

    def __call__(self, request: object, version: int, code: ErrorCode, message: str | None) -> object:
        """Return the response in which each requested element failed with `code`. Raise TypeError if the response has
        no field for a code.
        """
        if self._code_at is not None:
            code = self._code_at(version, code)
        plan = self._plans.get(version)
        if plan is None:
            plan = self._plan(self._response, self._request, version, top=True)
            if not (plan.has_code or plan.arrays):
                raise TypeError(f"{self._response.struct_type.__name__} has no place for a code in version {version}")
            self._plans[version] = plan
        return plan.make(request, code, message)

    def _plan(
        self, response: StructSchema, asked: StructSchema | Kind[object], version: int, *, top: bool = False
    ) -> _Part:
        fields = {field.name: field for field in response.fields if version in field.versions}
        asked_fields: dict[str, Field] = {}
        if isinstance(asked, StructSchema):
            asked_fields = {field.name: field for field in asked.fields if version in field.versions}
        named = None
        if isinstance(asked, Kind):
            named = next((name for name, field in fields.items() if field.kind is asked and name != _MESSAGE), None)
        has_code = _CODE in fields
        return _Part(
            struct_type=response.struct_type,
            constants={
                name: value
                for name, value in self._values.items()
                if name in fields and (value is not None or version in fields[name].nullable)
            },
            has_code=has_code,
            has_message=_MESSAGE in fields,
            copied=tuple(self._copied(fields, asked_fields, version, top=top)),
            named=named,
            arrays=()
            if has_code and not (top and self._elements)
            else tuple(self._arrays(fields, asked_fields, version)),
        )

    def _copied(
        self, fields: Mapping[str, Field], asked: Mapping[str, Field], version: int, *, top: bool
    ) -> Iterable[tuple[str, str, object]]:
        for name, field in fields.items():
            source = self._answers.get(name, name)
            repeated = name in self._answers or (name in _IDENTITIES and not top)
            if repeated and source in asked and not _is_answered(field, version):
                has_null = version in field.nullable or not isinstance(field.kind, Kind)
                yield name, source, None if has_null else field.kind.zero

    def _arrays(
        self, fields: Mapping[str, Field], asked: Mapping[str, Field], version: int
    ) -> Iterable[tuple[str, str, _Part]]:
        """Yield the arrays of a response struct whose elements take the code."""
        sources = [field for field in asked.values() if field.is_array]
        for name, field in fields.items():
            if not (isinstance(field.kind, type) and _is_answered(field, version)):
                continue
            wanted = self._answers.get(name, name)
            matching = [source for source in sources if source.name == wanted] or sources
            if len(matching) > 1:
                raise TypeError(f"{self._response.struct_type.__name__}.{name} may answer several arrays")
            for source in matching:
                element = struct_schema(source.kind) if isinstance(source.kind, type) else source.kind
                yield name, source.name, self._plan(struct_schema(field.kind), element, version)


@cache
def _is_answered(field: Field, version: int) -> bool:
    """Return whether a field of a response is an array of structs that have an error code, themselves or deeper."""
    if not (field.is_array and isinstance(field.kind, type)):
        return False
    fields = [each for each in struct_schema(field.kind).fields if version in each.versions]
    return any(each.name == _CODE or _is_answered(each, version) for each in fields)
