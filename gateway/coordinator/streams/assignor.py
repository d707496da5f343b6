"""Who should own which task: the assignor `sticky`.

The one idea: state is dear to move. An active task stays where it is, or goes to a member that keeps a standby of it,
as long as no member has more than its share; the rest goes where the load is least. Standbys go to other processes than
the active task, to where they were if they may. Equal inputs have equal results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
    for task in wanted:
        load = homes.get(task)
        has_room = load is not None and (
            len(load.active) < least or (len(load.active) == least and extra > _above(loads, least))
        )
        if load is not None and has_room:
            load.active.add(task)
            in_process[load.worker.process_id].add(task)
        else:
            left.append(task)
    for task in left:
        room = [load for load in loads.values() if len(load.active) < least]
        room = room or [load for load in loads.values() if len(load.active) == least]
        load = min(room, key=lambda each: (task not in each.worker.last.standby, len(each.active)))
        load.active.add(task)
        in_process[load.worker.process_id].add(task)


def _above(loads: Mapping[MemberId, _Load], least: int) -> int:
    """How many members have one task more than the least."""
    return sum(len(load.active) > least for load in loads.values())


def _assign_standby(loads: Mapping[MemberId, _Load], tasks: Iterable[Task], in_process: dict[str, set[Task]]) -> None:
    for task in tasks:
        able = [load for load in loads.values() if task not in in_process[load.worker.process_id]]
        if not able:
            continue
        ceiling = min(load.size for load in able) + 1
        kept = [load for load in able if task in load.worker.last.standby and load.size <= ceiling]
        load = min(kept or able, key=lambda each: each.size)
        load.standby.add(task)
        in_process[load.worker.process_id].add(task)
