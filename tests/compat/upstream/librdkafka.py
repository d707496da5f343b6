"""Run the tests that librdkafka carries in its source: `python -m tests.compat.upstream.librdkafka STEP BUILD`.

The one idea: this repository keeps only names of the tests. Debian's source package comes through apt from the
machine's own sources, and is compiled in the build folder. The tests listed in `librdkafka.allow.toml` run, and the
file says for every other test why it does not. In the version for which the list was made, an unknown test is a
failure, and so is a name without a test. In any other version the answer for such a test is "skipped". Tests that fail
because of a defect of the library run against a newer library, which is part of confluent-kafka.

STEP is build, run or version. Each test becomes the scenario `upstream.<test>`, in a process of its own with its own
limit. Some tests get other brokers. Tests of librdkafka's scenario `noautocreate` get a gateway (or Kafka) that creates
no topic by itself. Tests of ACLs get a broker with an authorizer that permits everything without an ACL. Tests that
need racks get three nodes, each in a rack of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import confluent_kafka
import structlog

from tests.compat.brokers import APACHE_KAFKA, SLUICE
from tests.compat.process import run_limited
from tests.compat.upstream import java_tools, kafka_acls, kafka_topics
from tests.compat.upstream.racks import racked
from tests.compat.upstream.secured import KEY_PASSWORD, PASSWORD, USER, SecuredGateway, secured_gateway
from tests.postgres import short_directory

PACKAGE = "librdkafka"
# With this package installed, tests read the library's statistics. Without it they skip themselves.
JSON_PACKAGE = "rapidjson"
JAVA = "java"
NEWER, WITH_JAVA, WITH_AUTHORIZER = "run_with_newer_library", "run_with_java", "run_with_authorizer"
ALLOW_LIST = Path(__file__).parent / "librdkafka.allow.toml"
KAFKA_VERSION = "4.1.0"
NO_AUTO_CREATE, AUTHORIZER = "noautocreate", "authorizer"
SETTINGS = {"group.initial.rebalance.delay.ms": "300", "num.partitions": "4"}
SETTINGS_OF = {
    NO_AUTO_CREATE: {"auto.create.topics.enable": "false"},
    AUTHORIZER: {
        "auto.create.topics.enable": "true",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    },
}
"""Additional broker settings of the tests that get brokers of their own."""
RACKS, IN_RACKS = "racks", frozenset({"0101_fetch_from_follower"})
"""Tests that skip themselves unless there are three brokers, each in a rack of its own. They form a
scenario of ours.
"""
RACKS_SETTINGS = {"group.initial.rebalance.delay.ms": "0", "num.partitions": "4"}
# Most of a test's time is waiting.
PARALLEL = 5
DETAIL_LINES = 6
DETAIL_CHARACTERS = 600

# A map in librdkafka's tests has an invalid order: two partitions of two topics each compare as less than the other. A
# consumer that has read both topics corrupts the map and sometimes ends with SIGSEGV, with any broker (8 of 15 runs
# with this one, 1 of 9 with Apache Kafka 4.2).
MAP_OF_THEIRS = Path("tests", "0113-cooperative_rebalance.cpp")
NO_ORDER = "if (a.partition < b.partition)"
AN_ORDER = f"if (a.partition > b.partition) return false;\n    {NO_ORDER}"

# The remaining configuration of these tests, without the address. They use PLAIN, because SCRAM of Debian's library
# sends a nonce that Kafka refuses since 3.7.2 (CVE-2024-56128).
SECURED: Mapping[str, Callable[[SecuredGateway], str]] = {
    "0126_oauthbearer_oidc": lambda gateway: (
        f"bootstrap.servers={gateway.oauth}\nsecurity.protocol=SASL_PLAINTEXT\nsasl.mechanism=OAUTHBEARER\n"
        "sasl.oauthbearer.method=OIDC\nsasl.oauthbearer.client.id=client\nsasl.oauthbearer.client.secret=secret\n"
    ),
    "0097_ssl_verify": lambda gateway: (
        f"bootstrap.servers={gateway.tls}\nsecurity.protocol=SSL\nssl.ca.location={gateway.authority}\n"
        f"ssl.certificate.location={gateway.client.certificate}\nssl.key.location={gateway.client.key}\n"
        f"ssl.key.password={KEY_PASSWORD}\n"
    ),
    "0135_sasl_credentials": lambda gateway: (
        f"bootstrap.servers={gateway.sasl}\nsecurity.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\n"
        f"sasl.username={USER}\nsasl.password={PASSWORD}\n"
    ),
}

_NO_WORD = re.compile(r"\W+")
_COLOUR = re.compile(r"\033\[[\d;]*m")
_SUMMARY = re.compile(r"^\|\s*(\w+)\s+\|\s*(PASSED|FAILED|SKIPPED|RUNNING)\s+\|\s*([\d.]+)s\s*\|?\s*(.*)$")
_SUBTEST_PASSED = re.compile(r"\[ (.+): PASS \([\d.]+s\) \]$")
_SUBTEST_SKIPPED = re.compile(r"\[ (\w+):\d+(?:: .*)?: SKIP: .* \]$")
_FAILED = re.compile(r'^### Test "(.*)" failed at (\S+?):\w*\(\) at .* ###$')
_OUTCOMES = {"PASSED": "passed", "SKIPPED": "skipped"}


@dataclass(frozen=True, slots=True)
class Test:
    """One entry of the table of librdkafka's tests. `number` selects the tests to run; several tests may share a
    number.
    """

    name: str
    scenario: str
    local: bool

    @property
    def number(self) -> str:
        return self.name.partition("_")[0]


@dataclass(frozen=True, slots=True)
class Choice:
    """A test as the allow list names it: a whole test, or `<test>: <part>`, where `part` occurs in the names of its
    subtests.
    """

    test: str
    part: str = ""

    @classmethod
    def parse(cls, text: str) -> Choice:
        test, _, part = text.partition(": ")
        return cls(test, part)

    @property
    def scenario(self) -> str:
        return f"{self.test}.{_NO_WORD.sub('-', self.part)}" if self.part else self.test


@dataclass(frozen=True, slots=True)
class AllowList:
    """The list of tests.

    `version` is the version for which the list was made. Tests of `newer` need a newer library, those of `with_java` a
    Java client, and those of `with_authorizer` a broker that has one; all are part of `run`. `left_out` gives the
    reason of each choice that does not run. Tests in `unserved` would run if a gateway served what they need.
    """

    version: str
    limit_s: float
    limits_s: dict[Choice, float]
    kafka_versions: dict[str, str]
    run: tuple[Choice, ...]
    newer: frozenset[Choice]
    with_java: frozenset[Choice]
    with_authorizer: frozenset[Choice]
    left_out: dict[Choice, str]
    unserved: frozenset[Choice]

    @classmethod
    def load(cls) -> AllowList:
        entries: dict[str, Any] = tomllib.loads(ALLOW_LIST.read_text())
        return cls(
            entries["version"],
            float(entries["limit_s"]),
            {Choice.parse(name): float(limit) for name, limit in entries["limits_s"].items()},
            entries["kafka_versions"],
            tuple(Choice.parse(name) for key in ("run", NEWER, WITH_JAVA, WITH_AUTHORIZER) for name in entries[key]),
            frozenset(Choice.parse(name) for name in entries[NEWER]),
            frozenset(Choice.parse(name) for name in entries[WITH_JAVA]),
            frozenset(Choice.parse(name) for name in entries[WITH_AUTHORIZER]),
            {Choice.parse(name): str(group["reason"]) for group in entries["left_out"] for name in group["tests"]},
            frozenset(
                Choice.parse(name) for group in entries["left_out"] if group.get("unserved") for name in group["tests"]
            ),
        )

    def limit_of(self, choice: Choice) -> float:
        return self.limits_s.get(choice, self.limit_s)

    def faults(self, version: str, there: Mapping[str, Test]) -> list[str]:
        """Return the errors of the list, compared with the tests that exist."""
        chosen = {choice.test for choice in (*self.run, *self.left_out)}
        faults: list[str] = []
        if version == self.version:
            faults += [f"no reason for {name}" for name in there if name not in chosen]
            faults += [f"no such test: {name}" for name in sorted(chosen - there.keys())]
        whole = Counter(choice.test for choice in {*self.run, *self.left_out})
        for choice in (*self.run, *self.left_out):
            if not choice.part and whole[choice.test] > 1:
                faults.append(f"both whole and in parts: {choice.test}")
        faults += [f"both run and left out: {choice.scenario}" for choice in self.run if choice in self.left_out]
        faults += [
            f"tests no broker: {choice.test}"
            for choice in self.run
            if choice.test in there and there[choice.test].local
        ]
        return faults


def tests_of(source: Path) -> dict[str, Test]:
    """Return the table of librdkafka's tests, from the source of their runner."""
    table = (source / "tests" / "test.c").read_text().partition("struct test tests[]")[2].partition("{NULL}")[0]
    tests: dict[str, Test] = {}
    for entry in table.split("_TEST(")[1:]:
        name = entry.partition(",")[0].strip()
        # Commas separate several scenarios. Take the first one.
        scenario = re.search(r'\.scenario\s*=\s*"([^",]+)', entry)
        tests[name] = Test(name, scenario[1] if scenario else "default", "TEST_F_LOCAL" in entry)
    return tests


def build(folder: Path) -> None:
    """Fetch, unpack and compile, once. If apt has no source package, write that down for `run`."""
    _build_tests(folder)
    if (folder / "source").exists():
        _build_java(folder)


def _build_java(folder: Path) -> None:
    """Build the Java classes of librdkafka's tests and the script that starts them. The folder also holds the parts of
    a Kafka distribution that the script uses.
    """
    built, jars = folder / JAVA, folder / "kafka-tools"
    if shutil.which("javac") is None or not java_tools.fetch(jars):
        shutil.rmtree(built, ignore_errors=True)
    elif not built.exists():
        classes = folder / "classes"
        sources = sorted((folder / "source" / "tests" / "java").glob("*.java"))
        command = ["javac", "-nowarn", "-cp", f"{jars}/*", "-d", str(classes), *map(str, sources)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        script = classes / "run-class.sh"
        script.write_text(f'#!/bin/sh\nexec java -cp "{jars}/*:{built}" "$@"\n')
        script.chmod(0o755)
        classes.rename(built)


def lacks_order(source: Path) -> bool:
    """Return whether the map in librdkafka's tests has an invalid order."""
    path = source / MAP_OF_THEIRS
    text = path.read_text() if path.exists() else ""
    return NO_ORDER in text and AN_ORDER not in text


def mend(source: Path) -> None:
    """Repair the order of the map in librdkafka's tests if it is invalid."""
    if lacks_order(source):
        path = source / MAP_OF_THEIRS
        path.write_text(path.read_text().replace(NO_ORDER, AN_ORDER))


def _build_tests(folder: Path) -> None:
    built = (folder / "version").exists() and (folder / JSON_PACKAGE).exists()
    if built and not lacks_order(folder / "source"):
        return
    folder.mkdir(parents=True, exist_ok=True)
    unavailable = folder / "unavailable"
    for path in (unavailable, folder / "version"):
        path.unlink(missing_ok=True)
    for directory in ("source", JSON_PACKAGE):
        shutil.rmtree(folder / directory, ignore_errors=True)
    source = _fetch(folder)
    if source is None:
        unavailable.write_text("the apt sources of this machine gave no source package of librdkafka")
        return
    mend(source)
    jobs = f"-j{os.cpu_count() or 1}"
    # Include the headers as system headers, because the configure check treats every warning as an error.
    environment = {**os.environ, "CPPFLAGS": f"-isystem {folder / JSON_PACKAGE / 'include'}"}
    for command in (["./configure"], ["make", jobs, "libs"], ["make", "-C", "tests", jobs, "build"]):
        # Nothing that these commands print may be mistaken for an answer.
        subprocess.run(command, cwd=source, env=environment, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    version = source.name.removeprefix(f"{PACKAGE}-")
    source.rename(folder / "source")
    (folder / "version").write_text(version)


def _fetch(folder: Path) -> Path | None:
    """Fetch and unpack the source package. Return None if apt's sources lack the package, and raise SystemExit if they
    do not respond.

    apt gets lists, cache and sources of its own. The sources are copies of the machine's, for source packages.
    """
    with tempfile.TemporaryDirectory(dir=folder) as private_name:
        private = Path(private_name)
        for directory in ("lists/partial", "cache/archives/partial", "sources"):
            (private / directory).mkdir(parents=True)
        for path in _apt_sources():
            (private / "sources" / path.name).write_text(_asking_for_source(path.read_text(), path.suffix))
        configuration = private / "apt.conf"
        configuration.write_text(
            f'Dir::State::lists "{private}/lists";\n'
            f'Dir::Cache "{private}/cache";\n'
            'Dir::Etc::sourcelist "/dev/null";\n'
            f'Dir::Etc::sourceparts "{private}/sources";\n'
            'APT::Sandbox::User "root";\n'
            # Disable the hooks that the machine runs after an update of its own lists.
            "#clear APT::Update::Post-Invoke;\n"
            "#clear APT::Update::Post-Invoke-Success;\n"
        )
        # The source that failed need not be the source that has the package.
        unanswered = _apt_get(["-o", "APT::Update::Error-Mode=any", "update"], configuration, private)
        if _apt_get(["source", PACKAGE], configuration, private):
            if unanswered:
                raise SystemExit("apt could not ask its sources for librdkafka's")
            return None
        (folder / JSON_PACKAGE).mkdir()
        if not _apt_get(["source", JSON_PACKAGE], configuration, private):
            for headers in private.glob(f"{JSON_PACKAGE}-*/include"):
                headers.rename(folder / JSON_PACKAGE / "include")
        unpacked = next((path for path in private.glob(f"{PACKAGE}-*") if path.is_dir()), None)
        return None if unpacked is None else unpacked.rename(folder / unpacked.name)


def _apt_get(arguments: list[str], configuration: Path, cwd: Path) -> int:
    command = ["apt-get", f"--config-file={configuration}", "-q", *arguments]
    return subprocess.run(command, cwd=cwd, check=False, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode


def _apt_sources() -> list[Path]:
    said = subprocess.run(
        ["apt-config", "shell", "LIST", "Dir::Etc::sourcelist/f", "PARTS", "Dir::Etc::sourceparts/d"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    places = dict(re.findall(r"^(LIST|PARTS)='(.*)'$", said, re.MULTILINE))
    paths = [Path(places["LIST"])] if "LIST" in places else []
    if "PARTS" in places:
        paths += sorted(Path(places["PARTS"]).glob("*"))
    return [path for path in paths if path.suffix in (".list", ".sources") and path.is_file()]


def _asking_for_source(text: str, suffix: str) -> str:
    if suffix == ".sources":
        return re.sub(r"^Types:.*$", "Types: deb-src", text, flags=re.MULTILINE)
    return re.sub(r"^deb(?=\s)", "deb-src", text, flags=re.MULTILINE)


def answer(scenario: str, outcome: str, seconds: float, detail: str) -> None:
    row = {"scenario": f"upstream.{scenario}", "outcome": outcome, "seconds": round(seconds, 3), "detail": detail}
    sys.stdout.write(json.dumps(row) + "\n")  # Print the line in one write, because other threads also print lines.
    sys.stdout.flush()


def run(folder: Path) -> None:
    unavailable = folder / "unavailable"
    if unavailable.exists():
        answer("allow-list", "skipped", 0.0, f"left out: {unavailable.read_text()}")
        return
    source, allowed, version = folder / "source", AllowList.load(), (folder / "version").read_text()
    there = tests_of(source)
    running = [choice for choice in allowed.run if choice.test in there]
    faults = allowed.faults(version, there)
    counts = f"{len({choice.test for choice in running})} of {len(there)} tests run; built with {_built_with(source)}"
    answer("allow-list", "failed" if faults else "passed", 0.0, "; ".join(faults) or counts)

    wanted = [part.removeprefix("upstream.") for part in os.environ.get("COMPAT_SCENARIOS", "").split(",") if part]
    listed = {choice.test for choice in (*allowed.run, *allowed.left_out)}
    reasons = {Choice(name): f"not in the allow list, which is that of {allowed.version}" for name in there}
    reasons = {choice: reason for choice, reason in reasons.items() if choice.test not in listed}
    kafka = os.environ.get("COMPAT_BROKER") == "kafka"
    for choice, reason in {**allowed.left_out, **reasons}.items():
        if choice.test in there and (not wanted or choice.scenario in wanted):
            answer(choice.scenario, "unserved" if choice in allowed.unserved and not kafka else "skipped", 0.0, reason)
    newer = _newer_library()
    # Tests with the same number and scenario run together.
    runs: dict[tuple[str, str, str, bool], list[Choice]] = defaultdict(list)
    for choice in running:
        if wanted and choice.scenario not in wanted:
            continue
        if choice in allowed.newer and newer is None:
            answer(choice.scenario, "skipped", 0.0, "confluent-kafka brings no librdkafka of its own here")
            continue
        if choice in allowed.with_java and not (folder / JAVA).exists():
            answer(choice.scenario, "skipped", 0.0, "starts a Java producer, and there is no Java")
            continue
        test = there[choice.test]
        scenario = RACKS if choice.test in IN_RACKS else test.scenario
        runs[test.number, scenario, choice.part, choice in allowed.newer].append(choice)
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # The path is relative to a test's own folder, from which the tests read a schema.
        (work / "src").symlink_to(source / "src")
        bootstraps = {"default": os.environ["COMPAT_BOOTSTRAP"]}
        runner = Runner(source, work, folder / JAVA, newer, bootstraps, allowed)
        if not kafka and any(choice.test in SECURED for choices in runs.values() for choice in choices):
            runner.asking.append(stack.enter_context(secured_gateway()))
        kafka_topics.install(runner.kafka)
        kafka_acls.install(runner.kafka)
        wanted_brokers = {runner.broker_of(scenario, choices) for (_, scenario, _, _), choices in runs.items()}
        for name in sorted(wanted_brokers & SETTINGS_OF.keys()):
            data = stack.enter_context(short_directory())
            broker = APACHE_KAFKA if kafka else SLUICE
            node = broker.process(data, {**SETTINGS, **SETTINGS_OF[name]})
            stack.callback(node.close)
            node.start()
            runner.bootstraps[name] = node.bootstrap
        if any(scenario == RACKS for _, scenario, _, _ in runs):
            runner.bootstraps[RACKS] = stack.enter_context(racked(RACKS_SETTINGS, kafka=kafka))
        limits_s = {key: sum(allowed.limit_of(choice) for choice in choices) for key, choices in runs.items()}
        pool = stack.enter_context(ThreadPoolExecutor(PARALLEL))
        # Start the longest run first, so that it does not run alone at the end.
        order = sorted(runs, key=lambda key: -limits_s[key])
        for future in [pool.submit(runner.run, *key, runs[key], limits_s[key]) for key in order]:
            future.result()


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs librdkafka's test program. `java` is the folder of its Java classes, if any. `newer` is a library that
    replaces its own. `bootstraps` holds the gateways' addresses by name.
    """

    source: Path
    work: Path
    java: Path
    newer: Path | None
    bootstraps: dict[str, str]
    allowed: AllowList
    asking: list[SecuredGateway] = field(default_factory=list)
    """The gateway with authentication, None if no test needs it."""

    def broker_of(self, scenario: str, choices: Sequence[Choice]) -> str:
        """Return the name of the gateway on which these tests run."""
        return AUTHORIZER if self.allowed.with_authorizer.issuperset(choices) else scenario

    @property
    def tests(self) -> Path:
        return self.source / "tests"

    @property
    def kafka(self) -> Path:
        return self.work / "kafka"

    def libraries(self, *, newer: bool) -> str:
        """Return the LD_LIBRARY_PATH with which the test program finds its library."""
        folders = [self.source / "src", self.source / "src-cpp"]
        if newer and self.newer is not None:
            folder = Path(tempfile.mkdtemp(dir=self.work))
            (folder / "librdkafka.so.1").symlink_to(self.newer)
            folders.insert(0, folder)
        return ":".join(map(str, folders))

    def run(
        self, number: str, scenario: str, part: str, newer: bool, choices: Sequence[Choice], limit_s: float
    ) -> None:
        """Run the chosen tests of one number in a separate process, and report their outcomes."""
        directory = Path(tempfile.mkdtemp(dir=self.work))
        configuration = directory / "test.conf"
        bootstrap = self.bootstraps[self.broker_of(scenario, choices)]
        configuration.write_text(f"bootstrap.servers={bootstrap}\ntest.topic.random=true\n")
        environment = {**os.environ, "RDKAFKA_TEST_CONF": str(configuration), "TESTS": number}
        if choices[0].test in SECURED and self.asking:
            with configuration.open("a") as more:
                more.write(SECURED[choices[0].test](self.asking[0]))
            environment |= self.asking[0].environment
        environment["LD_LIBRARY_PATH"] = self.libraries(newer=newer)
        environment["TEST_KAFKA_VERSION"] = self.allowed.kafka_versions.get(choices[0].test, KAFKA_VERSION)
        if part:
            environment["SUBTESTS"] = part
        code = "".join(path.read_text() for path in self.tests.glob(f"{number}-*.c*"))
        if any(call in code for call in ("test_kafka_topics(", "test_kafka_cmd(", "test_run_java(")):
            environment |= {"KAFKA_PATH": str(self.kafka), "BROKERS": bootstrap}
        if "test_run_java(" in code:
            # The program lets `make` compile the Java classes, and starts them if it finds them in its folder.
            (directory / "Makefile").write_text("java:\n.PHONY: java\n")
            (directory / "java").symlink_to(self.java)
        # -L excludes the tests of this number that need no broker.
        command = [str(self.tests / "test-runner"), "-p1", "-L", "-s", "default" if scenario == RACKS else scenario]
        output: list[str] = []
        errors = directory / "stderr"
        started = time.monotonic()
        ended = run_limited(
            command, cwd=directory, environment=environment, limit_s=limit_s, stderr=errors, on_line=output.append
        )
        seconds = time.monotonic() - started
        lines = [_COLOUR.sub("", line) for line in (*errors.read_text(errors="replace").splitlines(), *output)]
        sys.stderr.write("\n".join(lines) + "\n")
        states = {match[1]: match for line in lines if (match := _SUMMARY.match(line))}
        for choice in choices:
            state = states.get(choice.test)
            outcome = _OUTCOMES.get(state[2], "failed") if state else "failed"
            if ended.timed_out:
                outcome, detail = "failed", f"killed after its limit of {limit_s:.0f} s: {_last(lines)}"
            elif state is None:
                detail = f"ended with {ended.returncode}: {_failure(lines, '') or _last(lines)}"
            elif outcome == "failed":
                detail = _failure(lines, choice.test) or state[4] or _last(lines)
            elif outcome == "skipped":
                detail = state[4] or "skips itself"
            elif ended.returncode and len(choices) == 1:
                outcome, detail = "failed", f"ended with {ended.returncode}: {_failure(lines, '') or _last(lines)}"
            elif part and not any(part in name for name in _matches(_SUBTEST_PASSED, lines)):
                outcome, detail = "failed", "none of its subtests has this in its name"
            else:
                skipped = _matches(_SUBTEST_SKIPPED, lines)
                detail = f"skips of its own: {', '.join(skipped)}" if skipped else ""
                detail = detail or (f"with librdkafka {confluent_kafka.libversion()[0]}" if newer else "")
            answer(choice.scenario, outcome, float(state[3]) if state else seconds, detail)


def _newer_library() -> Path | None:
    """Return the librdkafka that is part of confluent-kafka, or None if confluent-kafka was built with another one."""
    folder = Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs"
    return next(folder.glob("librdkafka-*.so*"), None)


def _matches(pattern: re.Pattern[str], lines: Sequence[str]) -> list[str]:
    return sorted({match[1] for line in lines if (match := pattern.search(line))})


def _failure(lines: Sequence[str], test: str) -> str:
    """Return the place and the message of the test's first failure."""
    for line, reason in itertools.pairwise(lines):
        match = _FAILED.match(line)
        if match and match[1].startswith(test):
            return f"{reason.strip()} ({match[1].removeprefix(test).strip()} {match[2]})"[:DETAIL_CHARACTERS]
    return ""


def _last(lines: Sequence[str]) -> str:
    said = [line.strip() for line in lines if line.strip() and not line.startswith(("|", "#"))]
    return " | ".join(said[-DETAIL_LINES:])[-DETAIL_CHARACTERS:]


def _built_with(source: Path) -> str:
    found = re.search(r'BUILT_WITH "([^"]*)"', (source / "config.h").read_text())
    return found[1] if found else "unknown"


def version(folder: Path) -> str:
    path = folder / "version"
    return f"{path.read_text()} of Debian's source package" if path.exists() else "unknown"


def main(arguments: list[str]) -> None:
    # Only answers may appear on stdout, but Postgres prints a log when it starts.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    step, folder = arguments
    if step == "build":
        build(Path(folder))
    elif step == "run":
        run(Path(folder))
    elif step == "version":
        print(version(Path(folder)))
    else:
        raise SystemExit(f"no step {step}")


if __name__ == "__main__":
    main(sys.argv[1:])
