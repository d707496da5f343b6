"""Ranges of API versions as upstream writes them: `"0+"`, `"3-5"`, `"7"`, `"none"`.

The one idea: a range is an inclusive interval of small integers, empty when `lowest > highest`. It knows nothing of
messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MAX_VERSION = 0x7FFF
"""The highest version, because versions are int16 on the wire. It stands for "and all later ones"."""


@dataclass(frozen=True, slots=True)
class Versions:
    """An inclusive range of versions."""

    lowest: int
    highest: int

    @classmethod
    def parse(cls, text: str) -> Versions:
        """Read upstream's notation of versions. Raise ValueError for any other text."""
        if text == "none":
            return NO_VERSIONS
        if text.endswith("+"):
            return cls(int(text[:-1]), MAX_VERSION)
        lowest, dash, highest = text.partition("-")
        return cls(int(lowest), int(highest if dash else lowest))

    def __contains__(self, version: int) -> bool:
        return self.lowest <= version <= self.highest

    def __and__(self, other: Versions) -> Versions:
        lowest, highest = max(self.lowest, other.lowest), min(self.highest, other.highest)
        return Versions(lowest, highest) if lowest <= highest else NO_VERSIONS

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.lowest, self.highest + 1))

    def __bool__(self) -> bool:
        return self.lowest <= self.highest

    def __str__(self) -> str:
        if not self:
            return "none"
        if self.highest == MAX_VERSION:
            return f"{self.lowest}+"
        return str(self.lowest) if self.lowest == self.highest else f"{self.lowest}-{self.highest}"


NO_VERSIONS = Versions(0, -1)
"""The empty range."""
