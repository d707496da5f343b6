from __future__ import annotations

from collections.abc import Sequence

from tests.dealing import dealt

MODULES = {
    "clients/test_a": 3,
    "clients/test_b": 2,
    "cluster/test_c": 4,
    "coordinator/test_d": 40,
    "gateway/test_e": 20,
    "gateway/test_f": 10,
    "protocol/test_g": 50,
    "sql/test_h": 3,
    "storage/test_i": 12,
}
TESTS = [(module, number) for module, count in MODULES.items() for number in range(count)]


def _folder_of(test: tuple[str, int]) -> str:
    return test[0].split("/")[0]


def _module_of(test: tuple[str, int]) -> str:
    return test[0]


def _shares(tests: Sequence[tuple[str, int]], workers: int) -> list[Sequence[tuple[str, int]]]:
    """Return the tests with which each worker begins: as many as any other, and the last ones take the rest."""
    order = dealt(tests, workers, folder_of=_folder_of, module_of=_module_of)
    assert sorted(order) == sorted(tests)
    shares: list[Sequence[tuple[str, int]]] = []
    while order:
        length = len(order) // (workers - len(shares))
        shares.append(order[:length])
        del order[:length]
    return shares


def test_every_worker_begins_with_computing_and_then_waits() -> None:
    for workers in (2, 3, 4):
        shares = _shares(TESTS, workers)
        assert len(shares) == workers
        for share in shares:
            kinds = "".join(
                {"coordinator": "c", "protocol": "c", "gateway": "o", "storage": "o"}.get(_folder_of(test), "w")
                for test in share
            )
            assert kinds == "".join(sorted(kinds, key="cwo".index))
            assert "cw" in kinds


def test_no_module_that_waits_is_divided() -> None:
    shares = _shares(TESTS, 3)
    for module in ("clients/test_a", "clients/test_b", "cluster/test_c", "sql/test_h"):
        assert sum(any(test[0] == module for test in share) for share in shares) == 1


def test_shares_without_tests_that_compute_hold_all_tests() -> None:
    tests = [test for test in TESTS if _folder_of(test) not in {"coordinator", "protocol"}]
    assert sorted(test for share in _shares(tests, 4) for test in share) == sorted(tests)
    assert dealt([], 4, folder_of=_folder_of, module_of=_module_of) == []
