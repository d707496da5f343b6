"""Kafka's syntax for login modules: `MODULE required name="value" ...;`, of one module.

It opens no file and knows no mechanism.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

FLAGS = frozenset({"required", "requisite", "sufficient", "optional"})
PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
OAUTHBEARER_MODULE = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"

_TOKEN = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([A-Za-z0-9_.$\-]+)|([=;]))""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LoginModule:
    name: str
    options: Mapping[str, str]


def parse_jaas(text: str) -> LoginModule:
    """Parse the text. ValueError describes the mistake without repeating the text, which holds passwords."""
    tokens: list[tuple[str, bool]] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        found = _TOKEN.match(text, position)
        if found is None:
            raise ValueError(f"expected a name or a quoted value at character {position + 1}")
        quoted = found[1] if found[1] is not None else found[2]
        if quoted is not None:
            tokens.append((re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL), True))
        else:
            tokens.append((found[3] or found[4], False))
        position = found.end()
    if len(tokens) < 3 or tokens[-1] != (";", False):
        raise ValueError('expected MODULE required NAME="VALUE" ... and a semicolon at the end')
    (module, _), (flag, _), *rest = tokens[:-1]
    if flag.lower() not in FLAGS:
        raise ValueError(f"expected one of {', '.join(sorted(FLAGS))} behind the module's name")
    if len(rest) % 3:
        raise ValueError('expected NAME="VALUE" for each option')
    options: dict[str, str] = {}
    for (name, _), equals, (value, _) in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        if equals != ("=", False) or value in ("=", ";"):
            raise ValueError('expected NAME="VALUE" for each option')
        if name in options:
            raise ValueError(f"names {name} twice")
        options[name] = value
    return LoginModule(module, options)
