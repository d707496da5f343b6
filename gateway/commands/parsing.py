"""An argument parser that suggests the option or command that a mistyped one resembles."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from gateway.config.suggestions import did_you_mean


class Parser(argparse.ArgumentParser):
    """argparse's parser with suggestions. Parsers of subcommands have this class, too."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]: the stub has an overload per caller
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse leftover arguments here, where this parser's own options are known."""
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
