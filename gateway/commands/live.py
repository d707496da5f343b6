"""Views that are drawn again and again, until Ctrl-C.

The one idea: a terminal is redrawn in place, cut to its size. A pipe receives each view whole, one after the other. A
failure after the first view is shown and does not end the command, because a broker may be restarting.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable

from gateway.commands.errors import CommandError

DEFAULT_SECONDS = 2.0

_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


def watch(draw: Callable[[], str], seconds: float) -> int:
    """Print the text of `draw` every `seconds`, and return 0 after Ctrl-C. The first CommandError is raised."""
    drawn = False
    try:
        while True:
            try:
                _print(draw(), again=drawn)
                drawn = True
            except CommandError as error:
                if not drawn:
                    raise
                print(f"sluice: {error}", file=sys.stderr)
            time.sleep(seconds)
    except KeyboardInterrupt:
        return 0


def _print(text: str, *, again: bool) -> None:
    if sys.stdout.isatty():
        width, height = shutil.get_terminal_size()
        lines = [line[:width] + _CLEAR_LINE for line in text.splitlines()[: height - 1]]
        text = "\n".join([_HOME + lines[0] if lines else _HOME, *lines[1:]]) + "\n" + _CLEAR_REST
    elif again and not text.startswith(("{", "[")):
        text = "\n" + text
    sys.stdout.write(text)
    sys.stdout.flush()
