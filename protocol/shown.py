"""A client's string as people see it: in an error text, in a log line, in the journal, in a table.

The one idea: a client that names a topic or itself may choose any characters and 32 KB of them. So every text that
repeats such a name passes it through `shown`, which leaves nothing that moves a terminal's cursor and cuts long names.
"""

from __future__ import annotations

MAX_NAME_CHARS = 249
"""The longest valid name of a topic. Other names are not shown longer than this either."""

CUT = "…"


def shown(text: str, longest: int | None = MAX_NAME_CHARS) -> str:
    """Return the text with escape sequences in place of characters that are not printable, cut in its middle to
    `longest` characters. None cuts nothing."""
    if longest is not None and len(text) > longest:
        # Cut before the escaping, because escaping costs a step for each character.
        text = _cut(text, longest)
    if text.isprintable():
        return text
    escaped = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return escaped if longest is None or len(escaped) <= longest else _cut(escaped, longest)


def _cut(text: str, longest: int) -> str:
    tail = (longest - len(CUT)) // 4
    return text[: longest - len(CUT) - tail] + CUT + text[len(text) - tail :]
