"""Properties of the sticky assignor, on seeded groups."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from gateway.coordinator.facts import MemberId
from gateway.coordinator.streams.assignor import Worker, assign
from gateway.coordinator.streams.tasks import Tasks


def check(workers: dict[MemberId, Worker], counts: dict[str, int], standbys: int, given: dict[MemberId, Tasks]) -> None:
    tasks = {(name, index) for name, count in counts.items() for index in range(count)}
    active = Counter(task for each in given.values() for task in each.active)
    assert active == Counter(tasks)
    sizes = [len(each.active) for each in given.values()]
    assert max(sizes) - min(sizes) <= 1
    processes = {each.process_id for each in workers.values()}
    held = Counter(
        (workers[member_id].process_id, task)
        for member_id, each in given.items()
        for task in (*each.active, *each.standby)
    )
    assert not [task for task, count in held.items() if count > 1]
    standby = Counter(task for each in given.values() for task in each.standby)
    assert all(standby[task] == min(standbys, len(processes) - 1) for task in tasks)


@pytest.mark.parametrize("seed", range(200))
def test_every_task_has_one_owner_and_its_standbys_are_elsewhere(seed: int):
    chance = random.Random(seed)
    counts = {str(at): chance.randint(1, 9) for at in range(chance.randint(1, 3))}
    standbys = chance.randint(0, 2)
    workers: dict[MemberId, Worker] = {}
    for at in range(chance.randint(1, 6)):
        workers[MemberId(f"m{at}")] = Worker(f"p{chance.randint(0, 3)}")
    for step in range(6):
        given = assign(workers, counts, standbys)
        check(workers, counts, standbys, given)
        workers = {key: Worker(each.process_id, given[key]) for key, each in workers.items()}
        again = assign(workers, counts, standbys)
        assert {key: each.active for key, each in again.items()} == {key: each.active for key, each in given.items()}
        if chance.random() < 0.5 and len(workers) > 1:
            del workers[chance.choice(sorted(workers))]
        else:
            workers[MemberId(f"n{step}")] = Worker(f"p{chance.randint(0, 3)}")


def test_a_member_that_joins_takes_no_more_than_its_share():
    before = assign({MemberId("a"): Worker("p")}, {"0": 4}, 0)
    after = assign({MemberId("a"): Worker("p", before[MemberId("a")]), MemberId("b"): Worker("q")}, {"0": 4}, 0)
    assert after[MemberId("a")].active < before[MemberId("a")].active
    assert len(after[MemberId("b")].active) == 2


def test_member_with_a_standby_takes_the_task_over():
    last = {"a": Tasks(frozenset({("0", 0)})), "b": Tasks(), "c": Tasks(standby=frozenset({("0", 0)}))}
    workers = {MemberId(key): Worker(key, last[key]) for key in ("b", "c")}
    assert assign(workers, {"0": 1}, 0)[MemberId("c")].active == {("0", 0)}


def test_process_of_many_members_is_considered_once_per_task():
    workers = {MemberId(f"m{at:03}"): Worker("one" if at else "other") for at in range(300)}
    started = time.process_time()
    given = assign(workers, {"0": 20_000}, 2)
    assert time.process_time() - started < 1, "seconds: a tenth of one is enough, and asking each member takes four"
    check(workers, {"0": 20_000}, 1, given)
