"""A client's string as it is shown to a person: printable, and never longer than requested."""

from __future__ import annotations

from random import Random

import pytest

from protocol.errors import MAX_MESSAGE_CHARS, ErrorCode, KafkaError
from protocol.shown import MAX_NAME_CHARS, shown

ALPHABET = "ab.é€😀 \x1b\x07\n\u202e\u200b\U000e0001\\"


@pytest.mark.parametrize("seed", range(20))
def test_any_text_is_shown_printable_and_no_longer_than_requested(seed: int):
    random = Random(seed)
    for _ in range(200):
        text = "".join(random.choices(ALPHABET, k=random.choice((0, 1, 30, 248, 249, 250, 400, 1_000))))
        longest = random.choice((20, MAX_NAME_CHARS, 1_000))
        assert shown(text, longest).isprintable()
        assert len(shown(text, longest)) <= longest
        assert shown(text, None).isprintable()


def test_valid_topic_name_is_shown_unchanged():
    for name in ("a", "n" * MAX_NAME_CHARS, "größe-€"):
        assert shown(name) == name


def test_a_long_text_keeps_its_beginning_and_its_end():
    text = shown("Topic name is invalid: " + "n" * 1_000_000 + " is too long")
    assert text.startswith("Topic name is invalid: nnn")
    assert text.endswith("nnn is too long")
    assert "…" in text


def test_control_characters_are_shown_as_escapes():
    assert shown("\x1b]0;owned\x07") == r"\x1b]0;owned\x07"


def test_refusal_repeats_a_bounded_part_of_the_clients_string():
    refusal = KafkaError(ErrorCode.INVALID_REQUEST, "\x1b" + "x" * 100_000)
    assert refusal.message is not None
    assert len(refusal.message) <= MAX_MESSAGE_CHARS
    assert refusal.message.isprintable()
    assert len(str(refusal)) < 2 * MAX_MESSAGE_CHARS
