"""`sluice completion`: print a script that completes the command line in bash, zsh or fish.

The one idea: the script is static. It holds every command, option and choice as the parsers declare them, so a press
of the tab key starts no process. An option that takes a file completes file names.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from gateway.commands.parsing import Parser

SHELLS = ("bash", "zsh", "fish")
FILES = frozenset({"FILE", "DIR"})
"""Metavariables of arguments that are file names."""

Parsers = Callable[[], Mapping[str, argparse.ArgumentParser]]


@dataclass(frozen=True, slots=True)
class Option:
    flags: tuple[str, ...]
    help: str
    values: tuple[str, ...]
    """Choices of the option's value. Empty if the option takes any value or no value."""
    takes_value: bool
    takes_file: bool


@dataclass(frozen=True, slots=True)
class Node:
    """A command, or a group of commands such as `topics`."""

    path: tuple[str, ...]
    help: str
    commands: Mapping[str, str]
    """Subcommands with their help."""
    options: Sequence[Option]
    choices: tuple[str, ...]
    """Choices of positional arguments."""


def add_completion(parser: argparse.ArgumentParser, parsers: Parsers) -> None:
    parser.add_argument("shell", choices=SHELLS)

    def run(given: argparse.Namespace) -> int:
        nodes = tree(parsers())
        print({"bash": bash, "zsh": zsh, "fish": fish}[given.shell](nodes), end="")
        return 0

    parser.set_defaults(run=run)


def tree(parsers: Mapping[str, argparse.ArgumentParser]) -> list[Node]:
    """Return the program and each of its commands, parents first."""
    names = {name: parser.description or "" for name, parser in parsers.items()}
    options = [Option(("-h", "--help"), "show help", (), False, False), Option(("--version",), "", (), False, False)]
    nodes = [Node((), "", names, options, ())]
    for name, parser in parsers.items():
        _add(nodes, (name,), parser)
    return nodes


def _add(nodes: list[Node], path: tuple[str, ...], parser: argparse.ArgumentParser) -> None:
    options: list[Option] = []
    commands: dict[str, str] = {}
    below: dict[str, argparse.ArgumentParser] = {}
    choices: list[str] = []
    if isinstance(parser, Parser):
        parser.complete()
    for action in parser._actions:  # argparse has no other attribute for its actions
        found: object = action.choices
        if isinstance(found, Mapping):  # subcommands are the only actions whose choices are a mapping
            below = dict(cast("Mapping[str, argparse.ArgumentParser]", found))
            listed = cast("list[argparse.Action]", getattr(action, "_choices_actions", []))
            helps = {choice.dest: choice.help or "" for choice in listed}
            commands = {name: helps.get(name, "") for name in below}
        elif action.option_strings:
            options.append(_option(action))
        elif action.choices is not None:
            choices += [str(choice) for choice in action.choices]
    nodes.append(Node(path, parser.description or "", commands, options, tuple(choices)))
    for name, each in below.items():
        _add(nodes, (*path, name), each)


def _option(action: argparse.Action) -> Option:
    values = tuple(str(choice) for choice in action.choices or ())
    takes_value = action.nargs != 0
    help_text = (action.help or "").replace("%%", "%")
    return Option(tuple(action.option_strings), help_text, values, takes_value, action.metavar in FILES)


def _words(node: Node) -> list[str]:
    flags = [flag for option in node.options for flag in option.flags]
    return [*node.commands, *node.choices, *flags]


def _key(node: Node) -> str:
    return " ".join(node.path)


def _single(text: str) -> str:
    """Return the text in single quotes, in the notation of bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


_BASH_HEAD = """\
# bash completion of sluice. Load it with: source <(sluice completion bash)
_sluice() {
    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} path= at next
    for ((at = 1; at < COMP_CWORD; at++)); do
        next=${path:+$path }${COMP_WORDS[at]}
        case $next in
            %(paths)s) path=$next ;;
        esac
    done
    COMPREPLY=()
    case "$path:$previous" in
"""
_BASH_WORDS = """\
    esac
    local words=
    case $path in
"""
_BASH_TAIL = """\
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
    if [[ ${#COMPREPLY[@]} -eq 0 && $word != -* ]]; then
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
    fi
}
complete -F _sluice sluice
"""


def bash(nodes: Sequence[Node]) -> str:
    """Return the script for bash."""
    paths = "|".join(_single(_key(node)) for node in nodes if node.path)
    lines = [_BASH_HEAD % {"paths": paths}]
    for node in nodes:
        for option in node.options:
            if not option.takes_value:
                continue
            patterns = "|".join(_single(f"{_key(node)}:{flag}") for flag in option.flags)
            if option.takes_file:
                lines.append(f'        {patterns}) mapfile -t COMPREPLY < <(compgen -f -- "$word"); return ;;\n')
            else:
                words = _single(" ".join(option.values))
                lines.append(
                    f'        {patterns}) mapfile -t COMPREPLY < <(compgen -W {words} -- "$word"); return ;;\n'
                )
    lines.append(_BASH_WORDS)
    lines += [f"        {_single(_key(node))}) words={_single(' '.join(_words(node)))} ;;\n" for node in nodes]
    lines.append(_BASH_TAIL)
    return "".join(lines)


_ZSH_HEAD = """\
#compdef sluice
# zsh completion of sluice. Load it with: source <(sluice completion zsh)
_sluice() {
    local path_= at next previous=${words[CURRENT-1]}
    for ((at = 2; at < CURRENT; at++)); do
        next=${path_:+$path_ }${words[at]}
        case $next in
            (%(paths)s) path_=$next ;;
        esac
    done
    local -a found
    case "$path_:$previous" in
"""
_ZSH_TAIL = """\
    esac
    _describe sluice found || _files
}
if [[ $funcstack[1] == _sluice ]]; then
    _sluice "$@"
else
    compdef _sluice sluice
fi
"""


def zsh(nodes: Sequence[Node]) -> str:
    """Return the script for zsh."""
    paths = "|".join(_single(_key(node)) for node in nodes if node.path)
    lines = [_ZSH_HEAD % {"paths": paths}]
    for node in nodes:
        for option in node.options:
            if option.takes_value:
                patterns = "|".join(_single(f"{_key(node)}:{flag}") for flag in option.flags)
                values = " ".join(_single(value) for value in option.values)
                does = "_files" if option.takes_file else f"compadd -- {values}" if values else "_message value"
                lines.append(f"        ({patterns}) {does}; return ;;\n")
    lines.append("    esac\n    case $path_ in\n")
    for node in nodes:
        described = [*node.commands.items(), *((choice, "") for choice in node.choices)]
        described += [(flag, option.help) for option in node.options for flag in option.flags]
        found = " ".join(_single(_zsh_item(name, text)) for name, text in described)
        lines.append(f"        ({_single(_key(node))}) found=({found}) ;;\n")
    lines.append(_ZSH_TAIL)
    return "".join(lines)


def _zsh_item(name: str, text: str) -> str:
    escaped = name.replace(":", "\\:")
    return f"{escaped}:{text}" if text else escaped


_FISH_HEAD = """\
# fish completion of sluice. Load it with: sluice completion fish | source
function __sluice_path
    set -l path
    for word in (commandline -opc)[2..-1]
        set -l next (string join -- ' ' $path $word)
        if contains -- $next %(paths)s
            set path $path $word
        end
    end
    string join -- ' ' $path
end
function __sluice_at
    set -l path (__sluice_path)
    test "$path" = "$argv"
end
complete -c sluice -f
"""


def fish(nodes: Sequence[Node]) -> str:
    """Return the script for fish."""
    paths = " ".join(_fish_quoted(_key(node)) for node in nodes if node.path)
    lines = [_FISH_HEAD % {"paths": paths}]
    for node in nodes:
        at = f"complete -c sluice -n {_fish_quoted(f'__sluice_at {_key(node)}'.rstrip())}"
        for name, text in [*node.commands.items(), *((choice, "") for choice in node.choices)]:
            lines.append(f"{at} -a {_fish_quoted(name)} -d {_fish_quoted(text)}\n")
        lines += [f"{at} {_fish_option(option)}\n" for option in node.options]
    return "".join(lines)


def _fish_option(option: Option) -> str:
    words = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags]
    if option.takes_value:
        words.append("-rF" if option.takes_file else "-x")
    if option.values:
        words.append(f"-a {_fish_quoted(' '.join(option.values))}")
    return " ".join([*words, f"-d {_fish_quoted(option.help)}"])


def _fish_quoted(text: str) -> str:
    return "'" + re.sub(r"([\\'])", r"\\\1", text) + "'"
