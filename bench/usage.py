"""Show where the machine's time goes: CPU by process and thread, context switches, and bytes written to the disk, from
/proc.

A measurement is the difference of two snapshots. When a thread ends, its own figures are lost, but its process keeps
their sum. The parent process keeps the sums of its ended processes. So threads and processes that ended in between are
counted with the rest of their group. All other time of the machine belongs to others: the kernel's own threads,
interrupts, other programs.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of the machine: seconds of CPU, numbers of context switches (`waits` are voluntary, `preempted` are not), and
    bytes written to the disk.
    """

    user_s: float = 0.0
    system_s: float = 0.0
    waits: int = 0
    preempted: int = 0
    written_bytes: int = 0

    @property
    def cpu_s(self) -> float:
        return self.user_s + self.system_s

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.user_s + other.user_s,
            self.system_s + other.system_s,
            self.waits + other.waits,
            self.preempted + other.preempted,
            self.written_bytes + other.written_bytes,
        )

    def __sub__(self, other: Usage) -> Usage:
        return self + Usage(-other.user_s, -other.system_s, -other.waits, -other.preempted, -other.written_bytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds of all cores together and of the disk. `flushes` counts flushes that reached the device."""

    user_s: float
    system_s: float
    idle_s: float
    disk_wait_s: float
    stolen_s: float
    written_bytes: int
    writes: int
    flushes: int
    disk_busy_s: float

    def __sub__(self, other: Machine) -> Machine:
        return Machine(*(getattr(self, name) - getattr(other, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    threads: Mapping[int, tuple[str, Usage]]
    """For each thread, by its id, its group and its use."""
    whole: Usage
    """Use of all processes, CPU only, because the kernel does not keep the context switches of ended threads."""
    ended_children: Usage
    rest: str
    """Name of the group for threads that have ended."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    at_s: float
    machine: Machine
    processes: Mapping[int, ProcessUsage]


@dataclass(frozen=True, slots=True)
class Spent:
    """Use of the machine between two snapshots."""

    seconds: float
    machine: Machine
    groups: Mapping[str, Usage] = field(default_factory=dict[str, Usage])

    @property
    def known_s(self) -> float:
        return sum(usage.cpu_s for usage in self.groups.values())

    @property
    def others_s(self) -> float:
        """Return the CPU seconds of processes that belong to no group."""
        return max(0.0, self.machine.user_s + self.machine.system_s - self.known_s)


def snapshot(roots: Mapping[str, int], directory: Path) -> Snapshot:
    """Take a snapshot of these processes, by role, and of all their descendants. The measured disk is the one that
    holds `directory`.
    """
    processes: dict[int, ProcessUsage] = {}
    listed: list[tuple[str, int]] = []
    own = os.getpid()
    for role, pid in roots.items():
        listed.append((role, pid))
        # Servers are child processes of this one, but have roles of their own.
        if pid != own:
            listed += [(role, child.pid) for child in psutil.Process(pid).children(recursive=True)]
    for role, pid in listed:
        try:
            processes[pid] = _read_process(role, pid, is_root=pid in roots.values())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return Snapshot(time.perf_counter(), _read_machine(directory), processes)


def between(first: Snapshot, last: Snapshot) -> Spent:
    groups: dict[str, Usage] = {}

    def add(group: str, usage: Usage) -> None:
        groups[group] = groups.get(group, Usage()) + usage

    for pid, process in last.processes.items():
        before = first.processes.get(pid, ProcessUsage({}, Usage(), Usage(), process.rest))
        living_before = living = Usage()
        for thread, (group, usage) in process.threads.items():
            was = before.threads.get(thread, ("", Usage()))[1]
            living_before, living = living_before + was, living + usage
            add(group, usage - was)
        spent = process.whole - before.whole
        ended_s = (spent.user_s - (living - living_before).user_s, spent.system_s - (living - living_before).system_s)
        add(process.rest, Usage(max(0.0, ended_s[0]), max(0.0, ended_s[1])))
        add(process.rest, process.ended_children - before.ended_children)
    machine = last.machine - first.machine
    return Spent(last.at_s - first.at_s, machine, {group: usage for group, usage in groups.items() if usage.cpu_s > 0})


# --- /proc ------------------------------------------------------------------------------------------------------------


def _read_process(role: str, pid: int, *, is_root: bool) -> ProcessUsage:
    directory = Path("/proc") / str(pid)
    whole, ended_children = _read_times(directory / "stat")
    title = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    threads: dict[int, tuple[str, Usage]] = {}
    for entry in os.listdir(directory / "task"):
        place = directory / "task" / entry
        try:
            usage = _read_times(place / "stat")[0]
            waits, preempted = _read_switches((place / "status").read_text())
            name = (place / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        group = group_of(role, title, name, is_root=is_root, is_first=int(entry) == pid)
        written_bytes = _read_written(place / "io")
        threads[int(entry)] = (group, Usage(usage.user_s, usage.system_s, waits, preempted, written_bytes))
    rest = group_of(role, title, "", is_root=is_root, is_first=False)
    return ProcessUsage(threads, whole, ended_children, rest)


def _read_times(path: Path) -> tuple[Usage, Usage]:
    """Return the CPU times of a process, and of those of its children that it has waited for."""
    # The name before it may contain blanks and parentheses.
    values = path.read_text().rpartition(")")[2].split()
    user, system, children_user, children_system = (int(value) * _TICK_S for value in values[11:15])
    return Usage(user, system), Usage(children_user, children_system)


def _read_written(path: Path) -> int:
    """Return the bytes that the process has written. Return 0 if only the owner of the process may read that number."""
    try:
        found = dict(line.split(":", 1) for line in path.read_text().splitlines())
    except PermissionError:
        return 0
    return int(found["write_bytes"])


def _read_switches(status: str) -> tuple[int, int]:
    found = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(found["voluntary_ctxt_switches"]), int(found["nonvoluntary_ctxt_switches"])


_JVM: Sequence[tuple[str, str]] = (
    (r"C[12] Compiler|Sweeper", "JVM compiler"),
    (r"G1|GC|VM Thread|VM Period", "JVM collector"),
    # Use one name for both kinds, because the kernel keeps only the first 15 characters of a name.
    (r"^data-pl", "network and request threads"),
)
_POSTGRES = re.compile(r"^postgres: (?:\S+: )?(.+?)\s*$")
_OWN_PROCESSES = (
    "walwriter",
    "checkpointer",
    "background writer",
    "io worker",
    "autovacuum launcher",
    "autovacuum worker",
    "archiver",
    "startup",
)


def group_of(role: str, title: str, name: str, *, is_root: bool, is_first: bool) -> str:
    """Return the name of a thread in a report.

    `title` is its process' command line. `name` is its own, empty for threads that have ended.
    """
    if role == "client":
        return "client: librdkafka" if name.startswith("rdk:") else "client: Python"
    if found := _POSTGRES.match(title):
        what = found[1]
        kind = next((kind for kind in _OWN_PROCESSES if what.startswith(kind)), "backends")
        return f"Postgres: {kind}"
    if "/postgres" in title.partition(" ")[0]:
        return "Postgres: postmaster"
    if role.startswith("kafka"):
        for pattern, group in _JVM:
            if re.search(pattern, name):
                return f"Kafka: {group}"
        return "Kafka: other threads"
    if not is_root:
        return f"{role}: children"
    return f"{role}: event loop" if is_first else f"{role}: other threads"


def _read_machine(directory: Path) -> Machine:
    user, nice, system, idle, disk_wait, interrupts, soft, stolen, *_ = (
        int(value) * _TICK_S for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    disk = _read_disk(directory)
    return Machine(
        user + nice,
        system + interrupts + soft,
        idle,
        disk_wait,
        stolen,
        disk.get("sectors", 0) * _SECTOR_BYTES,
        disk.get("writes", 0),
        disk.get("flushes", 0),
        disk.get("busy_ms", 0) / 1000,
    )


def _read_disk(directory: Path) -> Mapping[str, int]:
    """Return the counters of the whole disk. Empty if the directory is not on a disk of this machine."""
    device = directory.stat().st_dev
    place = Path("/sys/dev/block") / f"{os.major(device)}:{os.minor(device)}"
    if not place.exists():
        return {}
    place = place.resolve()
    if (place / "partition").exists():
        place = place.parent
    values = [int(value) for value in (place / "stat").read_text().split()]
    # Kernels before 5.5 do not count flushes.
    return {
        "writes": values[4],
        "sectors": values[6],
        "busy_ms": values[9],
        "flushes": values[15] if len(values) > 15 else 0,
    }
