"""The settings that a node reads at start: every option once, from flag, environment, file or default.

The one idea: one table, `OPTIONS`. Flags, `SLUICE_*` variables, TOML keys, `--help` and `sluice config` derive from it,
and the order flag > environment > file > default is applied to all alike. Kafka-named broker settings have a table of
their own (`gateway/config/broker.py`). They are given by `--set`, environment or the file's `[broker]` table.

Nothing is guessed: an unknown key or variable, or a value that does not parse, is refused with its origin. This module
reads no clock and opens no socket.
"""

from __future__ import annotations

import os
import re
import socket
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from gateway.config.broker import BrokerConfig
from gateway.config.broker_parsing import parse_broker_configs
from gateway.config.broker_table import BROKER_CONFIGS, IDLE, find_broker_config
from gateway.config.database_options import DATA_DIR, DATABASE_URL, LOG_STORE, POSTGRES_BIN, DatabaseOption
from gateway.config.definition import HIDDEN, ConfigError, ConfigType
from gateway.config.errors import ConfigurationError
from gateway.config.listeners import (
    DEFAULT_NAME,
    INTER_BROKER,
    PROTOCOL_MAP,
    WILDCARDS,
    Listener,
    parse_address,
    parse_listeners,
    parse_roles,
    render_address,
    share_listeners,
)
from gateway.config.log_options import LOG_LEVELS, LogFormat
from gateway.config.secret_files import SUFFIX, SecretFileError, SecretFiles, read_secret, read_secret_files
from gateway.config.security import listener_security
from gateway.config.suggestions import did_you_mean, may_be_secret
from gateway.config.without_effect import WITHOUT_EFFECT
from storage.byte_store import BUCKET_URL
from storage.database_url import parse_database_url
from storage.roles import Address, Roles

ENVIRONMENT_PREFIX = "SLUICE_"
AUTO = "auto"
OTHER_CONNECTIONS = 6
"""Number of a node's connections to Postgres beside the hot and cold ones: three for control, and one each to listen,
to relay SQL records, and to confirm the history now and then."""
_COLLECTOR = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A token of HTTP (RFC 9110)."""
_SHARE = re.compile(r"0|1|0\.\d{1,9}|1\.0{1,9}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Sources:
    """Arguments of `load`, to load the settings again after a file has changed."""

    flags: Mapping[str, str]
    assignments: tuple[str, ...]
    environment: Mapping[str, str]
    config: str | None
    files: tuple[Path, ...]
    """Files that were read: the TOML file, and those with secrets."""

    def load(self) -> Settings:
        """Load the settings again. Raise ConfigurationError."""
        return load(self.flags, self.assignments, self.environment, self.config).settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options, typed. Field names are the options' with underscores."""

    listeners: tuple[Listener, ...]
    """Listeners, those of the broker role first. The address of the first is the node's name."""
    roles: Roles
    database_url: str | None
    """The database's URL. None if the node runs an embedded Postgres below `data_dir`."""
    database_url_file: Path | None = None
    """File that `database_url` was read from. Each new connection reads it again."""
    data_dir: Path
    postgres_bin: Path | None
    """Directory of the programs of the embedded Postgres; None: the wheel's or the system's."""
    log_store: Path | str | None
    """Place of record bytes outside Postgres: a directory, or the URL of a bucket. None if all bytes are in Postgres.
    `log_place` resolves "auto".
    """
    rack: str | None
    metrics_listen: Address | None
    metrics_max_series: int
    log_format: LogFormat
    log_level: str
    audit_log: Path | str | None
    """File for one line per change of the cluster, or "stdout"; None: no audit log."""
    otlp_endpoint: str | None
    """Base URL of the collector that spans are sent to; None: there are no spans."""
    otlp_headers: tuple[tuple[str, str], ...] | None = field(repr=False)
    """Names and values of headers that are sent with each batch of spans."""
    otlp_sample: float
    """Share of successful requests and commits that get a span, from 0 to 1."""
    hot_connections: int
    cold_connections: int
    committers: int
    tail_bytes: int
    node_ttl_ms: int
    drain_ms: int
    workers: int
    """Nodes that `sluice serve` runs, one process each. If there are several, these settings are the first node's."""
    broker: BrokerConfig
    sources: Sources = field(repr=False, compare=False)

    @property
    def log_place(self) -> Path | str | None:
        """Directory of the log's segments, or URL of the bucket with its objects; None: all bytes are in Postgres."""
        if self.log_store == AUTO:
            return self.data_dir / "log" if self.database_url is None else None
        return self.log_store

    @property
    def max_request_bytes(self) -> int:
        """The setting socket.request.max.bytes."""
        return self.broker.socket_request_max_bytes

    @property
    def connections(self) -> int:
        """Greatest number of one node's connections to Postgres."""
        return self.hot_connections + self.cold_connections + OTHER_CONNECTIONS

    @property
    def max_connections(self) -> int:
        return self.broker.max_connections


# --- kinds of values --------------------------------------------------------------------------------------------------


def _advertised(text: str) -> Address:
    host, port = parse_address(text)
    if host in WILDCARDS:
        raise ValueError("expected the HOST:PORT at which clients reach this node")
    return host, port


def _address_or_off(text: str) -> Address | None:
    return None if text == "off" else parse_address(text)


def read_database_url(path: Path) -> str:
    """Return the URL that a file holds. Raise ValueError, without any part of the URL in it."""
    return _database_url(read_secret(path))


def _database_url(text: str) -> str:
    try:
        parse_database_url(text)
    except ValueError:
        raise ValueError(
            "expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE, in it special characters as %XX (%40 for @)"
        ) from None
    return text


def _directory(text: str) -> Path:
    path = Path(_text(text)).expanduser()
    # Unlike Path's methods, these raise no error if another user's directory is in the way.
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError("is not a directory")
    return path


def _audit_log(text: str) -> Path | str | None:
    if text in ("off", "stdout"):
        return None if text == "off" else text
    path = Path(_text(text)).expanduser()
    if os.path.isdir(path):
        raise ValueError("is a directory: expected a file")
    return path


def _collector(text: str) -> str | None:
    if text == "off":
        return None
    if not _COLLECTOR.fullmatch(text):
        raise ValueError("expected http://HOST:PORT or https://HOST:PORT, and keys in --otlp-headers")
    return text.rstrip("/")


def _headers(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    for name, equals, value in pairs:
        if not (equals and _HEADER_NAME.fullmatch(name.strip()) and value.isascii() and value.isprintable()):
            raise ValueError("expected NAME=VALUE, several separated by commas")
    return tuple((name.strip(), value.strip()) for name, _, value in pairs)


def _share(text: str) -> float:
    if not _SHARE.fullmatch(text):
        raise ValueError("expected a number from 0 to 1, e.g. 0.05")
    return float(text)


def _log_store(text: str) -> Path | str | None:
    if text == AUTO:
        return AUTO
    if "://" not in text:
        return None if text == "inline" else _directory(text)
    if not BUCKET_URL.fullmatch(text):
        raise ValueError(
            "expected s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX, and keys in the environment"
        )
    return text.rstrip("/")


def _whole(minimum: int, maximum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text, re.ASCII) or not minimum <= int(text) <= maximum:
            raise ValueError(f"expected a whole number from {minimum} to {maximum}")
        return int(text)

    return parse


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return text

    return parse


def _text(text: str) -> str:
    if not text:
        raise ValueError("is empty")
    return text


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a node. `default` is text like any other value; None: unset, and so is the setting."""

    name: str
    parse: Callable[[str], object]
    default: str | None
    metavar: str
    help: str
    secret: bool = False
    """True if the option holds a password, which `sluice config` hides."""
    hidden: bool = False
    """True if the whole value is hidden; False if only the password within a URL is hidden."""

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.field.upper()

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    def shown(self, text: str) -> str:
        """Return a value of this option with its secret part hidden."""
        if self.hidden:
            return HIDDEN
        return hide_password(text) if self.secret else text


def _of_database(option: DatabaseOption, parse: Callable[[str], object], *, secret: bool = False) -> Option:
    return Option(option.name, parse, option.default, option.metavar, option.help, secret)


OPTIONS: tuple[Option, ...] = (
    Option(
        "listen",
        parse_address,
        "127.0.0.1:9092",
        "HOST:PORT",
        "where Kafka clients connect: short for --set listeners=PLAINTEXT://HOST:PORT",
    ),
    Option(
        "advertise",
        _advertised,
        None,
        "HOST:PORT",
        "address that the node gives to clients: short for advertised.listeners of the only listener; default: the "
        "listen address, or this host's name if that is a wildcard",
    ),
    _of_database(DATABASE_URL, _database_url, secret=True),
    _of_database(DATA_DIR, _directory),
    _of_database(POSTGRES_BIN, _directory),
    _of_database(LOG_STORE, _log_store),
    Option("rack", _text, None, "NAME", "rack of this node, as clients see it (broker.rack)"),
    Option(
        "metrics-listen",
        _address_or_off,
        "127.0.0.1:9308",
        "HOST:PORT|off",
        "where /metrics, /livez, /readyz and /version are served",
    ),
    Option(
        "metrics-max-series",
        _whole(0, 1_000_000),
        "5000",
        "COUNT",
        "most partitions, and as many group offsets, that one scrape shows",
    ),
    Option("log-format", _one_of("auto", "console", "json"), "auto", "FORMAT", "auto, console or json"),
    Option("log-level", _one_of(*LOG_LEVELS), "info", "LEVEL", f"{', '.join(LOG_LEVELS)}"),
    Option(
        "audit-log",
        _audit_log,
        "off",
        "FILE|stdout|off",
        "where a line of JSON goes for each request that changes topics, settings, ACLs, users, quotas or groups",
    ),
    Option(
        "otlp-endpoint",
        _collector,
        "off",
        "URL|off",
        "OpenTelemetry collector (OTLP over HTTP) that a span goes to for each request, commit and rebalance, "
        "e.g. http://collector:4318",
    ),
    Option(
        "otlp-headers",
        _headers,
        None,
        "NAME=VALUE,...",
        "headers for the collector, e.g. its key",
        secret=True,
        hidden=True,
    ),
    Option(
        "otlp-sample",
        _share,
        "1",
        "SHARE",
        "share of successful requests and commits that get a span, from 0 to 1; failed requests always do",
    ),
    Option("hot-connections", _whole(2, 100), "6", "COUNT", "database connections for writes and groups"),
    Option("cold-connections", _whole(1, 100), "4", "COUNT", "database connections for reads of the log"),
    Option("committers", _whole(1, 16), "2", "COUNT", "group commits of record batches that may run at once"),
    Option("tail-bytes", _whole(0, 2**40), "134217728", "BYTES", "recent record batches kept in memory"),
    Option(
        "node-ttl-ms",
        _whole(1000, 600_000),
        "5000",
        "MS",
        "how long this node's registration and leases outlive its last sign of life",
    ),
    Option("drain-ms", _whole(0, 60_000), "1500", "MS", "how long requests in work may take at shutdown"),
    Option(
        "workers",
        _whole(1, 64),
        "1",
        "COUNT",
        "nodes to run on this host, on consecutive ports of each listener and of the metrics, under one supervisor",
    ),
)

_BY_FIELD = {option.field: option for option in OPTIONS}
_BROKER_SETTINGS = {**BROKER_CONFIGS, **WITHOUT_EFFECT}
_BROKER_VARIABLES = {f"{ENVIRONMENT_PREFIX}BROKER_{name.upper().replace('.', '_')}": name for name in _BROKER_SETTINGS}
_OTHER_VARIABLES = frozenset(
    {"SLUICE_CONFIG", "SLUICE_SET", "SLUICE_BOOTSTRAP", "SLUICE_COMMAND_CONFIG", "SLUICE_CONTEXT"}
)
"""Other variables of ours. The last three are defaults of commands that connect to a broker."""
_SET = "SLUICE_SET"
_SECRET_VARIABLES = (
    *(option.variable for option in OPTIONS if option.secret),
    *(variable for variable, name in _BROKER_VARIABLES.items() if _BROKER_SETTINGS[name].type is ConfigType.PASSWORD),
)
"""Variables whose values may be read from files, in addition to SLUICE_SET."""
_OTHER_PREFIXES = ("SLUICE_TEST_", "SLUICE_PIPELINE_")
"""Prefixes of variables of the test suite and of `sluice-pipeline`. A gateway may inherit them."""
_SERVICE_VARIABLE = re.compile(r"SLUICE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")
"""Value that Kubernetes gives every container of a service called `sluice` or `sluice-...`: there, `SLUICE_PORT` is
a URL."""


@dataclass(frozen=True, slots=True)
class Value:
    """One effective value and its source."""

    name: str
    text: str | None
    origin: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings, the origin of each (options first, then broker settings that were given), and the warnings."""

    settings: Settings
    values: tuple[Value, ...]
    warnings: tuple[str, ...]


def load(
    flags: Mapping[str, str], assignments: Iterable[str], environment: Mapping[str, str], config: str | None = None
) -> Configuration:
    """Load settings from flags (option name → text), `--set` assignments (`key=value`), environment and TOML file.

    `config` is the file's path (flag `--config`), else `SLUICE_CONFIG`. Raise ConfigurationError.
    """
    _refuse_unknown_variables(environment)
    sources = Sources(dict(flags), tuple(assignments), dict(environment), config, ())
    try:
        secrets = read_secret_files(environment, _SECRET_VARIABLES)
        # SLUICE_SET and a file with more settings may be used together.
        named = {name: text for name, text in environment.items() if name == _SET + SUFFIX}
        set_file = read_secret_files(named, (_SET,))
    except SecretFileError as error:
        raise ConfigurationError(error.variable, error.path, "environment", error.reason) from error
    environment = secrets.environment
    path, named_by = config, "flag --config"
    if not path:
        path, named_by = environment.get("SLUICE_CONFIG"), "environment SLUICE_CONFIG"
    file_options, file_broker = _read_file(Path(path), named_by) if path else ({}, {})
    parsed: dict[str, object] = {}
    values: list[Value] = []
    for option in OPTIONS:
        text, origin = option.default, "default"
        if option.name in flags:
            text, origin = flags[option.name], f"flag {option.flag}"
        elif option.variable in environment:
            text, origin = environment[option.variable], secrets.origin(option.variable)
        elif option.field in file_options:
            text, origin = file_options[option.field], f"file {path}"
        parsed[option.field] = _parse(option, text, origin)
        values.append(Value(option.name, option.shown(text) if text else text, origin))
    broker, broker_values = _load_broker(sources.assignments, secrets, set_file, file_broker, path)
    warnings: list[str] = []
    given = {value.name: value for value in broker_values}
    warnings += [
        f"{value.name} (from {value.origin}) {_lowered(IDLE[value.name].documentation)}"
        for value in broker_values
        if value.name in IDLE
    ]
    listen = cast(Address, parsed.pop("listen"))
    advertise = cast("Address | None", parsed.pop("advertise"))
    options = {value.name: value for value in values}
    roles = _load_roles(given)
    listeners = _load_listeners(listen, advertise, options, given, roles, broker.node_id, warnings)
    _check_security(listeners, broker, given)
    _check_audit_log(parsed, options)
    # If the options `listen` and `advertise` apply, show the address that they yield.
    if "listeners" not in given and "advertised.listeners" not in given:
        shown = render_address(listeners[0].advertised)
        values = [Value(each.name, shown, each.origin) if each.name == "advertise" else each for each in values]
    if "broker.rack" in given:
        if parsed["rack"] is not None:
            warnings.append(f"rack (from {options['rack'].origin}) is ignored: broker.rack is given")
        parsed["rack"] = given["broker.rack"].text or None
    values.extend(broker_values)
    url_file = secrets.files.get(_BY_FIELD["database_url"].variable)
    make = cast("Callable[..., Settings]", Settings)
    settings = make(
        **parsed,
        database_url_file=url_file if "database-url" not in flags else None,
        sources=replace(sources, files=_files(path, secrets, set_file)),
        listeners=listeners,
        roles=replace(roles, controller_listeners=tuple(each.name for each in listeners if each.is_controller)),
        broker=broker,
    )
    return Configuration(settings, tuple(values), tuple(warnings))


def _files(path: str | None, *secrets: SecretFiles) -> tuple[Path, ...]:
    return (*((Path(path),) if path else ()), *(file for each in secrets for file in each.files.values()))


def _parse(option: Option, text: str | None, origin: str) -> object:
    if text is None:
        return None
    try:
        return option.parse(text)
    except ValueError as error:
        shown = "…" if option.secret else hide_password(text)
        raise ConfigurationError(option.name, shown, origin, str(error)) from error


def _lowered(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _load_roles(broker: Mapping[str, Value]) -> Roles:
    given = broker.get("process.roles")
    try:
        return parse_roles(None if given is None else given.text)
    except ConfigError as error:
        raise _as_given(error, broker) from error


def _as_given(error: ConfigError, broker: Mapping[str, Value]) -> ConfigurationError:
    value = broker.get(error.name)
    origin = "default" if value is None else value.origin
    return ConfigurationError(error.name, error.value or "", origin, error.reason)


def _load_listeners(
    listen: Address,
    advertise: Address | None,
    options: Mapping[str, Value],
    broker: Mapping[str, Value],
    roles: Roles,
    node_id: int | None,
    warnings: list[str],
) -> tuple[Listener, ...]:
    """Return the listeners from Kafka's names if these are given, else from their short forms."""
    bound, told = broker.get("listeners"), broker.get("advertised.listeners")
    bound_text = f"{DEFAULT_NAME}://{render_address(listen)}" if bound is None else bound.text or ""
    told_text = None if told is None else told.text
    if told is None and advertise is not None:
        if "," in bound_text:
            option = options["advertise"]
            raise ConfigurationError(
                option.name, option.text or "", option.origin, "there are several listeners: set advertised.listeners"
            )
        told_text = f"{bound_text.partition('://')[0]}://{render_address(advertise)}"

    def text_of(name: str) -> str | None:
        return broker[name].text if name in broker else None

    try:
        listeners = parse_listeners(
            bound_text,
            told_text,
            text_of(PROTOCOL_MAP),
            socket.gethostname(),
            text_of("controller.listener.names"),
            roles,
        )
        listeners = share_listeners(listeners, text_of("shared.listener.names"), text_of(INTER_BROKER), roles, node_id)
    except ConfigError as error:
        raise _as_given(error, broker) from error
    # An image sets the short settings for all its users. So they may repeat the values of Kafka's settings.
    if bound is not None and options["listen"].origin != "default" and listen not in {each.bind for each in listeners}:
        warnings.append(f"listen (from {options['listen'].origin}) is ignored: listeners is given")
    if told is not None and advertise is not None and advertise not in {each.advertised for each in listeners}:
        warnings.append(f"advertise (from {options['advertise'].origin}) is ignored: advertised.listeners is given")
    if told_text is None:
        warnings.extend(
            f"the node tells clients to connect to {render_address(listener.advertised)}, this host's name: "
            f"set {'--advertise' if bound is None else 'advertised.listeners'} if they cannot"
            for listener in listeners
            if listener.bind[0] in WILDCARDS
        )
    return tuple(listeners)


def _check_security(listeners: Iterable[Listener], broker: BrokerConfig, given: Mapping[str, Value]) -> None:
    names = {listener.name.lower() for listener in listeners}
    if "controller.listener.names" in given:
        # A broker may name listeners of other nodes: Kafka's files repeat the settings of those nodes' listeners.
        names |= {name.strip().lower() for name in (given["controller.listener.names"].text or "").split(",")}
    for name, value in given.items():
        of_listener = name.startswith("listener.name.")
        if of_listener and not any(name.startswith(f"listener.name.{each}.") for each in names):
            mistaken = any(name.lower().startswith(f"listener.name.{each}.") for each in names)
            hint = "; write the listener's name in lower case" if mistaken else ""
            raise ConfigurationError(name, value.text or "", value.origin, f"there is no listener of this name{hint}")
    for listener in listeners:
        try:
            tls = listener_security(listener, broker).tls
            if listener.is_inter_broker and tls is not None and tls.trusted is None and tls.trusted_file is None:
                raise ConfigError(
                    "ssl.truststore.location",
                    None,
                    f"nodes call each other at {listener.name}: give the authority of their certificates",
                )
        except ConfigError as error:
            origin = given[error.name].origin if error.name in given else "default"
            raise ConfigurationError(error.name, error.value or "", origin, error.reason) from error


def _check_audit_log(parsed: Mapping[str, object], options: Mapping[str, Value]) -> None:
    if parsed["audit_log"] == "stdout" and cast(int, parsed["workers"]) > 1:
        raise ConfigurationError("audit-log", "stdout", options["audit-log"].origin, "several workers need a file")


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    known = {option.variable for option in OPTIONS} | _BROKER_VARIABLES.keys() | _OTHER_VARIABLES
    known |= {variable + SUFFIX for variable in (*_SECRET_VARIABLES, _SET)}
    for name, text in environment.items():
        if not name.startswith(ENVIRONMENT_PREFIX) or name in known or name.startswith(_OTHER_PREFIXES):
            continue
        if not _SERVICE_VARIABLE.fullmatch(name) and not (name.endswith("_PORT") and _SERVICE_URL.match(text)):
            shown = "…" if may_be_secret(name) else hide_password(text)
            raise ConfigurationError(
                name,
                shown,
                "environment",
                f"no setting has this variable{did_you_mean(name, known, prefix=ENVIRONMENT_PREFIX)}",
            )


def _read_file(path: Path, named_by: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options by field, and the broker settings by name. `named_by` is where the path came from."""
    origin = f"file {path}"
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigurationError("config", str(path), named_by, reason) from error
    broker: dict[str, str] = {}
    options: dict[str, str] = {}
    for key, value in content.items():
        field = key.replace("-", "_")
        if key == "broker" and isinstance(value, dict):
            broker = _flatten("", cast("dict[str, object]", value), origin)
        elif field in _BY_FIELD:
            options[field] = _as_text(key, value, origin)
        else:
            shown = "…" if may_be_secret(key) else hide_password(str(value))
            hint = did_you_mean(field, [*_BY_FIELD, "broker"]) or "; broker settings belong in [broker]"
            raise ConfigurationError(key, shown, origin, f"unknown key{hint}")
    return options, broker


def _flatten(prefix: str, table: Mapping[str, object], origin: str) -> dict[str, str]:
    """Join the keys of nested tables: TOML parses `num.partitions = 3` into tables, and Kafka's name is their path."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat.update(_flatten(f"{name}.", cast("dict[str, object]", value), origin))
        else:
            flat[name] = _as_text(name, value, origin)
    return flat


def _as_text(name: str, value: object, origin: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list):
        return ",".join(str(part) for part in cast("list[object]", value))
    raise ConfigurationError(name, str(value), origin, "expected a string, number, boolean or list")


def _load_broker(
    assignments: Iterable[str],
    secrets: SecretFiles,
    set_file: SecretFiles,
    file_broker: Mapping[str, str],
    path: str | None,
) -> tuple[BrokerConfig, list[Value]]:
    environment = secrets.environment
    given: dict[str, Value] = {name: Value(name, text, f"file {path}") for name, text in file_broker.items()}
    # A line is one assignment, because a value such as a list or a password may contain any other separator.
    lines = (
        (f"environment {_SET}", environment.get(_SET, "")),
        (set_file.origin(_SET), set_file.environment.get(_SET, "")),
    )
    for origin, text in lines:
        for line in text.splitlines():
            if line.strip():
                _assign(given, line, origin, secret=True)
    for variable, name in _BROKER_VARIABLES.items():
        if variable in environment:
            given[name] = Value(name, environment[variable], secrets.origin(variable))
    for assignment in assignments:
        _assign(given, assignment, "flag --set")
    try:
        broker = parse_broker_configs({name: value.text or "" for name, value in given.items()})
    except ConfigError as error:
        value = given.get(error.name)
        origin = "default" if value is None else value.origin
        shown = "…" if origin in dict(lines) else error.value or ""
        raise ConfigurationError(error.name, shown, origin, error.reason) from error
    return broker, [_shown(given[name]) for name in sorted(given)]


def _shown(value: Value) -> Value:
    key = find_broker_config(value.name)
    secret = key is not None and key.type is ConfigType.PASSWORD
    return Value(value.name, HIDDEN, value.origin) if secret else value


def _assign(given: dict[str, Value], assignment: str, origin: str, *, secret: bool = False) -> None:
    name, equals, text = assignment.strip().partition("=")
    if not equals or not name:
        shown = "…" if secret else assignment
        raise ConfigurationError("set", shown, origin, "expected KEY=VALUE, e.g. num.partitions=3")
    given[name.strip()] = Value(name.strip(), text.strip(), origin)


def hide_password(url: str) -> str:
    """Return a database URL that may be shown."""
    url = re.sub(r"(://[^:/@]*):[^/?#]*@", r"\1:…@", url)
    return re.sub(r"([?&](?:ssl)?password=)[^&#]*", r"\1…", url)
