"""The order in which connections may continue to send large requests when an address or the node is full."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.net.holdings import TURN_BYTES_PER_S, TURN_WINDOW_S, TURNS, Holdings

LIMIT_BYTES = 8_000
READ_BYTES = 100
"""Number of bytes that a peer reads at once in the property test."""


class Peer:
    def __init__(self, holdings: Holdings, address: str) -> None:
        self.network = address
        self.turns = 0
        self.is_reading = True
        self.arrived_bytes = 0
        self._holdings = holdings

    def proceed(self) -> None:
        self.is_reading = self._holdings.may_read_on(self)
        self.turns += self.is_reading

    def arrive(self, count_bytes: int) -> bool:
        """Receive bytes of a request as a connection does. Return True if the connection may continue to read."""
        assert self.is_reading
        count_bytes = max(self._holdings.room_for(self, count_bytes), 1)
        self.arrived_bytes += count_bytes
        self._holdings.arrive(self, count_bytes)
        self.is_reading = self._holdings.may_read_on(self)
        return self.is_reading

    def end(self) -> None:
        """End the request or the connection."""
        if self.arrived_bytes:
            self._holdings.arrive(self, -self.arrived_bytes)
        self.arrived_bytes = 0
        self.is_reading = True


def test_requests_of_a_full_address_take_turns() -> None:
    holdings = Holdings(100)
    first, second, third = (Peer(holdings, "one") for _ in range(3))
    for peer in (first, second, third):
        holdings.arrive(peer, 60)
    assert [holdings.may_read_on(peer) for peer in (first, second, third)] == [True, False, False]
    assert [holdings.room_for(peer, 1_000) for peer in (first, second, third)] == [1_000, 0, 0]
    holdings.arrive(first, -60)
    assert (second.turns, third.turns) == (1, 0)
    holdings.arrive(second, -60)
    assert third.turns == 1
    holdings.arrive(third, -60)
    assert holdings.held_bytes == 0


def test_request_with_the_turn_fills_nothing() -> None:
    holdings = Holdings(100)
    one, same = Peer(holdings, "one"), Peer(holdings, "one")
    holdings.arrive(one, 90)
    assert holdings.may_read_on(one)
    holdings.arrive(one, 900)
    holdings.arrive(same, 40)
    assert holdings.may_read_on(same), "the address may still fill half of the node"
    assert holdings.held_bytes == 1_030
    holdings.arrive(one, -930)
    assert holdings.may_read_on(one), "the turn has ended, and another begins for the next request"
    assert holdings.may_read_on(same)


def test_addresses_take_turns() -> None:
    holdings = Holdings(100)
    hostile = [Peer(holdings, "hostile") for _ in range(3)]
    other, third = Peer(holdings, "other"), Peer(holdings, "third")
    for peer in (*hostile, other, third):
        holdings.arrive(peer, 60)
    may = [holdings.may_read_on(peer) for peer in (*hostile, other, third)]
    assert may == [True, False, False, True, False], "an address has one turn, and the node has two"
    holdings.arrive(hostile[0], -60)
    assert [peer.turns for peer in (*hostile, third)] == [0, 1, 0, 0]
    holdings.arrive(hostile[1], -60)
    assert [peer.turns for peer in (*hostile, third)] == [0, 1, 0, 1], "not a second one of the same address"


def test_slow_request_with_the_turn_is_named_once_others_wait() -> None:
    holdings = Holdings(100)
    slow, other = Peer(holdings, "one"), Peer(holdings, "one")
    holdings.arrive(slow, 60)
    assert holdings.may_read_on(slow)
    holdings.arrive(other, 120)
    assert [holdings.slow_reader(at_s) for at_s in (0, TURN_WINDOW_S, 2 * TURN_WINDOW_S)] == [None, None, None]
    assert not holdings.may_read_on(other)
    start_s = 100 * TURN_WINDOW_S
    assert holdings.slow_reader(start_s) is None, "from here on another waits"
    enough_bytes = int(TURN_WINDOW_S * TURN_BYTES_PER_S)
    holdings.arrive(slow, enough_bytes)
    assert [holdings.slow_reader(start_s + n * TURN_WINDOW_S) for n in (0.9, 1)] == [None, None]
    holdings.arrive(slow, enough_bytes - 1)
    assert [holdings.slow_reader(start_s + n * TURN_WINDOW_S) for n in (1.9, 2)] == [None, slow]
    holdings.arrive(slow, -(60 + 2 * enough_bytes - 1))
    assert other.turns == 1
    assert holdings.slow_reader(start_s + 3 * TURN_WINDOW_S) is None, "no other waits"


def test_next_turn_begins_with_a_window_of_its_own() -> None:
    holdings = Holdings(100)
    peers = [Peer(holdings, "one") for _ in range(3)]
    for peer in peers:
        holdings.arrive(peer, 200)
    assert [holdings.may_read_on(peer) for peer in peers] == [True, False, False]
    assert holdings.slow_reader(0) is None
    assert holdings.slow_reader(TURN_WINDOW_S) is peers[0]
    holdings.arrive(peers[0], -200)
    assert peers[1].turns == 1
    assert holdings.slow_reader(TURN_WINDOW_S + 1) is None
    assert holdings.slow_reader(2 * TURN_WINDOW_S) is None
    assert holdings.slow_reader(2 * TURN_WINDOW_S + 1) is peers[1]


ACTIONS = st.lists(
    st.tuples(st.integers(0, 7), st.sampled_from(["read", "read", "read", "end", "fill", "free"])), max_size=400
)


def played(holdings: Holdings, peers: list[Peer], actions: list[tuple[int, str]]) -> None:
    """Let peers read, end, and occupy or free the node's memory. Check the counts after each action."""
    in_work_bytes = 0
    for number, action in actions:
        peer = peers[number % len(peers)]
        if action == "read" and peer.is_reading:
            peer.arrive(READ_BYTES)
        elif action == "end":
            peer.end()
        elif action == "fill":
            holdings.take(LIMIT_BYTES)
            in_work_bytes += LIMIT_BYTES
        elif action == "free" and in_work_bytes:
            holdings.give_back(LIMIT_BYTES)
            in_work_bytes -= LIMIT_BYTES
        assert holdings.held_bytes == in_work_bytes + sum(each.arrived_bytes for each in peers)
        waiting = [each for each in peers if not each.is_reading]
        assert len(waiting) < len(peers) or not waiting, "one may always read on"
    if in_work_bytes:
        holdings.give_back(in_work_bytes)


@given(ACTIONS)
@settings(deadline=None)
def test_arriving_requests_fill_no_more_than_the_bound_and_the_turns(actions: list[tuple[int, str]]) -> None:
    holdings = Holdings(LIMIT_BYTES)
    peers = [Peer(holdings, f"host{number % 4}") for number in range(8)]
    played(holdings, peers, actions)
    for _ in range(200):
        for peer in peers:
            if peer.is_reading:
                peer.arrive(READ_BYTES)
        everything = sorted(peer.arrived_bytes for peer in peers)
        assert sum(everything[:-TURNS]) <= LIMIT_BYTES + len(peers)
    # Each request is read completely if its peer continues whenever it may.
    for _ in peers:
        for peer in peers:
            if peer.is_reading:
                peer.end()
    assert holdings.held_bytes == 0


@given(ACTIONS)
@settings(deadline=None)
def test_two_addresses_keep_no_third_from_sending_an_eighth_of_the_bound(actions: list[tuple[int, str]]) -> None:
    holdings = Holdings(LIMIT_BYTES)
    played(holdings, [Peer(holdings, f"hostile{number % 2}") for number in range(8)], actions)
    victim = Peer(holdings, "victim")
    for _ in range(LIMIT_BYTES // 8 // READ_BYTES - 2):
        assert victim.arrive(READ_BYTES)
