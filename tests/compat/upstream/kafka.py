"""Run Kafka's own compiled tests of clients and tools: `python -m tests.compat.upstream.kafka STEP BUILD`.

The one idea: the tests come from the jars that Apache publishes, and this repository keeps only their names. The tests
were written for a cluster inside their own process. Two classes of our own replace the two classes that create this
cluster. Ours request brokers from outside (`tests/compat/upstream_kafka/src`, `outside.py`). The tests listed in
`kafka.allow.toml` run, and the file says for every other test why it does not.

Against Apache Kafka the same tests run unchanged, each with the cluster that it creates itself.

STEP is build, run, version, or list, which prints the tests of the listed classes. Each test becomes the scenario
`upstream.<Class>.<method>`, one for each group protocol if it has several.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tests.compat.suites import FOLDER as SUITES
from tests.compat.upstream.outside import door

ALLOWED = Path(__file__).parent / "kafka.allow.toml"
ADAPTERS = SUITES / "upstream_kafka"
TOOLS_SINCE = "4.2.0"
"""The first version whose published jars contain the classes that @ClusterTest needs."""
TEST_SECONDS = 60
SILENCE_SECONDS = 150.0
"""JUnit interrupts a test at its limit. If the test ignores that, its program is ended after this many seconds without
output.
"""
BOUNDED_SECONDS = 150.0
PROGRAMS = 2
"""Number of programs that run tests at the same time, each with its share of them."""
DETAIL_CHARACTERS = 500
_JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+EnableDynamicAgentLoading", "-Xshare:auto")


@dataclass(frozen=True, slots=True)
class ChosenTests:
    """The tests to run of one class and version, as `method` or `method[protocol]`."""

    version: str
    name: str
    run: tuple[str, ...]

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]

    def has(self, test: str) -> bool:
        """Return whether `Class.method` belongs to this class."""
        return test.startswith(f"{self.short}.")

    def method_of(self, test: str) -> str:
        return test.partition(".")[2]


@dataclass(frozen=True, slots=True)
class AllowList:
    """The list of tests.

    `left_out` gives reasons by `Class.method`, perhaps with `[protocol]`. Tests in `unserved` need functions that a
    gateway does not serve; they still run against Apache Kafka. `bounded` names the classes that run if time is short.
    Tests of `sharing` classes leave behind only topics and groups. `nodes` gives the maximal number of nodes of a class
    or a `Class.method`. `seen` names the classes or methods that see brokers as if these were in the test's process.
    """

    classes: tuple[ChosenTests, ...]
    left_out: dict[str, str]
    nodes: dict[str, int]
    bounded: tuple[str, ...]
    sharing: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    unserved: frozenset[str] = frozenset()
    from_0: tuple[str, ...] = ()
    """Classes or `Class.method` whose nodes are numbered from 0, as in a cluster inside a test's process."""
    roles: tuple[str, ...] = ()
    """Classes or `Class.method` whose nodes are brokers or controllers as the test requests (`process.roles`)."""

    @classmethod
    def load(cls) -> AllowList:
        entries: dict[str, Any] = tomllib.loads(ALLOWED.read_text())
        return cls(
            tuple(ChosenTests(part["version"], part["class"], tuple(part["run"])) for part in entries["classes"]),
            {test: str(part["reason"]) for part in entries["left_out"] for test in part["tests"]},
            {test: int(count) for test, count in entries.get("nodes", {}).items()},
            tuple(entries["bounded"]),
            tuple(entries.get("sharing", [])),
            tuple(entries.get("seen", [])),
            frozenset(test for part in entries["left_out"] if part.get("unserved") for test in part["tests"]),
            tuple(entries.get("from_0", [])),
            tuple(entries.get("roles", [])),
        )

    @property
    def versions(self) -> list[str]:
        return sorted({tests.version for tests in self.classes})


def _base(test: str) -> str:
    return test.partition("[")[0]


def build(folder: Path) -> None:
    """Fetch each version's jars, and compile our adapters with them. Do so once per description."""
    sources = sorted(path for path in ADAPTERS.rglob("*") if path.suffix in (".java", ".xml"))
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    for version in AllowList.load().versions:
        home = folder / version
        stamp = home / "stamp"
        if stamp.exists() and stamp.read_text() == wanted:
            continue
        clustered = _is_clustered(version)
        shutil.rmtree(home, ignore_errors=True)
        command = ["mvn", "--quiet", "--batch-mode", "--file", str(ADAPTERS / "pom.xml"), f"-Dkafka.version={version}"]
        command += ["-Ptools"] if clustered else []
        command += ["dependency:copy-dependencies", "-DincludeScope=test", f"-DoutputDirectory={home / 'libs'}"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        _compile("common", home / "common", [f"{home}/libs/*"])
        services = ADAPTERS / "src" / "common" / "META-INF"
        shutil.copytree(services, home / "common" / "META-INF")
        seen = [str(home / "common"), f"{home}/libs/*"]
        _compile("harness", home / "outside", seen)
        if clustered:
            _compile("cluster", home / "outside", seen)
        stamp.write_text(wanted)


def _is_clustered(version: str) -> bool:
    return [int(part) for part in version.split(".")] >= [int(part) for part in TOOLS_SINCE.split(".")]


def _compile(part: str, target: Path, class_path: Sequence[str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    sources = [str(path) for path in sorted((ADAPTERS / "src" / part).rglob("*.java"))]
    command = [
        "javac",
        "-nowarn",
        "-proc:none",
        "--release",
        "17",
        "-d",
        str(target),
        "-cp",
        os.pathsep.join(class_path),
    ]
    subprocess.run([*command, *sources], check=True)


def _java(folder: Path, version: str, *, outside: bool, heap: str = "768m", seen: Sequence[str] = ()) -> list[str]:
    home = folder / version
    parts = [str(home / "outside")] if outside else []
    class_path = os.pathsep.join([*parts, str(home / "common"), f"{home}/libs/*"])
    logging = f"-Dlog4j2.configurationFile={ADAPTERS / 'log4j2.properties'}"
    return [
        "java",
        *_JVM,
        f"-Xmx{heap}",
        logging,
        f"-Dupstream.limit={TEST_SECONDS}",
        f"-Dupstream.seen={','.join(seen)}",
        "-cp",
        class_path,
        "upstream.Main",
    ]


def there(folder: Path, version: str, classes: Sequence[str]) -> dict[str, set[str]]:
    """Return the existing tests of each class, as JUnit finds them."""
    command = [*_java(folder, version, outside=False), "list", *classes]
    listed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, set[str]] = {name: set() for name in classes}
    for line in listed.split():
        name, _, method = line.partition("#")
        found.setdefault(name, set()).add(method)
    return found


def answer(scenario: str, outcome: str, seconds: float, detail: str) -> None:
    row = {
        "scenario": f"upstream.{scenario}",
        "outcome": outcome,
        "seconds": round(seconds, 3),
        "detail": " ".join(detail.split())[:DETAIL_CHARACTERS],
    }
    sys.stdout.write(json.dumps(row) + "\n")  # Print the line in one write, because other threads also print lines.
    sys.stdout.flush()


def faults(allowed: AllowList, found: dict[str, set[str]]) -> list[str]:
    """Return tests without a line in the file, and lines without a test."""
    known = {f"{name.rpartition('.')[2]}.{method}" for name, methods in found.items() for method in methods}
    run = {f"{tests.short}.{_base(test)}" for tests in allowed.classes for test in tests.run}
    listed = run | {_base(test) for test in allowed.left_out}
    said: list[str] = []
    if known - listed:
        said.append(f"no reason for {', '.join(sorted(known - listed))}")
    if listed - known:
        said.append(f"no such test: {', '.join(sorted(listed - known))}")
    chosen = {f"{tests.short}.{test}" for tests in allowed.classes for test in tests.run}
    if both := chosen & set(allowed.left_out):
        said.append(f"both run and left out: {', '.join(sorted(both))}")
    return said


def run(folder: Path) -> None:
    allowed = AllowList.load()
    found: dict[str, set[str]] = {}
    for version in allowed.versions:
        found |= there(folder, version, [tests.name for tests in allowed.classes if tests.version == version])
    wrong = faults(allowed, found)
    bounded = bool(os.environ.get("COMPAT_BOUNDED"))
    count = sum(len(tests.run) for tests in allowed.classes)
    answer("allow-list", "failed" if wrong else "passed", 0.0, "; ".join(wrong) or f"{count} tests run")
    wanted = {part.removeprefix("upstream.") for part in os.environ.get("COMPAT_SCENARIOS", "").split(",") if part}
    kafka = os.environ.get("COMPAT_BROKER", "sluice") == "kafka"
    for test, reason in allowed.left_out.items():
        if not (kafka and test in allowed.unserved) and (not wanted or test in wanted):
            answer(test, "unserved" if test in allowed.unserved else "skipped", 0.0, reason)
    limit = time.monotonic() + BOUNDED_SECONDS if bounded else None
    chosen: dict[str, dict[str, str]] = {}
    for part in allowed.classes:
        asked = (*part.run, *(part.method_of(test) for test in sorted(allowed.unserved) if kafka and part.has(test)))
        for test in asked:
            row = f"{part.short}.{test}"
            if wanted and row not in wanted and not any(_base(name) == row for name in wanted):
                continue
            if bounded and part.short not in allowed.bounded and row not in allowed.bounded:
                answer(row, "unasked", 0.0, "runs by hand: continuous integration runs a part")
                continue
            chosen.setdefault(part.version, {})[row] = f"{part.name}#{_base(test)}"

    def run_share(share: dict[str, dict[str, str]]) -> None:
        with contextlib.ExitStack() as stack:
            opened = door(
                allowed.nodes,
                sharing=allowed.sharing,
                from_0=allowed.from_0,
                roles=allowed.roles,
            )
            address = stack.enter_context(opened) if share and not kafka else ""
            for version in sorted(share):
                heap = "2g" if kafka else "768m"
                command = _java(folder, version, outside=not kafka, heap=heap, seen=allowed.seen)
                Program(command, address).run(share[version], limit)

    # Most tests spend half of their time waiting. In continuous integration other suites run in that time.
    shares = shared_out(chosen, 1 if bounded else PROGRAMS)
    with ThreadPoolExecutor(len(shares)) as pool:
        for running in [pool.submit(run_share, share) for share in shares]:
            running.result()


def shared_out(chosen: Mapping[str, Mapping[str, str]], count: int) -> list[dict[str, dict[str, str]]]:
    """Divide the tests into `count` shares of about equal size. All tests of a class are in one share, because they may
    share brokers. `chosen` and each share map a version to rows of tests, and each row to `class#method`.
    """
    classes: dict[tuple[str, str], dict[str, str]] = {}
    for version, tests in chosen.items():
        for row, name in tests.items():
            classes.setdefault((version, name.partition("#")[0]), {})[row] = name
    shares: list[dict[str, dict[str, str]]] = [{} for _ in range(count)]
    sizes = [0] * count
    for (version, _), tests in sorted(classes.items(), key=lambda each: -len(each[1])):
        smallest = sizes.index(min(sizes))
        shares[smallest].setdefault(version, {}).update(tests)
        sizes[smallest] += len(tests)
    return shares


class Program:
    """Runs one JVM after another until each test has its answer. If a test does not end, its JVM is killed."""

    def __init__(self, command: Sequence[str], door_address: str) -> None:
        self._command = command
        self._environment = {name: value for name, value in os.environ.items() if name != "UPSTREAM_DOOR"}
        if door_address:
            self._environment["UPSTREAM_DOOR"] = door_address

    def run(self, tests: dict[str, str], limit: float | None) -> None:
        """Run the tests until `limit` (monotonic clock). Tests that have not begun by then do not run."""
        open_tests = dict(tests)
        while open_tests:
            if limit is not None and time.monotonic() > limit:
                for row in open_tests:
                    answer(row, "unasked", 0.0, "runs by hand: no time was left for it here")
                return
            before = len(open_tests)
            for row, reason in self._once(open_tests, limit).items():
                answer(row, "failed", 0.0, reason)
                open_tests.pop(_base(row), None)
                open_tests.pop(row, None)
            if len(open_tests) == before:
                break
        for row in open_tests:
            answer(row, "failed", 0.0, "no result: its program ended before")

    def _once(self, open_tests: dict[str, str], limit: float | None) -> dict[str, str]:
        """Run the open tests and remove those that were answered. Return the test during which the program ended, and
        why.
        """
        lines: dict[str, list[str]] = {}
        for row, name in open_tests.items():
            lines.setdefault(name, []).append(row)
        with tempfile.NamedTemporaryFile("w", suffix=".tests") as chosen:
            chosen.writelines(f"{name} {' '.join(rows)}\n" for name, rows in lines.items())
            chosen.flush()
            process = subprocess.Popen(
                [*self._command, "run", chosen.name], env=self._environment, stdout=subprocess.PIPE, text=True
            )
            try:
                return self._read(process, open_tests, limit)
            finally:
                process.kill()
                process.wait()

    def _read(self, process: subprocess.Popen[str], open_tests: dict[str, str], limit: float | None) -> dict[str, str]:
        running = ""
        answered: set[str] = set()
        reason = "its program ended with it"
        for line in _lines_of(process):
            if line is None:
                reason = "did not end, not even when its limit had passed"
                break
            entry: dict[str, Any] = json.loads(line)
            if "started" in entry:
                running = str(entry["started"])
                continue
            row = str(entry["test"])
            if row == running:
                running = ""
            if row not in answered:
                answered.add(row)
                answer(row, str(entry["outcome"]), float(entry["seconds"]), str(entry["detail"]))
            open_tests.pop(row, None)
            open_tests.pop(_base(row), None)
            if limit is not None and time.monotonic() > limit:
                return {}
        return {running: reason} if running else {}


def _lines_of(process: subprocess.Popen[str]) -> Iterator[str | None]:
    """Yield the printed lines, and None once the program has printed nothing for too long."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=SILENCE_SECONDS)
        except queue.Empty:
            yield None
            return
        if line is None:
            return
        yield line


def main(arguments: list[str]) -> None:
    # Only answers may appear on stdout, but Postgres prints a log when it starts.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    step, folder, *classes = arguments
    if step == "build":
        build(Path(folder).resolve())
    elif step == "run":
        run(Path(folder))
    elif step == "version":
        print(", ".join(f"Apache Kafka {version}" for version in AllowList.load().versions))
    elif step == "list":
        version, *names = classes
        for name, methods in there(Path(folder), version, names).items():
            print(f'[[classes]]\nversion = "{version}"\nclass = "{name}"\nrun = [')
            print("".join(f'    "{method}",\n' for method in sorted(methods)) + "]\n")
    else:
        raise SystemExit(f"no step {step}")


if __name__ == "__main__":
    main(sys.argv[1:])
