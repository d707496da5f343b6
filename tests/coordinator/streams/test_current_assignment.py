"""Members that move towards their target assignments, in a seeded simulation in which they report in any order."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gateway.coordinator.facts import MemberId
from gateway.coordinator.streams.assignor import Worker, assign
from gateway.coordinator.streams.current_assignment import held_by_others, reconcile
from gateway.coordinator.streams.model import MemberState, StreamsMember
from gateway.coordinator.streams.tasks import NO_TASKS, Tasks


class Sim:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.members: dict[MemberId, StreamsMember] = {}
        self.owned: dict[MemberId, Tasks] = {}
        self.target: dict[MemberId, Tasks] = {}
        self.epoch = 0

    def retarget(self) -> None:
        workers = {key: Worker(each.process_id, self.target.get(key, NO_TASKS)) for key, each in self.members.items()}
        self.target = assign(workers, {"0": 5, "1": 3}, self.chance.randint(0, 2))
        self.epoch += 1

    def join(self) -> None:
        member_id = MemberId(f"m{self.epoch}")
        self.members[member_id] = StreamsMember(member_id, f"p{self.chance.randint(0, 2)}")
        self.owned[member_id] = NO_TASKS
        self.retarget()

    def leave(self) -> None:
        member_id = self.chance.choice(sorted(self.members))
        del self.members[member_id], self.owned[member_id]
        self.retarget()

    def speak(self, member_id: MemberId, *, silent: bool = False) -> None:
        member = self.members[member_id]
        others = held_by_others(member, self.members.values())
        owned = None if silent else self.owned[member_id]
        after = reconcile(member, self.target[member_id], self.epoch, others, owned)
        self.members[member_id] = after
        self.check()
        if self.chance.random() < 0.7:  # otherwise the answer is lost, and the member still owns its earlier tasks
            self.owned[member_id] = after.assigned
            self.check()

    def check(self) -> None:
        active: set[tuple[str, int]] = set()
        in_process: set[tuple[str, tuple[str, int]]] = set()
        for member_id, owned in self.owned.items():
            assert not active & owned.active
            active |= owned.active
            for task in (*owned.active, *owned.standby):
                key = (self.members[member_id].process_id, task)
                assert key not in in_process
                in_process.add(key)


@pytest.mark.parametrize("seed", range(300))
def test_a_task_has_one_active_owner_and_one_copy_in_a_process_at_any_time(seed: int):
    sim = Sim(seed)
    sim.join()
    for _ in range(60):
        roll = sim.chance.random()
        if roll < 0.1 and len(sim.members) < 6:
            sim.join()
        elif roll < 0.15 and len(sim.members) > 1:
            sim.leave()
        else:
            sim.speak(sim.chance.choice(sorted(sim.members)), silent=sim.chance.random() < 0.3)
    for _ in range(60):
        for member_id in sorted(sim.members):
            sim.speak(member_id)
    for member_id, member in sim.members.items():
        assert member.state is MemberState.STABLE
        assert member.member_epoch == sim.epoch
        assert member.assigned == sim.target[member_id]


def test_unchanged_target_leaves_the_member_unchanged():
    member = replace(StreamsMember(MemberId("a"), "p"), member_epoch=3)
    assert reconcile(member, NO_TASKS, 3, held_by_others(member, [member]), None) is member
