"""The principal's name from a client's certificate: its subject as a distinguished name, and the rules that shorten it.

The one idea: ACLs and quotas are written for the name that Kafka would have found, so it must be the same to the
character: RFC 2253 as Java's X500Principal writes it, and `ssl.principal.mapping.rules` as upstream's
SslPrincipalMapper applies them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

MAX_NAME_CHARACTERS = 1_024
"""Longest distinguished name to which rules are applied: the time of a regular expression grows with it."""

_KEYWORDS = {
    "2.5.4.3": "CN",
    "2.5.4.6": "C",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.9": "STREET",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "0.9.2342.19200300.100.1.25": "DC",
    "0.9.2342.19200300.100.1.1": "UID",
}
_ENCODINGS = {0x0C: "utf-8", 0x13: "ascii", 0x16: "ascii", 0x14: "latin-1", 0x1E: "utf-16-be", 0x1B: "ascii"}
"""Encodings of DER's string types, by tag: UTF8, Printable, IA5, T61, BMP, General."""
_SEQUENCE, _SET, _OID, _VERSION = 0x30, 0x31, 0x06, 0xA0
_ESCAPED = frozenset(',=+<>#;"\\')


class UnusableNameError(ValueError):
    """A certificate without a usable name."""


# --- distinguished names ----------------------------------------------------------------------------------------------


def subject(certificate: bytes) -> str:
    """Return the subject of a DER certificate that TLS has verified. Raise UnusableNameError if it cannot be read."""
    try:
        ((_, outer),) = _elements(certificate)
        to_be_signed = next(iter(_elements(outer)))[1]
        parts = list(_elements(to_be_signed))
        if parts[0][0] == _VERSION:
            del parts[0]
        _, name = parts[4]
        return ",".join(_relative(each) for _, each in reversed(list(_elements(name))))
    except (IndexError, ValueError, StopIteration) as error:
        raise UnusableNameError("the certificate cannot be read") from error


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each DER element."""
    for tag, content, _ in _whole_elements(data):
        yield tag, content


def _whole_elements(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    position = 0
    while position < len(data):
        begin = position
        tag, size = data[position], data[position + 1]
        position += 2
        if size & 0x80:
            size_bytes = size & 0x7F
            if not 0 < size_bytes <= 4:
                raise ValueError("an element of no length")
            size = int.from_bytes(data[position : position + size_bytes], "big")
            position += size_bytes
        content = data[position : position + size]
        if len(content) < size:
            raise ValueError("an element that is cut off")
        position += size
        yield tag, content, data[begin:position]


def _relative(encoded: bytes) -> str:
    return "+".join(_attribute(pair) for _, pair in _elements(encoded))


def _attribute(pair: bytes) -> str:
    (_, oid, _), (tag, value, whole) = _whole_elements(pair)
    dotted = _dotted(oid)
    keyword = _KEYWORDS.get(dotted)
    if keyword is None or tag not in _ENCODINGS:
        return f"{keyword or dotted}=#{whole.hex()}"
    return f"{keyword}={_escaped(value.decode(_ENCODINGS[tag]))}"


def _dotted(oid: bytes) -> str:
    numbers: list[int] = []
    number = 0
    for byte in oid:
        number = number << 7 | byte & 0x7F
        if not byte & 0x80:
            numbers.append(number)
            number = 0
    first = min(numbers[0] // 40, 2)
    return ".".join(map(str, (first, numbers[0] - 40 * first, *numbers[1:])))


def _escaped(text: str) -> str:
    lead, trail = len(text) - len(text.lstrip(" \r")), len(text.rstrip(" \r"))
    shown: list[str] = []
    for index, character in enumerate(text):
        if character == "\0":
            shown.append("\\00")
            continue
        if character in _ESCAPED or index < lead or index >= trail:
            shown.append("\\")
        shown.append(character)
    return "".join(shown)


# --- rules ------------------------------------------------------------------------------------------------------------

_RULE = re.compile(r"\s*(?:(DEFAULT)|RULE:((?:\\.|[^\\/])*)/((?:\\.|[^\\/])*)/([LU]?))\s*(?:,|$)")


@dataclass(frozen=True, slots=True)
class Rule:
    pattern: re.Pattern[str] | None
    """None: the rule DEFAULT, which keeps the name."""
    replacement: str = ""
    case: str = ""
    """L for lower case, U for upper case, empty for unchanged."""

    def apply(self, name: str) -> str | None:
        if self.pattern is None:
            return name
        if self.pattern.fullmatch(name) is None:
            return None
        # Like upstream's replaceAll. It may find less than the whole name, and an empty match behind it.
        made = self.pattern.sub(partial(_filled, self.replacement), name)
        return {"L": made.lower(), "U": made.upper()}.get(self.case, made)


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Parse `ssl.principal.mapping.rules`. ValueError names the text that is not a rule."""
    rules: list[Rule] = []
    position = 0
    while position < len(text.rstrip()):
        found = _RULE.match(text, position)
        if found is None:
            raise ValueError(f"expected DEFAULT or RULE:pattern/replacement/[LU] at character {position + 1}")
        position = found.end()
        if found[1] is not None:
            rules.append(Rule(None))
            continue
        try:
            # As in Java, \w, \d, \b and (?i) know ASCII alone, unless the rule itself asks for Unicode.
            flags = 0 if re.search(r"\(\?[a-z]*u", found[2]) else re.ASCII
            rules.append(Rule(re.compile(found[2], flags), found[3], found[4]))
        except re.error as error:
            raise ValueError(f"{found[2]} is no pattern: {error}") from error
    return tuple(rules)


def mapped(name: str, rules: tuple[Rule, ...]) -> str:
    """Return the name that the first matching rule makes of a distinguished name. Raise UnusableNameError if none
    matches."""
    if len(name) > MAX_NAME_CHARACTERS:
        raise UnusableNameError(f"a name of {len(name)} characters")
    for rule in rules:
        made = rule.apply(name)
        if made is not None:
            return made
    raise UnusableNameError(f"no rule applies to {name}")


def _filled(replacement: str, found: re.Match[str]) -> str:
    """Fill groups into the replacement as Java's replaceAll does. $N is a group, and N takes as many digits as still
    name a group. A character after a backslash stands for itself. A number that no group has stays unchanged."""
    shown: list[str] = []
    position, groups = 0, found.re.groups
    while position < len(replacement):
        character = replacement[position]
        position += 1
        if character == "\\" and position < len(replacement):
            shown.append(replacement[position])
            position += 1
        elif character == "$" and (digits := re.match(r"\d+", replacement[position:], re.ASCII)):
            number = digits[0]
            while len(number) > 1 and int(number) > groups:
                number = number[:-1]
            shown.append((found[int(number)] or "") if int(number) <= groups else f"${number}")
            position += len(number)
        else:
            shown.append(character)
    return "".join(shown)
