"""Messages by which nodes send each other numbers for metrics: what is read back, and what is refused."""

from __future__ import annotations

import json

import pytest

from gateway.cluster.figures import MAX_PAYLOAD_BYTES, read, written

FIGURES = {"leases_moved": {"groups": 3.0, "jobs": 0.0}, "age": {"retention": 0.1239}}


def test_figures_are_read_as_they_were_written_to_the_millisecond():
    assert read(written(7, FIGURES)) == (7, {**FIGURES, "age": {"retention": 0.124}})


def test_figures_that_do_not_fit_a_notification_lose_their_zeros_first():
    many = {"failures": {f"a pass with a long name {number}": 0.0 for number in range(300)}, "moved": {"groups": 1.0}}
    payload = written(7, many)
    assert len(payload) <= MAX_PAYLOAD_BYTES
    assert read(payload) == (7, {"moved": {"groups": 1.0}})
    everything = {"failures": dict.fromkeys(many["failures"], 1.0)}
    assert read(written(7, everything)) == (7, {})


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "null",
        "[1]",
        '["1", {}]',
        "[1, []]",
        '[1, {"a": 5}]',
        '[1, {"a": {"b": "x"}}]',
        '[1, {"a": {"b": true}}]',
        '[1, {"a": {"b": NaN}}]',
        '[1, {"a": {"b": 1e999}}]',
        '[1, {"a": {"b": 1' + 400 * "0" + "}}]",
        "[" * 4_000,
        json.dumps([1, {"a": {str(number): 1 for number in range(501)}}]),
    ],
)
def test_payload_of_another_form_is_refused(payload: str):
    assert read(payload) is None
