"""Run the tests that a Go client carries in its module: `python -m tests.compat.upstream.go_tests STEP NAME BUILD`.

The one idea: this repository keeps only names of the tests. The module comes from the registry at the version that the
client's own suite pins, and is compiled in the build folder. The tests listed in `<NAME>.allow.toml` run, and the file
says for every other test why it does not. A test that the file does not know is a failure, and so is a name that is no
test. Tests that run Kafka's Java tools run only if there is a Java.

STEP is build, run or version. Each top-level test becomes the scenario `upstream.<test>`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tests.compat.brokers import APACHE_KAFKA, BrokerProcess
from tests.compat.upstream import compose, java_tools
from tests.compat.upstream.outside import door
from tests.compat.upstream.secured import PASSWORD, USER, secured_gateway
from tests.compat.upstream.toxiproxy import FIRST_PORT, toxiproxy
from tests.gateway_process import GatewayProcess
from tests.kafka.process import KafkaProcess
from tests.postgres import EMPTY, databases, short_directory

FOLDER = Path(__file__).parent
TOOLS = "kafka-tools"
LIMIT_SECONDS = 840
DETAIL_LINES = 8
DETAIL_CHARACTERS = 600
SARAMA_BROKERS = 5
PARALLEL = 2
"""Number of tests that may run in parallel, among those that declare that they can. Each test of kfake has a broker of
its own.
"""
WITH_SCRAM = frozenset({"TestSCRAMAuth", "TestSCRAMAuthBadCredentials"})
"""Tests of kgo that need a broker with authentication."""
KAFKA_VERSION = "4.1.0"
# These values equal those of the environment that Sarama's tests start themselves.
SARAMA_SETTINGS = {
    "group.initial.rebalance.delay.ms": "0",
    "auto.create.topics.enable": "false",
    "default.replication.factor": "2",
    "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
}
SARAMA_REPLICATION = {"offsets.topic.replication.factor": "2", "transaction.state.log.replication.factor": "2"}
"""Replication factor of Apache Kafka's internal topics."""


@dataclass(frozen=True, slots=True)
class Module:
    """One module. `pinned` is the folder whose go.mod pins it; `files` are those of `package` that contain tests.

    `stand_in` is a folder of our own. Its files replace the module's package, because some tests call that package
    instead of a broker.
    """

    path: str
    pinned: str
    package: str
    files: str
    tags: str
    stand_in: str = ""


MODULES = {
    "sarama": Module("github.com/IBM/sarama", "sarama", ".", "functional_*_test.go", "functional"),
    "franz_go": Module("github.com/twmb/franz-go", "franz_go", "pkg/kgo", "*_test.go", ""),
    "kfake": Module(
        "github.com/twmb/franz-go/pkg/kfake", "upstream_kfake", "kafka_tests", "*_test.go", "", "upstream_kfake/kfake"
    ),
}


@dataclass(frozen=True, slots=True)
class AllowList:
    """The list of tests.

    The tests in `with_java` are part of `run` and need Kafka's Java tools. `left_out` gives the reason of each test
    that does not run. Tests in `unserved` would run if a gateway served what they need. `oracle` names those of the
    unserved tests that run against Apache Kafka, because Kafka serves them as it is started here.
    """

    run: tuple[str, ...]
    with_java: frozenset[str]
    left_out: dict[str, str]
    unserved: frozenset[str]
    oracle: frozenset[str]

    @classmethod
    def load(cls, name: str) -> AllowList:
        entries: dict[str, Any] = tomllib.loads((FOLDER / f"{name}.allow.toml").read_text())
        left_out = {test: str(part["reason"]) for part in entries["left_out"] for test in part["tests"]}
        unserved, oracle = (
            frozenset(test for part in entries["left_out"] if part.get(key) for test in part["tests"])
            for key in ("unserved", "oracle")
        )
        with_java: list[str] = entries.get("run_with_java", [])
        return cls((*entries["run"], *with_java), frozenset(with_java), left_out, unserved, oracle)


def version(module: Module) -> str:
    go_mod = (FOLDER.parent / module.pinned / "go.mod").read_text()
    match = re.search(rf"{re.escape(module.path)} (v\S+)", go_mod)
    if match is None:
        raise SystemExit(f"{module.pinned}/go.mod does not pin {module.path}")
    return match[1]


def build(name: str, folder: Path) -> None:
    """Copy the module out of the module cache, which is read-only, and compile its tests, once per version."""
    module = MODULES[name]
    if AllowList.load(name).with_java:
        java_tools.fetch(folder / TOOLS)
    stamp, wanted = folder / "version", version(module)
    stand_in = sorted((FOLDER.parent / module.stand_in).glob("*.go")) if module.stand_in else []
    if stand_in:
        wanted += " " + hashlib.sha256(b"".join(path.read_bytes() for path in stand_in)).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted and (folder / "tests").exists():
        return
    pinned = FOLDER.parent / module.pinned
    answer = subprocess.run(
        ["go", "mod", "download", "-json", module.path], cwd=pinned, check=True, stdout=subprocess.PIPE
    )
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(json.loads(answer.stdout)["Dir"], source, copy_function=shutil.copyfile)
    for directory in (source, *(path for path in source.rglob("*") if path.is_dir())):
        directory.chmod(0o755)
    if stand_in:
        for path in source.glob("*.go"):
            path.unlink()
        for path in stand_in:
            shutil.copyfile(path, source / path.name)
        # Build with the versions that are pinned here, under the module's own name.
        required = (pinned / "go.mod").read_text().splitlines(keepends=True)
        kept = [line for line in required if module.path not in line and not line.startswith("module ")]
        (source / "go.mod").write_text("".join([f"module {module.path}\n", *kept]))
        shutil.copyfile(pinned / "go.sum", source / "go.sum")
    command = ["go", "test", "-c", "-tags", module.tags, "-o", str(folder / "tests"), f"./{module.package}"]
    subprocess.run(command, cwd=source, check=True)
    stamp.write_text(wanted)


def answer(scenario: str, outcome: str, seconds: float, detail: str) -> None:
    row = {"scenario": f"upstream.{scenario}", "outcome": outcome, "seconds": round(seconds, 3), "detail": detail}
    sys.stdout.write(json.dumps(row) + "\n")  # Print the line in one write, because other threads also print lines.
    sys.stdout.flush()


def run(name: str, folder: Path) -> None:
    module, allowed = MODULES[name], AllowList.load(name)
    package = folder / "source" / module.package
    there = {
        test
        for path in package.glob(module.files)
        for test in re.findall(r"^func (Test\w*)\(t \*testing\.T\)", path.read_text(), re.MULTILINE)
    }
    listed = {*allowed.run, *allowed.left_out}
    faults = [f"no reason for {', '.join(sorted(there - listed))}"] if there - listed else []
    faults += [f"no such test: {', '.join(sorted(listed - there))}"] if listed - there else []
    counts = f"{len(allowed.run)} of {len(there)} tests run"
    answer("allow-list", "failed" if faults else "passed", 0.0, "; ".join(faults) or counts)
    wanted = [part.removeprefix("upstream.") for part in os.environ.get("COMPAT_SCENARIOS", "").split(",") if part]
    kafka = os.environ.get("COMPAT_BROKER") == "kafka"
    asked = (*allowed.run, *allowed.oracle) if kafka else allowed.run
    for test, reason in allowed.left_out.items():
        if test not in asked and (not wanted or test in wanted):
            answer(test, "unserved" if test in allowed.unserved and not kafka else "skipped", 0.0, reason)
    chosen = [test for test in asked if test in there and (not wanted or test in wanted)]
    tools = folder / TOOLS
    if not tools.exists():
        for test in allowed.with_java.intersection(chosen):
            chosen.remove(test)
            answer(test, "skipped", 0.0, "needs java and mvn, for Kafka's tools")
    if not chosen:
        return
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(_sarama(tools, kafka=kafka) if name == "sarama" else _ENVIRONMENTS[name]())
        if WITH_SCRAM.intersection(chosen) and not kafka:
            secured = stack.enter_context(secured_gateway())
            scram = {"KGO_TEST_SCRAM_SEEDS": secured.sasl, "KGO_TEST_SCRAM": f"{USER}:{PASSWORD}:256"}
            environment = {**environment, **scram}
        command = ["go", "tool", "test2json", "-t", str(folder / "tests"), "-test.v=test2json"]
        command += ["-test.run", f"^({'|'.join(chosen)})$", "-test.timeout", f"{LIMIT_SECONDS}s"]
        command += ["-test.parallel", str(PARALLEL)]
        process = stack.enter_context(
            subprocess.Popen(command, cwd=package, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
        )
        assert process.stdout is not None
        unanswered = _answers(process.stdout, chosen)
    for test in unanswered:
        answer(test, "failed", 0.0, "no result: the test program ended before")


def _answers(lines: Iterator[str], chosen: list[str]) -> list[str]:
    """Print results as they arrive, and return the tests without a result."""
    output: dict[str, list[str]] = defaultdict(list)
    skipped: dict[str, list[str]] = defaultdict(list)
    started = time.monotonic()
    open_tests = list(chosen)
    for line in lines:
        event: dict[str, Any] = json.loads(line)
        test, action = str(event.get("Test", "")), event["Action"]
        top, _, sub = test.partition("/")
        if action == "output":
            output[top].append(str(event["Output"]).rstrip())
            sys.stderr.write(str(event["Output"]))
        elif action == "skip" and sub:
            skipped[top].append(sub)
        elif action in ("pass", "fail", "skip") and top in open_tests and not sub:
            open_tests.remove(top)
            outcome = {"pass": "passed", "fail": "failed", "skip": "skipped"}[action]
            detail = f"skips of its own: {', '.join(skipped[top])}" if skipped[top] else ""
            if action != "pass":
                said = [text for text in output[top] if text and not text.startswith(("===", "---"))]
                detail = " | ".join(text.strip() for text in said[-DETAIL_LINES:])[-DETAIL_CHARACTERS:] or action
            answer(top, outcome, float(event.get("Elapsed", time.monotonic() - started)), detail)
    return open_tests


@contextlib.contextmanager
def _franz_go() -> Iterator[Mapping[str, str]]:
    """Use the runner's gateway. The tests send it a tenth of the records that they send to a Kafka cluster."""
    yield {
        "KGO_SEEDS": os.environ["COMPAT_BOOTSTRAP"],
        "KGO_TEST_RF": "1",
        "KGO_TEST_RECORDS": "50000",
        "KGO_TEST_MAX_TOPIC_PARTS": "7",
        "KGO_LOG_LEVEL": "none",
    }


@contextlib.contextmanager
def _kfake() -> Iterator[Mapping[str, str]]:
    with door({}, kafka=os.environ.get("COMPAT_BROKER") == "kafka") as address:
        yield {"KFAKE_DOOR": address}


_ENVIRONMENTS = {"franz_go": _franz_go, "kfake": _kfake}


@contextlib.contextmanager
def _sarama(tools: Path, *, kafka: bool) -> Iterator[Mapping[str, str]]:
    """Run five nodes, each behind a proxy. Sarama's tests count their brokers, cut their connections and stop them."""
    with contextlib.ExitStack() as stack:
        nodes: list[BrokerProcess] = []
        for node in _kafkas(stack) if kafka else _gateways(stack):
            node.start()
            stack.callback(node.close)
            nodes.append(node)
        targets = [(host, int(port)) for host, _, port in (node.bootstrap.rpartition(":") for node in nodes)]
        proxies = stack.enter_context(toxiproxy(targets))
        programs = compose.install(stack.enter_context(short_directory()), tools, KAFKA_VERSION)
        environment = {
            "KAFKA_VERSION": KAFKA_VERSION,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "COMPOSE_CONTROL": stack.enter_context(compose.control(nodes)),
            "COMPOSE_BOOTSTRAP": nodes[0].bootstrap,
        }
        # With this variable the environment counts as existing. Then tests that need Kafka's tools skip themselves.
        yield environment if tools.exists() else {**environment, "TOXIPROXY_ADDR": proxies}


def _sarama_settings(number: int) -> dict[str, str]:
    """Return the number and the rack that the tests expect of the node behind a port."""
    return {**SARAMA_SETTINGS, "node.id": str(number + 1), "broker.rack": str(number + 1)}


def _gateways(stack: contextlib.ExitStack) -> Iterator[BrokerProcess]:
    """Start gateways on one Postgres."""
    url = stack.enter_context(databases()).create(EMPTY)
    for number in range(SARAMA_BROKERS):
        yield GatewayProcess(
            stack.enter_context(short_directory()),
            database_url=url,
            settings=_sarama_settings(number),
            environment={"SLUICE_ADVERTISE": f"127.0.0.1:{FIRST_PORT + number}"},
        )


def _kafkas(stack: contextlib.ExitStack) -> Iterator[BrokerProcess]:
    """Start brokers with a separate controller, because the tests may stop any of the brokers."""
    APACHE_KAFKA.version()  # This downloads Kafka's jars.
    controller = KafkaProcess(stack.enter_context(short_directory()), settings={}, role="controller")
    stack.callback(controller.close)
    controller.start()
    for number in range(SARAMA_BROKERS):
        yield KafkaProcess(
            stack.enter_context(short_directory()),
            settings={**_sarama_settings(number), **SARAMA_REPLICATION},
            of=controller,
            advertise=f"127.0.0.1:{FIRST_PORT + number}",
        )


def main(arguments: list[str]) -> None:
    # Only answers may appear on stdout, but Postgres prints a log when it starts.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    step, name, folder = arguments
    if step == "build":
        build(name, Path(folder))
    elif step == "run":
        run(name, Path(folder))
    elif step == "version":
        print(version(MODULES[name]))
    else:
        raise SystemExit(f"no step {step}")


if __name__ == "__main__":
    main(sys.argv[1:])
