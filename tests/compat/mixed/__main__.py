"""Groups of mixed languages: 6 → 3+3 → 2+2+2 partitions and back, cooperative-sticky. Each language leads once, by
joining first. In further scenarios members of one language change to the consumer protocol one by one, and back.

The leader assigns with its own language's sticky assignor, from the ownership that the others claim. Retained
partitions stay unrevoked only if all clients parse each other's bytes in the same way, because the gateway forwards
these bytes without parsing them.
"""

from __future__ import annotations

import subprocess
import sys

from tests.compat import suites
from tests.compat.confluent.client import UNIFORM, Confluent
from tests.compat.python.child import ProgramChild
from tests.compat.python.options import MemberOptions
from tests.compat.python.program import main
from tests.compat.python.scenario import SCENARIOS, Run, all_of, scenario

SUITES = {"java": "java4", "librdkafka": "confluent", "kafka-python": "kafka_python"}
PARTITIONS = 6
ROLLING_MEMBERS = 2
VERSION_SECONDS = 60.0


def _suite(language: str) -> suites.Suite:
    return suites.load(suites.FOLDER / SUITES[language])


def _mixed(run: Run, languages: list[str]) -> None:
    topic, group = run.topic(PARTITIONS), run.group()
    journal, view = run.journal(topic, PARTITIONS, cooperative=True)
    feed = run.feed(topic, range(PARTITIONS))
    members: dict[str, ProgramChild] = {}
    for language in languages:
        suite = _suite(language)
        options = MemberOptions(language, group, "cooperative-sticky", (topic,))
        command = suite.command(suite.member)
        members[language] = run.keep(ProgramChild(command, run.client.bootstrap, options, journal))
        view.wait_settled(members, all_of(topic, PARTITIONS))
        view.wait_more(3 * PARTITIONS)
    for language in languages[:-1]:
        members.pop(language).stop()
        view.wait_settled(members, all_of(topic, PARTITIONS))
        view.wait_more(3 * PARTITIONS)
    feed.stop()
    view.wait_caught_up()
    members[languages[-1]].stop()


def _register(languages: list[str]) -> None:
    scenario(f"groups.mixed-languages.{languages[0]}-first")(lambda run: _mixed(run, languages))


def _migrate(run: Run, language: str, assignor: str) -> None:
    """Upgrade an application by a rolling restart from the classic to the consumer protocol, and back, while records
    flow.
    """
    topic, group = run.topic(PARTITIONS), run.group()
    journal, view = run.journal(topic, PARTITIONS, cooperative=assignor == "cooperative-sticky")
    feed = run.feed(topic, range(PARTITIONS))
    suite = _suite(language)
    members: dict[str, ProgramChild] = {}

    def start(name: str, spoken: str) -> None:
        options = MemberOptions(name, group, spoken, (topic,))
        members[name] = run.keep(ProgramChild(suite.command(suite.member), run.client.bootstrap, options, journal))
        view.wait_settled(members, all_of(topic, PARTITIONS))
        view.wait_more(3 * PARTITIONS)

    for number in range(ROLLING_MEMBERS):
        start(f"classic-{number}", assignor)
    for generation, spoken in (("new", UNIFORM), ("back", assignor)):
        for number in range(ROLLING_MEMBERS):
            members.pop(next(iter(members))).stop()
            start(f"{generation}-{number}", spoken)
    feed.stop()
    view.wait_caught_up()
    for member in members.values():
        member.stop()


def _register_migration(language: str, assignor: str) -> None:
    scenario(f"groups.migration.{language}.{assignor}")(lambda run: _migrate(run, language, assignor))


class Mixed(Confluent):
    """The client of this suite. librdkafka creates topics and records. The version lists all clients."""

    @staticmethod
    def version() -> str:
        found: list[str] = []
        for language in SUITES:
            suite = _suite(language)
            command = suite.command(suite.version)
            said = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_SECONDS, check=True)
            found.append(f"{suite.client} {said.stdout.strip()}")
        return "; ".join(found)


if __name__ == "__main__":
    SCENARIOS.clear()
    names = list(SUITES)
    for first in range(len(names)):
        _register(names[first:] + names[:first])
    for language in ("java", "librdkafka"):
        for assignor in ("range", "cooperative-sticky"):
            _register_migration(language, assignor)
    sys.exit(main("mixed", "tests.compat.mixed", Mixed, sys.argv[1:]))
