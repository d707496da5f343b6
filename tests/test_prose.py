"""The collector finds each kind of prose, and the check fails if a file gains a habit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import prose

SOURCE = '''"""Serve one request."""

LIMIT = 3
"""Of what there is at most three."""

# A comment
# of two lines.
x = 1  # and its own remark


def read() -> None:
    """Return nothing."""
    logger.warning("nobody answered in time")
    raise ValueError(f"the offset {x} is out of range")
'''


def found(source: str) -> list[tuple[int, str, str]]:
    return sorted((piece.line, piece.kind, piece.text) for piece in prose.python_pieces("a.py", source))


def test_python_source_yields_docstrings_comments_and_texts() -> None:
    assert found(SOURCE) == [
        (1, "docstring", "Serve one request."),
        (4, "docstring", "Of what there is at most three."),
        (6, "comment", "A comment of two lines. and its own remark"),
        (12, "docstring", "Return nothing."),
        (13, "text", "nobody answered in time"),
        (14, "text", "the offset … is out of range"),
    ]


def test_comments_that_a_line_of_code_separates_are_two_pieces() -> None:
    assert [text for _, kind, text in found("# One.\nx = 1\n# Two.\n") if kind == "comment"] == ["One.", "Two."]


def test_sql_comments_are_joined_to_paragraphs() -> None:
    pieces = list(prose.sql_pieces("a.sql", "-- One\n-- idea.\nselect 1;\n-- Another."))
    assert [(piece.line, piece.text) for piece in pieces] == [(1, "One idea."), (4, "Another.")]


def test_a_page_yields_paragraphs_items_and_rows_but_no_code() -> None:
    page = "# Title\n\nOne\nparagraph.\n- an item\n- two\n\n```sh\nmake run\n```\n| a | row |\n"
    assert [piece.text for piece in prose.page_pieces("a.md", page)] == [
        "Title", "One paragraph.", "an item", "two", "| a | row |",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "habits"),
    [
        ("docstring", "Of a group that nobody asks for.", ["opens-without-a-noun", "nobody-acts"]),
        ("docstring", "Return the offset that the client asked for.", []),
        ("comment", "Of one mind.", []),
        ("comment", "The client is told its offset, for there is no other.", ["is-told", "for-as-because"]),
        ("comment", "The coordinator lets go of it.", ["let-go"]),
        ("comment", "Who asks?", ["nobody-acts"]),
        ("comment", "It waits. What waits is slow.", ["who-as-subject"]),
        ("page", "Where nothing is left, the node stops.", ["where-for-if"]),
    ],
)
def test_habits_are_found_where_they_apply(kind: str, text: str, habits: list[str]) -> None:
    assert prose.Piece("a.py", 1, kind, text).habits() == habits


def test_a_file_with_more_matches_than_allowed_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = tmp_path / "allowed.json"
    monkeypatch.setattr(prose, "ALLOWED", allowed)
    (tmp_path / "a.py").write_text('"""Whether nobody waits."""\n')
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    offending = list(prose.python_pieces("a.py", (tmp_path / "a.py").read_text()))
    monkeypatch.setattr(prose, "pieces", lambda *, paths: offending)
    allowed.write_text(json.dumps({"a.py": 1}))
    assert prose.main(["--check"]) == 0
    allowed.write_text("{}")
    assert prose.main(["--check"]) == 1
    assert "a.py: 1 pieces of prose match a habit, 0 are allowed" in capsys.readouterr().err


def test_the_same_seed_draws_the_same_sample(capsys: pytest.CaptureFixture[str]) -> None:
    prose.main(["--sample", "5", "--seed", "3", "tests/wire.py", "tests/readers.py"])
    first = capsys.readouterr().out
    prose.main(["--sample", "5", "--seed", "3", "tests/wire.py", "tests/readers.py"])
    assert capsys.readouterr().out == first
    assert first.count("[docstring]") + first.count("[comment]") == 5
