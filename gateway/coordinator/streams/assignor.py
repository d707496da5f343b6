"""Who should own which task: the assignor `sticky`.

The one idea: state is dear to move. An active task stays where it is, or goes to a member that keeps a standby of it,
as long as no member has more than its share; the rest goes where the load is least. Standbys go to other processes than
the active task, to where they were if they may. Equal inputs have equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from gateway.coordinator.facts import MemberId
from gateway.coordinator.streams.tasks import NO_TASKS, Task, Tasks


@dataclass(frozen=True, slots=True)
class Worker:
    """A member, as far as the assignor must know it."""

    process_id: str
    last: Tasks = NO_TASKS
    """What the last target gave it."""


@dataclass(slots=True)
class _Load:
    worker: Worker
    active: set[Task] = field(default_factory=set[Task])
    standby: set[Task] = field(default_factory=set[Task])

    @property
    def size(self) -> int:
        return len(self.active) + len(self.standby)


def assign(
    workers: Mapping[MemberId, Worker], task_counts: Mapping[str, int], num_standby_replicas: int
) -> dict[MemberId, Tasks]:
    """Every task is active once, if there are members; standbys are fewer than asked for where processes are few."""
    if not workers:
        return {}
    loads = {member_id: _Load(workers[member_id]) for member_id in sorted(workers)}
    # Partition by partition: tasks of one subtopology are spread before those of the next.
    tasks = sorted(
        ((name, index) for name, count in task_counts.items() for index in range(count)),
        key=lambda task: (task[1], task[0]),
    )
    in_process: dict[str, set[Task]] = {load.worker.process_id: set() for load in loads.values()}
    _assign_active(loads, tasks, in_process)
    for _ in range(num_standby_replicas):
        _assign_standby(loads, tasks, in_process)
    return {member_id: Tasks(frozenset(load.active), frozenset(load.standby)) for member_id, load in loads.items()}


def _assign_active(loads: Mapping[MemberId, _Load], tasks: Iterable[Task], in_process: dict[str, set[Task]]) -> None:
    wanted = list(tasks)
    least, extra = divmod(len(wanted), len(loads))
    homes = {task: load for load in loads.values() for task in load.worker.last.active}
    left: list[Task] = []
    above = 0
    for task in wanted:
        load = homes.get(task)
        if load is None or len(load.active) > least or (len(load.active) == least and above == extra):
            left.append(task)
            continue
        above += len(load.active) == least
        load.active.add(task)
        in_process[load.worker.process_id].add(task)
    lightest = _Lightest(loads.values(), lambda load: len(load.active))
    keepers = _keepers(loads.values())
    for task in left:
        load = lightest.find(_anyone)
        assert load is not None
        most = least if len(load.active) < least else least + 1
        able = [each for each in keepers.get(task, ()) if len(each.active) < most]
        load = min(able, key=lambda each: len(each.active), default=load)
        load.active.add(task)
        in_process[load.worker.process_id].add(task)


def _assign_standby(loads: Mapping[MemberId, _Load], tasks: Iterable[Task], in_process: dict[str, set[Task]]) -> None:
    lightest = _Lightest(loads.values(), lambda load: load.size)
    keepers = _keepers(loads.values())
    for task in tasks:

        def able(load: _Load, task: Task = task) -> bool:
            return task not in in_process[load.worker.process_id]

        load = lightest.find(able)
        if load is None:
            continue
        kept = [each for each in keepers.get(task, ()) if able(each) and each.size <= load.size + 1]
        load = min(kept, key=lambda each: each.size, default=load)
        load.standby.add(task)
        in_process[load.worker.process_id].add(task)


def _keepers(loads: Iterable[_Load]) -> dict[Task, list[_Load]]:
    """Who had a standby copy of each task."""
    keepers: dict[Task, list[_Load]] = {}
    for load in loads:
        for task in load.worker.last.standby:
            keepers.setdefault(task, []).append(load)
    return keepers


def _anyone(load: _Load) -> bool:
    return True


class _Lightest:
    """Finds who has least, the first of several, without a look at all of them for each task."""

    def __init__(self, loads: Iterable[_Load], weigh: Callable[[_Load], int]) -> None:
        self._loads = list(loads)
        self._weigh = weigh
        self._heap = [(weigh(load), at) for at, load in enumerate(self._loads)]
        heapify(self._heap)

    def find(self, able: Callable[[_Load], bool]) -> _Load | None:
        """Who is able and has least; None if nobody is able. Loads only grow between two calls."""
        passed: list[tuple[int, int]] = []
        found: _Load | None = None
        while self._heap and found is None:
            weight, at = self._heap[0]
            load = self._loads[at]
            if weight != self._weigh(load):
                heapreplace(self._heap, (self._weigh(load), at))
            elif able(load):
                found = load
            else:
                passed.append(heappop(self._heap))
        for each in passed:
            heappush(self._heap, each)
        return found
