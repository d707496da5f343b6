"""The definition of a Kafka-named setting: type, default, bounds, documentation, and when it may change.

The one idea: a setting is declared once, as a field of a frozen dataclass whose metadata is its `ConfigKey`
(`gateway/config/broker.py`, `gateway/config/topic.py`). Three things follow from that declaration: the typed value that
the gateway runs by, the text that DescribeConfigs shows, and the refusal of a wrong value. Named after upstream's
ConfigDef. It holds no table of its own and reads no file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Never, TypeVar, cast

ConfigValue = bool | int | float | str | tuple[str, ...] | None
ValueT = TypeVar("ValueT", bound=ConfigValue)

HIDDEN = "[hidden]"
"""Text that is shown in place of a password, as in upstream."""
MAX_INT = 2**31 - 1
MAX_LONG = 2**63 - 1
MEBIBYTE = 1024 * 1024


class ConfigType(IntEnum):
    """Types in DescribeConfigs v3+ (upstream's ConfigEntry.ConfigType)."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7
    CLASS = 8
    PASSWORD = 9


class ConfigSource(IntEnum):
    """Wire values of DescribeConfigs (upstream's DescribeConfigsResponse.ConfigSource)."""

    UNKNOWN = 0
    TOPIC_CONFIG = 1
    DYNAMIC_BROKER_CONFIG = 2
    DYNAMIC_DEFAULT_BROKER_CONFIG = 3
    STATIC_BROKER_CONFIG = 4
    DEFAULT_CONFIG = 5
    DYNAMIC_BROKER_LOGGER_CONFIG = 6
    GROUP_CONFIG = 8


class Update(Enum):
    """When a setting may change."""

    DYNAMIC = "dynamic"
    """At any time, through AlterConfigs for one node or for all."""
    OF_ONE_NODE = "of_one_node"
    """AlterConfigs may change the setting of a single node at any time."""
    AT_START = "at_start"
    """A flag, the environment or a file sets the setting; it is read-only while the gateway runs."""
    FIXED = "fixed"
    """Never: its one value describes what the gateway does, and every other value is refused."""


class ConfigError(ValueError):
    """A setting was given a value it cannot have. Clients (INVALID_CONFIG) and users at start see the same text. It
    repeats Kafka's words if Kafka has any, because clients' tests compare them."""

    def __init__(self, name: str, value: str | None, reason: str, text: str | None = None) -> None:
        """Take the setting, its value and the reason. `text` replaces the whole message if the error is not about a
        value."""
        super().__init__(text or f"Invalid value {value} for configuration {name}: {reason}")
        self.name = name
        self.value = value
        self.reason = reason


Check = Callable[[Never], str | None]
"""Returns an error text for a parsed value of the setting's type, or None if the value is valid."""


@dataclass(frozen=True, slots=True)
class Synonym:
    """A broker setting that gives a topic setting its default; `factor` converts the unit (hours to ms)."""

    name: str
    factor: int = 1


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One setting. `default` is a typed value; None is shown as null."""

    name: str
    type: ConfigType
    default: ConfigValue
    documentation: str
    check: Check | None = None
    update: Update = Update.DYNAMIC
    synonyms: tuple[Synonym, ...] = ()
    """The broker settings that correspond to a topic setting, the strongest first."""
    internal: bool = False
    """True if the setting is accepted, but listed only if it was set. Upstream's own tests set it; users do not."""
    distinct: bool = False
    """True if repeated elements of the list count once and empty elements are refused (KIP-1161)."""

    def parse(self, text: str) -> ConfigValue:
        """Return the typed value; raise ConfigError if the text is not of the type or outside what the setting
        allows."""
        if self.type is ConfigType.PASSWORD:
            return text.strip()
        value = _parse(self.name, self.type, text.strip())
        if self.distinct and isinstance(value, tuple):
            if "" in value:
                reason = "values must not be empty"
                raise ConfigError(self.name, text, reason, f"Configuration '{self.name}' {reason}.")
            value = tuple(dict.fromkeys(value))
        check = cast("Callable[[ConfigValue], str | None] | None", self.check)
        reason = check(value) if check is not None else None
        if reason is not None:
            raise ConfigError(self.name, text, reason)
        if self.update is Update.FIXED and value != self.default:
            only = "is not set here" if self.default is None else f"only {render(self.default)} is served"
            raise ConfigError(self.name, text, f"{only}. {self.documentation}")
        return value


def _parse(name: str, kind: ConfigType, text: str) -> ConfigValue:
    match kind:
        case ConfigType.BOOLEAN:
            if text.lower() not in ("true", "false"):
                raise ConfigError(name, text, "Expected value to be either true or false")
            return text.lower() == "true"
        case ConfigType.INT | ConfigType.SHORT | ConfigType.LONG:
            bits = {ConfigType.SHORT: 15, ConfigType.INT: 31, ConfigType.LONG: 63}[kind]
            digits = text[1:] if text[:1] in ("-", "+") else text
            # Bounded before int(), because int() has its own limit on digits and raises an error that is not a
            # ConfigError.
            if not (digits.isascii() and digits.isdigit()) or len(digits) > 19:
                raise ConfigError(name, text, f"Not a number of type {kind.name}")
            number = int(text)
            if not -(2**bits) <= number < 2**bits:
                raise ConfigError(name, text, f"Not a number of type {kind.name}")
            return number
        case ConfigType.DOUBLE:
            try:
                return float(text)
            except ValueError as error:
                raise ConfigError(name, text, "Not a number of type DOUBLE") from error
        case ConfigType.LIST:
            return tuple(part.strip() for part in text.split(",")) if text else ()
        case ConfigType.STRING | ConfigType.CLASS | ConfigType.PASSWORD:
            return text


def render(value: ConfigValue) -> str | None:
    """Return a typed value as the text that Kafka shows; None is shown as null."""
    match value:
        case None:
            return None
        case bool():
            return "true" if value else "false"
        case tuple():
            return ",".join(value)
        case _:
            return str(value)


# --- checks -------------------------------------------------------------------------------------------------------


def at_least(minimum: float) -> Callable[[float], str | None]:
    return lambda value: None if value >= minimum else f"Value must be at least {minimum}"


def between(minimum: float, maximum: float) -> Callable[[float], str | None]:
    def check(value: float) -> str | None:
        # A comparison in this form refuses a NaN as well.
        if minimum <= value <= maximum:
            return None
        return f"Value must be no more than {maximum}" if value > maximum else f"Value must be at least {minimum}"

    return check


def one_of(*allowed: str) -> Callable[[str], str | None]:
    return lambda value: None if value in allowed else f"String must be one of: {', '.join(allowed)}"


codec_choice = one_of("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")
"""A codec of record batches, with its name in `compression.type`."""


def gzip_level(level: int) -> str | None:
    return None if level == -1 else between(1, 9)(level)


def each_one_of(*allowed: str) -> Callable[[tuple[str, ...]], str | None]:
    def check(values: tuple[str, ...]) -> str | None:
        if len(set(values)) != len(values):
            return "names a value twice"
        wrong = [value for value in values if value not in allowed]
        return f"must be a list of {', '.join(allowed)}" if wrong else None

    return check


def some_of(*allowed: str) -> Callable[[tuple[str, ...]], str | None]:
    """Check like `each_one_of`, and refuse an empty list."""
    each = each_one_of(*allowed)

    def check(values: tuple[str, ...]) -> str | None:
        return each(values) if values else f"names none of {', '.join(allowed)}"

    return check


# --- declarations as dataclass fields -----------------------------------------------------------------------------


def setting(
    kind: ConfigType,
    default: ValueT,
    documentation: str,
    check: Check | None = None,
    *,
    name: str = "",
    update: Update = Update.DYNAMIC,
    synonyms: Iterable[Synonym] = (),
    internal: bool = False,
    distinct: bool = False,
) -> ValueT:
    """Return a dataclass field that declares a setting. The setting's name is the field's name with dots, unless `name`
    is given.
    """
    declared = ConfigKey(name, kind, default, documentation, check, update, tuple(synonyms), internal, distinct)
    return dataclasses.field(default=default, metadata={"setting": declared})


def declared_settings(config_class: type[Any]) -> dict[str, ConfigKey]:
    """Return the settings that `setting` declares, by field name, in order of declaration."""
    keys: dict[str, ConfigKey] = {}
    for field in dataclasses.fields(config_class):
        declared: ConfigKey | None = field.metadata.get("setting")
        if declared is not None:
            keys[field.name] = dataclasses.replace(declared, name=declared.name or field.name.replace("_", "."))
    return keys
