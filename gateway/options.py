"""The options of `sluice serve` as arguments of a command.

The one idea: a command lists the options that it uses and no others, and gets its settings from all sources alike. The
table of all options is loaded when a command reads its settings.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from gateway.config.database_options import DATABASE_OPTIONS, DatabaseOption

if TYPE_CHECKING:
    from gateway.config.settings import Configuration, Option, Settings

DESCRIPTION = (
    "A flag beats the environment (SLUICE_ and the option's name in capitals), which beats the file (TOML), which "
    "beats the default."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every option of a node."""
    from gateway.config.settings import OPTIONS

    parser.description = DESCRIPTION
    for option in OPTIONS:
        _add(parser, option)
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a broker setting under Kafka's name, e.g. num.partitions=3; may be repeated",
    )
    _add_config(parser)


def add_database_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that determine where the database is."""
    parser.description = DESCRIPTION
    for option in DATABASE_OPTIONS:
        _add(parser, option)
    _add_config(parser)


def database_options() -> argparse.ArgumentParser:
    """Return a parent parser with the options that determine where the database is."""
    parser = argparse.ArgumentParser(add_help=False)
    add_database_options(parser)
    return parser


def _add(parser: argparse.ArgumentParser, option: Option | DatabaseOption) -> None:
    default = "" if option.default is None else f" (default {option.default})"
    parser.add_argument(option.flag, metavar=option.metavar, help=option.help + default, default=argparse.SUPPRESS)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="a TOML file: options by name, broker settings in [broker]")


def configuration_of(given: argparse.Namespace) -> Configuration:
    """Return the configuration that flags, environment and file make. Raise ConfigurationError."""
    from gateway.config.settings import OPTIONS, load

    flags = {option.name: getattr(given, option.field) for option in OPTIONS if hasattr(given, option.field)}
    return load(flags, getattr(given, "set", []), os.environ, getattr(given, "config", None))


def settings_of(given: argparse.Namespace) -> Settings:
    """Return the settings of `configuration_of`. Raise ConfigurationError."""
    return configuration_of(given).settings
