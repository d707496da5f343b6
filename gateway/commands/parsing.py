"""An argument parser that suggests the option or command that a mistyped one resembles."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from gateway.config.suggestions import did_you_mean


class Parser(argparse.ArgumentParser):
    """argparse's parser with suggestions. Parsers of subcommands have this class, too.

    `fill` adds arguments whose declaration loads much of the program. It runs when the parser is used: only a chosen
    subcommand's parser is.
    """

    def __init__(
        self, *given: Any, fill: Callable[[argparse.ArgumentParser], None] | None = None, **named: Any
    ) -> None:
        super().__init__(*given, **named)
        self._fill = fill

    def complete(self) -> None:
        """Add the arguments that were postponed."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]: the stub has an overload per caller
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse leftover arguments here, where this parser's own options are known."""
        self.complete()
        parsed, left = super().parse_known_args(args, namespace)
        if left:
            flag = next((word for word in left if word.startswith("-")), "").partition("=")[0]
            hint = did_you_mean(flag, [text for action in self._actions for text in action.option_strings])
            self.error(f"unrecognized arguments: {' '.join(left)}{hint}")
        return parsed, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            listed = ", ".join(known)
            raise argparse.ArgumentError(action, f"there is no {value!r}{did_you_mean(str(value), known)} ({listed})")
