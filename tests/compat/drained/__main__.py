"""Stock clients of each language take both roles in a drained handoff, in which the old owner commits before the
partition moves.

`to-…`: librdkafka is the source, and commits when a scenario finishes its work. The target is in the named language. It
receives no partition before that commit, and continues at the committed offset. `from-…`: the source is in the named
language and the target is librdkafka. A Java source commits late, by auto-commit. `among-…`: both are in the named
language and commit as their default settings say. No record is delivered to two members, and no member waits for the
handoff's deadline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException

from tests.clients.workers import set_of_group
from tests.closing import close
from tests.compat import suites
from tests.compat.confluent.client import UNIFORM, Confluent, ConfluentMember
from tests.compat.python.child import CHILD_SECONDS, Child, ProgramChild
from tests.compat.python.client import UnsupportedError
from tests.compat.python.groups import SERVER_SIDE
from tests.compat.python.journal import WAIT_SECONDS, Journal, View
from tests.compat.python.options import MemberOptions
from tests.compat.python.program import main
from tests.compat.python.scenario import SCENARIOS, Run, all_of, scenario

PARTITIONS = 4
MOVING = PARTITIONS // 2
ROUNDS = 20
HANDOFF_MS = 300_000
"""How long a handoff may wait. It is longer than a scenario, so that a slow machine does not force a handoff. `_forced`
counts forced handoffs.
"""
SCRAPE_SECONDS = 60.0
VERSION_SECONDS = 60.0
BETWEEN_GENERATIONS = frozenset(
    {KafkaError.REBALANCE_IN_PROGRESS, KafkaError.ILLEGAL_GENERATION, KafkaError.STALE_MEMBER_EPOCH}
)
"""Errors after which a commit is repeated, because the work is done even if another member owns the
partition by then.
"""
EAGER, COOPERATIVE, NEWEST = "range", "cooperative-sticky", SERVER_SIDE


@dataclass(frozen=True, slots=True)
class Language:
    """A language of members. `kind` says how a member's options reach its program: by variables, or as JSON."""

    suite: str
    kind: str
    assignors: tuple[str, ...]
    beside_librdkafka: bool = True
    """True if one of the language's assignors has the same name as one of librdkafka's."""


LANGUAGES: Mapping[str, Language] = {
    "java": Language("java4", "variables", (EAGER, COOPERATIVE, NEWEST)),
    "kafka-python": Language("kafka_python", "variables", (EAGER, COOPERATIVE)),
    "aiokafka": Language("aiokafka", "variables", (EAGER,)),
    "franz-go": Language("franz_go", "go", (EAGER, COOPERATIVE, NEWEST)),
    "sarama": Language("sarama", "go", (EAGER,)),
    "kafkajs": Language("kafkajs", "node", ("roundrobin",), beside_librdkafka=False),
    "platformatic": Language("platformatic", "node", ("roundrobin",), beside_librdkafka=False),
}


# --- members ----------------------------------------------------------------------------------------------------------


class JsonChild(Child):
    """A program that receives its options as JSON. The Go program reports on stdout, and ends when
    its stdin is closed.
    """

    def __init__(self, kind: str, command: Sequence[str], bootstrap: str, options: MemberOptions, journal: Journal):
        self.name, self.journal, self._kind = options.name, journal, kind
        asked: dict[str, object] = {
            "name": options.name,
            "group": options.group,
            "topics": list(options.topics),
            "assignor": options.assignor,
            "assignors": [options.assignor],
            "commit": options.commit,
            "journal": str(journal.path),
        }
        environment = {**os.environ, "COMPAT_BOOTSTRAP": bootstrap, "COMPAT_MEMBER_OPTIONS": json.dumps(asked)}
        with journal.path.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=log if kind == "go" else sys.stderr
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._process

    def stop(self) -> None:
        if self._kind == "go":
            assert self._process.stdin is not None
            self._process.stdin.close()
        else:
            self._process.terminate()
        assert self._process.wait(CHILD_SECONDS) == 0, f"{self.name} ended with {self._process.returncode}"
        if self._kind == "go":
            self.journal.closed(self.name)


class Pooled(ConfluentMember):
    """A librdkafka member with a pool of workers. `finish` commits every record that it received since the last commit,
    even if another member owns the partition by then."""

    def open(self) -> None:
        self.done: dict[tuple[str, int], int] = {}
        self._due, self._finished = threading.Event(), threading.Event()
        super().open()

    def processed(self, topic: str, partition: int, offset: int) -> None:
        self.done[topic, partition] = max(offset + 1, self.done.get((topic, partition), 0))
        super().processed(topic, partition, offset)

    def poll_once(self) -> None:
        super().poll_once()
        if not self._due.is_set():
            return
        try:
            if self.done:
                self.commit(self.done)
        except KafkaException as refused:
            if refused.args[0].code() not in BETWEEN_GENERATIONS:
                raise
        else:
            # A second commit of the same records would overwrite what another member has committed since.
            self.done.clear()
            self._due.clear()
            self._finished.set()

    def finish(self) -> None:
        self._finished.clear()
        self._due.set()
        assert self._finished.wait(WAIT_SECONDS), "not committed"

    def close(self) -> None:
        close(self.consumer, self.poll_once)


def _suite(language: str) -> suites.Suite:
    return suites.load(suites.FOLDER / LANGUAGES[language].suite)


def _spawn(run: Run, language: str, options: MemberOptions, journal: Journal) -> Child:
    suite, kind = _suite(language), LANGUAGES[language].kind
    if kind == "variables":
        return run.keep(ProgramChild(suite.command(suite.member), run.client.bootstrap, options, journal))
    return run.keep(JsonChild(kind, suite.command(suite.run), run.client.bootstrap, options, journal))


def _librdkafka(assignor: str) -> str:
    return UNIFORM if assignor == NEWEST else assignor


# --- the gateway's metrics --------------------------------------------------------------------------------------------


def _counted(name: str) -> dict[str, float]:
    """Return the values of a counter by its one label."""
    with urllib.request.urlopen(os.environ["COMPAT_METRICS"], timeout=SCRAPE_SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line.startswith(f"sluice_{name}"))
    return {sample.partition('="')[2].strip('"}'): float(value) for sample, _, value in samples}


def _forced() -> float:
    return _counted("group_handoffs_forced_total")[""]


def _pending() -> float:
    return _counted("group_handoffs_pending")[""]


def _drained() -> float:
    return _counted("group_handoffs_total").get("drained", 0.0)


def _given_to_two(journal: Journal) -> set[tuple[str, int, int]]:
    """Return the records that were delivered to more than one member."""
    to: dict[tuple[str, int, int], set[str]] = {}
    for line in journal.path.read_text().splitlines():
        entry = json.loads(line)
        if entry["event"] == "delivered":
            to.setdefault((entry["topic"], entry["partition"], entry["offset"]), set()).add(entry["member"])
    return {record for record, members in to.items() if len(members) > 1}


# --- scenarios --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Stage:
    """A group in mode `drain` that two members will share, with its topic, records and delivery log."""

    run: Run
    assignor: str
    topic: str
    group: str
    journal: Journal
    view: View
    forced: float

    @staticmethod
    def of(run: Run, assignor: str, *, redelivery_allowed: bool) -> Stage:
        if not os.environ["COMPAT_METRICS"]:
            raise UnsupportedError("another broker knows no group.handoff.mode")
        topic, group = run.topic(PARTITIONS), run.group()
        set_of_group(run.client.bootstrap, group, group_handoff_mode="drain", group_handoff_timeout_ms=str(HANDOFF_MS))
        cooperative = assignor in (COOPERATIVE, NEWEST)
        journal, view = run.journal(topic, PARTITIONS, cooperative=cooperative, redelivery_allowed=redelivery_allowed)
        return Stage(run, assignor, topic, group, journal, view, _forced())

    def options(self, name: str, commit: str = "auto", *, assignor: str | None = None) -> MemberOptions:
        return MemberOptions(name, self.group, assignor or self.assignor, (self.topic,), commit=commit)

    def pooled(self, name: str) -> Pooled:
        options = self.options(name, "late", assignor=_librdkafka(self.assignor))
        member = Pooled(options, self.journal, self.view.failures, self.run.client.bootstrap)
        member.start()
        return member

    def read(self) -> None:
        self.run.produce(self.topic, range(PARTITIONS), ROUNDS)
        self.view.wait_caught_up()

    def settle(self, *names: str) -> None:
        self.view.wait_settled(names, all_of(self.topic, PARTITIONS))
        self.view.wait_for(lambda: _pending() == 0, "somebody waits still")

    def judge(self) -> None:
        assert _forced() == self.forced, f"forced: {_counted('group_handoffs_total')}"
        twice = _given_to_two(self.journal)
        assert not twice, f"given to two members: {sorted(twice)[:5]}"


def _to(run: Run, language: str, assignor: str) -> None:
    stage = Stage.of(run, assignor, redelivery_allowed=True)
    source = stage.pooled("source")
    try:
        stage.read()
        target = _spawn(run, language, stage.options("target"), stage.journal)
        stage.view.wait_for(lambda: _pending() == MOVING, "nobody waits")
        drained = _drained()
        stage.view.refresh()
        assert not stage.view.delivered_by["target"]
        source.finish()
        stage.settle("source", "target")
        stage.read()
        assert _drained() > drained
        target.stop()
        source.finish()
    finally:
        source.stop()
    stage.judge()


def _from(run: Run, language: str, assignor: str) -> None:
    stage, drained = Stage.of(run, assignor, redelivery_allowed=True), _drained()
    source = _spawn(run, language, stage.options("source", "late"), stage.journal)
    stage.read()
    target = stage.pooled("target")
    try:
        stage.settle("source", "target")
        stage.read()
        assert _drained() > drained, "it was not waited for"
        target.finish()
    finally:
        target.stop()
    source.stop()
    stage.judge()


def _among(run: Run, language: str, assignor: str) -> None:
    stage = Stage.of(run, assignor, redelivery_allowed=False)
    members: list[Child] = []
    for name in ("first", "second"):
        members.append(_spawn(run, language, stage.options(name), stage.journal))
        stage.settle(*(member.name for member in members))
        stage.read()
    for member in members:
        member.stop()
    stage.judge()


class Drained(Confluent):
    """The client of this suite. librdkafka creates topics and records. The version lists all clients."""

    @staticmethod
    def version() -> str:
        found: list[str] = []
        for language in LANGUAGES:
            suite = _suite(language)
            command = suite.command(suite.version)
            said = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_SECONDS, check=True)
            found.append(f"{suite.client} {said.stdout.strip()}")
        return "; ".join(found)


def _register(role: str, language: str, assignor: str) -> None:
    body = {"to": _to, "from": _from, "among": _among}[role]
    scenario(f"groups.drained.{role}-{language}.{assignor}")(lambda run: body(run, language, assignor))


if __name__ == "__main__":
    SCENARIOS.clear()
    for language, known in LANGUAGES.items():
        for assignor in known.assignors:
            if known.beside_librdkafka:
                _register("to", language, assignor)
            _register("among", language, assignor)
    for assignor in LANGUAGES["java"].assignors:
        _register("from", "java", assignor)
    sys.exit(main("drained", "tests.compat.drained", Drained, sys.argv[1:]))
