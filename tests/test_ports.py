from __future__ import annotations

import contextlib
import socket

import pytest

from tests.gateway_process import SLICE, free_ports


def test_a_row_of_ports_is_found_after_many_single_ports() -> None:
    for _ in range(3):
        free_ports(SLICE)
        (first,) = free_ports(1, in_a_row=20)
        with contextlib.ExitStack() as stack:
            for port in range(first, first + 20):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))


def test_a_port_is_returned_again_after_nearly_all_others() -> None:
    ports = free_ports(SLICE // 2)
    assert len(set(ports)) == SLICE // 2
    assert not set(ports) & set(free_ports(SLICE // 4))


def test_a_port_with_a_listener_is_left_out() -> None:
    (first,) = free_ports(1, in_a_row=3)
    with socket.create_server(("127.0.0.1", first + 1)):
        assert first + 1 not in free_ports(SLICE - 1)


def test_more_ports_than_the_range_has_are_refused() -> None:
    with pytest.raises(OSError, match=f"no {SLICE + 1} in a row are free"):
        free_ports(1, in_a_row=SLICE + 1)
