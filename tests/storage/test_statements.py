"""The statement files and the text columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.queries import parse_statements, statement
from storage.text import loaded, loaded_or_none, stored


def test_a_statement_is_found_by_its_name() -> None:
    text = "-- A file.\n-- name: one\n-- Says what.\nselect 1;\n\n-- name: two\n-- Says\n-- more.\nselect\n-- inner\n2"
    with pytest.raises(ValueError, match="before the first name"):
        parse_statements("f.sql", "select 1")
    assert parse_statements("f.sql", text) == {"one": "select 1", "two": "select\n-- inner\n2"}


@pytest.mark.parametrize(
    "text",
    [
        "-- name: a\nselect 1",
        "-- name: a\n-- Says.\n",
        "-- name: a\n-- Says.\nselect 1\n-- name: a\n-- Says.\nselect 2",
    ],
    ids=["no description", "no body", "twice"],
)
def test_a_statement_without_description_body_or_unique_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="needs"):
        parse_statements("f.sql", text)


def test_an_unknown_statement_name_raises() -> None:
    with pytest.raises(KeyError):
        statement("no_such_statement")


@given(st.text(alphabet="\0\u241b0a"))
def test_any_string_is_stored_without_nul_and_restored(value: str) -> None:
    assert "\0" not in stored(value)
    assert loaded(stored(value)) == value


@given(st.text(alphabet="\0\u241b0", max_size=6), st.text(alphabet="\0\u241b0", max_size=6))
def test_different_strings_are_stored_differently(one: str, two: str) -> None:
    assert (stored(one) == stored(two)) == (one == two)


def test_none_stays_none() -> None:
    assert stored(None) is None
    assert loaded_or_none(None) is None
    assert loaded_or_none("a") == "a"
