"""Order in which connections may send on, if their large requests arrive while an address or the node is full."""

from __future__ import annotations

from gateway.net.holdings import Holdings


class Peer:
    def __init__(self, holdings: Holdings, address: str) -> None:
        self.address = address
        self.turns = 0
        self._holdings = holdings

    def proceed(self) -> None:
        self.turns += self._holdings.may_read_on(self)


def test_connection_that_waits_for_the_node_keeps_no_turn_of_its_address() -> None:
    holdings = Holdings(100)
    one, other = Peer(holdings, "one"), Peer(holdings, "other")
    holdings.arrive(one, 60)
    assert holdings.may_read_on(one), "the only request of a full address"
    holdings.arrive(other, 60)
    assert holdings.may_read_on(other), "the only request of a full node"
    assert not holdings.may_read_on(one)
    holdings.arrive(other, -60)
    assert one.turns == 1


def test_requests_of_a_full_address_take_turns() -> None:
    holdings = Holdings(100)
    first, second, third = (Peer(holdings, "one") for _ in range(3))
    for peer in (first, second, third):
        holdings.arrive(peer, 30)
    assert [holdings.may_read_on(peer) for peer in (first, second, third)] == [True, False, False]
    assert [holdings.is_full_for(peer) for peer in (first, second, Peer(holdings, "other"))] == [False, True, False]
    holdings.arrive(first, -20)
    assert (second.turns, third.turns) == (1, 0)
    holdings.arrive(second, -20)
    assert third.turns == 1, "the node itself has room"
    for peer in (first, second):
        holdings.arrive(peer, -10)
    holdings.arrive(third, -30)
    assert holdings.held_bytes == 0
