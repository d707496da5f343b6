"""`sluice context`: named clusters in a file of the user, and the choice of the cluster that a command asks.

The one idea: address and credentials come from one source, so the credentials of one cluster never reach another. A
context holds the path of a properties file and no password. The file is `$XDG_CONFIG_HOME/sluice/contexts.toml`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gateway.commands.arguments import DEFAULT_BOOTSTRAP, Address, Commands, addresses
from gateway.commands.errors import CommandError
from gateway.commands.render import Row, show
from gateway.config.suggestions import SUGGESTIONS, did_you_mean

MAX_CONTEXTS = 1_000
MAX_NAME_CHARACTERS = 100
EXIT_FAILED = 1

_MODE_OF_DIRECTORY = 0o700


@dataclass(frozen=True, slots=True)
class Context:
    bootstrap: str
    command_config: str | None = None


@dataclass(frozen=True, slots=True)
class Contexts:
    """Content of the file."""

    named: Mapping[str, Context]
    current: str | None = None


def path() -> Path:
    """Return the path of the file. It need not exist."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "sluice" / "contexts.toml"


def load() -> Contexts:
    """Read the file; return no contexts if it does not exist. Raise CommandError if it cannot be read."""
    place = path()
    try:
        content = tomllib.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Contexts({})
    except (OSError, ValueError) as error:
        raise CommandError(f"{place} cannot be read: {error}") from error
    named = {name: _context(place, name, values) for name, values in _table(place, content, "contexts").items()}
    current = content.get("current")
    if current is not None and (not isinstance(current, str) or current not in named):
        raise CommandError(f"{place}: current names no context; choose one with `sluice context use NAME`")
    return Contexts(named, current)


def _table(place: Path, content: Mapping[str, object], key: str) -> Mapping[str, object]:
    found: object = content.get(key, {})
    if not isinstance(found, dict):
        raise CommandError(f"{place}: {key} is no table")
    return cast("Mapping[str, object]", found)


def _context(place: Path, name: str, values: object) -> Context:
    fields = cast("dict[str, object]", values) if isinstance(values, dict) else {}
    bootstrap, command_config = fields.get("bootstrap"), fields.get("command_config")
    if not isinstance(bootstrap, str) or not isinstance(command_config, str | None):
        raise CommandError(f"{place}: context {name} needs bootstrap, a text; command_config is a text or absent")
    return Context(bootstrap, command_config)


def save(contexts: Contexts) -> None:
    """Replace the file at once, readable by its owner only."""
    from tempfile import NamedTemporaryFile

    place = path()
    # A JSON string is a TOML string too, apart from escaped surrogate pairs, which json does not write here.
    lines = [] if contexts.current is None else [f"current = {_quoted(contexts.current)}", ""]
    for name, context in sorted(contexts.named.items()):
        lines += [f"[contexts.{_quoted(name)}]", f"bootstrap = {_quoted(context.bootstrap)}"]
        if context.command_config is not None:
            lines.append(f"command_config = {_quoted(context.command_config)}")
        lines.append("")
    try:
        place.parent.mkdir(mode=_MODE_OF_DIRECTORY, parents=True, exist_ok=True)
        # The temporary file has mode 0600, and the rename keeps it.
        with NamedTemporaryFile("w", encoding="utf-8", dir=place.parent, delete=False) as file:
            try:
                file.write("\n".join(lines))
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, place)
            except BaseException:
                with suppress(OSError):
                    os.unlink(file.name)
                raise
    except (OSError, UnicodeEncodeError) as error:
        raise CommandError(f"{place} cannot be written: {error}") from error


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# --- the choice -------------------------------------------------------------------------------------------------------


def choose(given: argparse.Namespace) -> None:
    """Set `given.bootstrap` and `given.command_config`. Flags come first, then --context, then the environment, then
    the context of SLUICE_CONTEXT, then the one in use, then the default address."""
    bootstrap: tuple[Address, ...] | None = given.bootstrap
    command_config: str | None = given.command_config
    environment = os.environ
    if bootstrap is None and given.context is None:
        text = environment.get("SLUICE_BOOTSTRAP")
        bootstrap = _addresses(text, "SLUICE_BOOTSTRAP") if text else None
    if bootstrap is None:
        context = _chosen(given.context or environment.get("SLUICE_CONTEXT") or None)
        if context is not None:
            given.bootstrap = _addresses(context.bootstrap, str(path()))
            own = None if given.context is not None else environment.get("SLUICE_COMMAND_CONFIG")
            given.command_config = command_config or own or context.command_config
            return
    given.bootstrap = bootstrap or addresses(DEFAULT_BOOTSTRAP)
    given.command_config = command_config or environment.get("SLUICE_COMMAND_CONFIG") or None


def _chosen(name: str | None) -> Context | None:
    contexts = load()
    name = contexts.current if name is None else name
    return None if name is None else _find(contexts, name)


def _find(contexts: Contexts, name: str) -> Context:
    if name not in contexts.named:
        hint = did_you_mean(name, contexts.named, SUGGESTIONS)
        raise CommandError(f"there is no context {name}{hint or '; `sluice context list` shows them'}")
    return contexts.named[name]


def _addresses(text: str, origin: str) -> tuple[Address, ...]:
    try:
        return addresses(text)
    except argparse.ArgumentTypeError as error:
        raise CommandError(f"{origin}: {error}") from error


# --- commands ---------------------------------------------------------------------------------------------------------


def add_commands(commands: Commands) -> None:
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", action="store_true", help="JSON instead of tables")

    listing = commands.add_parser("list", parents=[output], help="every context; the one in use is marked")
    listing.set_defaults(context_command=list_contexts)

    showing = commands.add_parser("show", parents=[output], help="a context, the one in use without a name")
    showing.add_argument("name", nargs="?")
    showing.set_defaults(context_command=show_context)

    setting = commands.add_parser("set", parents=[output], help="make or change a context; the first one is in use")
    setting.add_argument("name", type=_name)
    setting.add_argument("-b", "--bootstrap", "--bootstrap-server", type=_address_text, metavar="HOST:PORT,…")
    setting.add_argument("--command-config", metavar="FILE", help="client properties; `none` removes them")
    setting.set_defaults(context_command=set_context)

    using = commands.add_parser("use", parents=[output], help="use a context in each command that names no cluster")
    using.add_argument("name")
    using.set_defaults(context_command=use_context)

    delete = commands.add_parser("delete", parents=[output], help="delete a context")
    delete.add_argument("name")
    delete.set_defaults(context_command=delete_context)


def _name(text: str) -> str:
    if not text or len(text) > MAX_NAME_CHARACTERS or not text.isprintable():
        raise argparse.ArgumentTypeError(f"a name has 1 to {MAX_NAME_CHARACTERS} printable characters")
    return text


def _address_text(text: str) -> str:
    addresses(text)
    return text


def run(given: argparse.Namespace) -> int:
    """Run a command of `sluice context` and return its exit code."""
    try:
        return int(given.context_command(given))
    except CommandError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return EXIT_FAILED


def _row(contexts: Contexts, name: str) -> Row:
    context = contexts.named[name]
    return {
        "name": name,
        "in_use": name == contexts.current,
        "bootstrap": context.bootstrap,
        "command_config": context.command_config,
    }


def _show(contexts: Contexts, names: list[str], given: argparse.Namespace) -> None:
    rows = [_row(contexts, name) for name in names]
    show(rows, ("name", "in_use", "bootstrap", "command_config"), as_json=given.json)


def list_contexts(given: argparse.Namespace) -> int:
    contexts = load()
    _show(contexts, sorted(contexts.named), given)
    return 0


def show_context(given: argparse.Namespace) -> int:
    contexts = load()
    name: str | None = given.name or os.environ.get("SLUICE_CONTEXT") or contexts.current
    if name is None:
        raise CommandError("no context is in use: choose one with `sluice context use NAME`")
    _find(contexts, name)
    _show(contexts, [name], given)
    return 0


def set_context(given: argparse.Namespace) -> int:
    contexts = load()
    before = contexts.named.get(given.name)
    bootstrap = given.bootstrap or (before.bootstrap if before else None)
    if bootstrap is None:
        raise CommandError(f"context {given.name} is new: give --bootstrap HOST:PORT")
    command_config = before.command_config if before else None
    if given.command_config is not None:
        none = given.command_config == "none"
        command_config = None if none else str(Path(given.command_config).expanduser().absolute())
    if before is None and len(contexts.named) >= MAX_CONTEXTS:
        raise CommandError(f"{path()} has {MAX_CONTEXTS} contexts: delete one with `sluice context delete NAME`")
    named = {**contexts.named, given.name: Context(bootstrap, command_config)}
    changed = Contexts(named, contexts.current or given.name)
    save(changed)
    _show(changed, [given.name], given)
    return 0


def use_context(given: argparse.Namespace) -> int:
    contexts = load()
    _find(contexts, given.name)
    changed = Contexts(contexts.named, given.name)
    save(changed)
    _show(changed, [given.name], given)
    return 0


def delete_context(given: argparse.Namespace) -> int:
    contexts = load()
    _find(contexts, given.name)
    _show(contexts, [given.name], given)
    named = {name: context for name, context in contexts.named.items() if name != given.name}
    save(Contexts(named, None if contexts.current == given.name else contexts.current))
    return 0
