"""Kafka's messages, one module per API, each declaring the request and the response with their structs.

The one idea: a declaration costs a process time and memory, so a module is loaded when its API is first used. A handler
or a command imports the modules of the messages that it names. `find_message` loads the module of a key, which is named
like the key: `ApiKey.LIST_GROUPS` is declared in `list_groups`. `declared_messages` loads them all. `protocol.schema`
alone knows only what is loaded. This package holds no behaviour of a message.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from protocol.api_keys import ApiKey
from protocol.schema import Direction, MessageSchema, loaded_message, loaded_messages

_KEYS = frozenset(map(int, ApiKey))


def find_message(api_key: int, direction: Direction) -> MessageSchema | None:
    """Return the schema of an API's request or response, None if no module declares it. The first call for an API may
    take some milliseconds, because it loads the API's module."""
    found = loaded_message(api_key, direction)
    if found is None and api_key in _KEYS:
        _load(ApiKey(api_key))
        found = loaded_message(api_key, direction)
    return found


def declared_messages() -> tuple[MessageSchema, ...]:
    """Return every declared message, by API key, request first. This loads every module."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return loaded_messages()


@cache
def _load(api_key: ApiKey) -> None:
    name = f"{__name__}.{api_key.name.lower()}"
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        # Sluice declares no message for some of Kafka's keys, for instance those of telemetry.
        if error.name != name:
            raise
