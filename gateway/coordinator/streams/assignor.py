"""The assignor `sticky`: which member should own which task.

The one idea: state is expensive to move. An active task stays where it is, or goes to a member that keeps a standby of
it, as long as no member has more than its share. Other tasks go to the member with the least load. Standbys go to other
processes than the active task, and if possible to where they were. Equal inputs have equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from gateway.coordinator.facts import MemberId
from gateway.coordinator.streams.tasks import NO_TASKS, Task, Tasks


@dataclass(frozen=True, slots=True)
class Worker:
    """A member as the assignor sees it."""

    process_id: str
    last: Tasks = NO_TASKS
    """The member's part of the last target assignment."""


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
    """Assign the tasks. Every task is active once, if there are members; there are fewer standbys than configured if
    there are few processes."""
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
    lightest = _Lightest(enumerate(loads.values()), lambda load: len(load.active))
    keepers = _keepers(loads.values())
    for task in left:
        load = lightest.first
        most = least if len(load.active) < least else least + 1
        able = [each for each in keepers.get(task, ()) if len(each.active) < most]
        load = min(able, key=lambda each: len(each.active), default=load)
        load.active.add(task)
        in_process[load.worker.process_id].add(task)


def _assign_standby(loads: Mapping[MemberId, _Load], tasks: Iterable[Task], in_process: dict[str, set[Task]]) -> None:
    lightest = _LightestProcess(loads.values(), lambda load: load.size)
    keepers = _keepers(loads.values())
    for task in tasks:
        load = lightest.find_without(task, in_process)
        if load is None:
            continue
        kept = [
            each
            for each in keepers.get(task, ())
            if task not in in_process[each.worker.process_id] and each.size <= load.size + 1
        ]
        load = min(kept, key=lambda each: each.size, default=load)
        load.standby.add(task)
        in_process[load.worker.process_id].add(task)


def _keepers(loads: Iterable[_Load]) -> dict[Task, list[_Load]]:
    """Return the members that had a standby copy of each task."""
    keepers: dict[Task, list[_Load]] = {}
    for load in loads:
        for task in load.worker.last.standby:
            keepers.setdefault(task, []).append(load)
    return keepers


class _Lightest:
    """Find the member with the least load; among equals, the first one. Loads only grow, so no search visits all
    members for each task."""

    def __init__(self, loads: Iterable[tuple[int, _Load]], weigh: Callable[[_Load], int]) -> None:
        self._loads = dict(loads)
        self._weigh = weigh
        self._heap = [(weigh(load), at) for at, load in self._loads.items()]
        heapify(self._heap)

    @property
    def first(self) -> _Load:
        return self._loads[self.least[1]]

    @property
    def least(self) -> tuple[int, int]:
        """Return the least load, and the position of its member among all members."""
        while True:
            weight, at = self._heap[0]
            weighs = self._weigh(self._loads[at])
            if weight == weighs:
                return weight, at
            heapreplace(self._heap, (weighs, at))


class _LightestProcess:
    """Find the member with the least load in those processes that do not hold a task. Few processes hold a task,
    however many members each process has."""

    def __init__(self, loads: Iterable[_Load], weigh: Callable[[_Load], int]) -> None:
        members: dict[str, list[tuple[int, _Load]]] = {}
        for at, load in enumerate(loads):
            members.setdefault(load.worker.process_id, []).append((at, load))
        self._processes = {process_id: _Lightest(each, weigh) for process_id, each in members.items()}
        self._heap = [(each.least, process_id) for process_id, each in self._processes.items()]
        heapify(self._heap)

    def find_without(self, task: Task, in_process: Mapping[str, set[Task]]) -> _Load | None:
        """Return None if every process holds the task."""
        passed: list[tuple[tuple[int, int], str]] = []
        found: _Load | None = None
        while self._heap and found is None:
            least, process_id = self._heap[0]
            process = self._processes[process_id]
            if least != process.least:
                heapreplace(self._heap, (process.least, process_id))
            elif task in in_process[process_id]:
                passed.append(heappop(self._heap))
            else:
                found = process.first
        for each in passed:
            heappush(self._heap, each)
        return found
