"""Write the report card: docs/compatibility.json with everything, docs/compatibility.md for a reader who chooses a
client.

The one idea: the Markdown is derived from the JSON alone. A run of single suites replaces only their part of the card.
Each part has its own date and gateway version.

docs/oracle.json holds Apache Kafka's answers to the same suites, with its version and date. The suites run against
Kafka once per release (`make oracle`). The card shows Kafka's answers beside ours. A scenario that Kafka passes and we
do not is red, for any reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.compat import scenarios

Outcome = Literal["passed", "failed", "unserved", "skipped", "unasked"]
"""Outcome of a scenario. `unasked` means that this run had no time for the scenario, and says nothing about the
gateway.
"""
WHOLE_SUITE = "(suite)"
"""Name of the row for a failure of the whole suite."""
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "unserved", "skipped", "unasked")

FOLDER = Path(__file__).parents[2] / "docs"
JSON_NAME = "compatibility.json"
MARKDOWN_NAME = "compatibility.md"
ORACLE_NAME = "oracle.json"
MARKS = {"passed": "✓", "failed": "**✗**", "unserved": "**○**", "skipped": "–", "unasked": "?"}


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one scenario. `deliveries` is the number of deliveries that the checker found in its log."""

    scenario: str
    outcome: Outcome
    seconds: float
    detail: str = ""
    deliveries: dict[str, float] | None = None


@dataclass(slots=True)
class SuiteResult:
    """Result of one suite. If the suite did not run, `left_out` gives the reason."""

    name: str
    client: str
    language: str
    date: str
    gateway: str
    version: str = "unknown"
    left_out: str = ""
    seconds: float = 0.0
    build_seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    api_versions: dict[str, list[int]] = field(default_factory=dict)


def suite_json(result: SuiteResult) -> str:
    return json.dumps(_entry(result), indent=1, ensure_ascii=False) + "\n"


def write(folder: Path, results: Sequence[SuiteResult], *, keep_others: bool, keep_rows: bool = False) -> None:
    """Write both files. With `keep_others`, suites on the existing card that did not run stay on the card. With
    `keep_rows`, earlier answers to scenarios that did not run stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / JSON_NAME
    entries = {result.name: _entry(result) for result in results}
    if keep_others and path.exists():
        earlier = {entry["name"]: entry for entry in json.loads(path.read_text())["suites"]}
        if keep_rows:
            for name, entry in entries.items():
                _keep_rows(entry, earlier.get(name, {}))
        entries = {**earlier, **entries}
    card = {"suites": [entries[name] for name in sorted(entries)], "oracle": _oracle()}
    path.write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n")
    (folder / MARKDOWN_NAME).write_text(markdown(card))


def _keep_rows(entry: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Add rows of the earlier card for scenarios that have no new answer, neither as a whole nor in parts
    (`scenario[part]`). `since` becomes the date of the oldest row, and `gateways` lists all gateway versions of the
    rows.
    """
    asked = {row["scenario"] for row in entry["rows"]}
    asked |= {scenario.partition("[")[0] for scenario in asked}
    kept = [row for row in earlier.get("rows", ()) if row["scenario"] not in asked]
    if kept:
        entry["since"] = earlier.get("since", earlier["date"])
        entry["gateways"] = sorted({entry["gateway"], *earlier.get("gateways", (earlier["gateway"],))})
    entry["rows"] = sorted([*kept, *entry["rows"]], key=lambda row: _order(row["scenario"]))
    entry["seconds"] = round(sum(row["seconds"] for row in entry["rows"]), 1)
    for api, versions in earlier.get("api_versions", {}).items():
        entry["api_versions"][api] = sorted({*versions, *entry["api_versions"].get(api, ())})


def write_oracle(folder: Path, results: Sequence[SuiteResult], *, keep_others: bool, keep_rows: bool = False) -> None:
    """Write Apache Kafka's answers: per suite its version, the date, and the outcome of each scenario.

    With `keep_rows`, earlier answers to scenarios that did not run stay. The result of a suite that could not be built
    or ended early is not used. An existing card is updated with the new answers at once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ORACLE_NAME
    answered: dict[str, Any] = json.loads(path.read_text()) if keep_others and path.exists() else {}
    for result in results:
        if result.left_out or any(row.scenario == WHOLE_SUITE for row in result.rows):
            continue
        answers = [row for row in result.rows if row.outcome != "unasked"]
        asked = {row.scenario for row in answers}
        earlier: dict[str, Any] = answered.get(result.name, {}) if keep_rows else {}
        kept: dict[str, dict[str, str]] = {
            part: {name: said for name, said in earlier.get(part, {}).items() if name not in asked}
            for part in ("outcomes", "reasons")
        }
        since = {"since": earlier.get("since", earlier["date"])} if kept["outcomes"] else {}
        outcomes = {row.scenario: row.outcome for row in answers}
        reasons = {row.scenario: row.detail for row in answers if row.outcome != "passed" and row.detail}
        answered[result.name] = {
            "broker": result.gateway,
            "date": result.date,
            **since,
            "client": result.version,
            "outcomes": {**kept["outcomes"], **outcomes},
            "reasons": {**kept["reasons"], **reasons},
        }
    path.write_text(json.dumps(answered, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    if (folder / JSON_NAME).exists():
        write(folder, [], keep_others=True)


def _oracle() -> dict[str, Any]:
    path = FOLDER / ORACLE_NAME
    return json.loads(path.read_text()) if path.exists() else {}


def red(card: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (suite, row) of every scenario that Apache Kafka passes and the gateway does not."""
    oracle: dict[str, Any] = card.get("oracle", {})
    return [
        (suite, row)
        for suite in card["suites"]
        for row in suite["rows"]
        if row["outcome"] not in ("passed", "unasked")
        and oracle.get(suite["name"], {}).get("outcomes", {}).get(row["scenario"]) == "passed"
    ]


def _answer(answers: dict[str, Any], row: dict[str, Any]) -> Outcome | None:
    """Return Kafka's outcome, or None if the scenario did not run on Kafka. A skip that our own list demands is not an
    outcome.
    """
    said: Outcome | None = answers.get("outcomes", {}).get(row["scenario"])
    return None if said == "skipped" and row["outcome"] != "skipped" else said


def _days(entry: dict[str, Any]) -> str:
    """Return the days from the oldest to the newest answer of the suite."""
    first, last = entry.get("since", entry["date"])[:10], entry["date"][:10]
    return last if first == last else f"{first} to {last}"


def _beside_kafka(card: dict[str, Any]) -> list[str]:
    oracle: dict[str, Any] = card.get("oracle", {})
    asked = [suite for suite in card["suites"] if not suite["left_out"]]
    if not any(suite["name"] in oracle for suite in asked):
        return []
    found = red(card)
    lines = [
        "",
        "## Beside Apache Kafka",
        "",
        "`make oracle` runs the same suites against Apache Kafka. A scenario is red if Kafka passes it and Sluice does",
        "not, for any reason. If Kafka does not pass it either, the cause lies in the client or in the suite. Three",
        "columns count scenarios without a comparison. *Not asked here*: Kafka passes the scenario, and this report's",
        "run of Sluice had no time for it. *Kafka not asked*: only Sluice ran it. *Left out*: the suite skips it for",
        "both brokers, for a reason given below.",
        "",
        "| Client | Broker | Asked on | Sluice passes | Kafka passes | Red | Not asked here | Kafka not asked |"
        " Left out |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for suite in asked:
        answers: dict[str, Any] = oracle.get(suite["name"], {})
        said = [(row["outcome"], _answer(answers, row)) for row in suite["rows"]]
        shared = [(ours, theirs) for ours, theirs in said if ours != "unasked" and theirs is not None]
        reds = sum(one is suite for one, _ in found)
        cells = [
            suite["client"],
            answers.get("broker", "–"),
            _days(answers) if answers else "–",
            sum(ours == "passed" for ours, _ in shared),
            sum(theirs == "passed" for _, theirs in shared),
            f"**{reds}**" if reds else 0,
            sum(ours == "unasked" and theirs == "passed" for ours, theirs in said),
            sum(ours not in ("unasked", "skipped") and theirs is None for ours, theirs in said),
            sum(ours == "skipped" and theirs != "passed" for ours, theirs in said),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if found:
        lines += ["", "### Red", "", "| Client | Scenario | Here | Reason |", "|---|---|---|---|"]
        lines += [
            f"| {suite['client']} | {row['scenario']} | {row['outcome']} | {_cell(row['detail'])} |"
            for suite, row in found
        ]
    return lines


def reds(results: Sequence[SuiteResult]) -> list[str]:
    """Return a line for each scenario that Apache Kafka passes and these results do not."""
    found = red({"suites": [_entry(result) for result in results], "oracle": _oracle()})
    return [f"{suite['name']} {row['scenario']} {row['outcome']}: {_cell(row['detail'])}" for suite, row in found]


def _entry(result: SuiteResult) -> dict[str, Any]:
    entry = asdict(result)
    entry["seconds"] = round(result.seconds, 1)
    entry["build_seconds"] = round(result.build_seconds, 1)
    entry["rows"] = sorted(
        ({**row, "seconds": round(row["seconds"], 2)} for row in entry["rows"]), key=lambda row: _order(row["scenario"])
    )
    return entry


ON_PURPOSE = [
    "",
    "## Differences from Kafka that are intended",
    "",
    "- A topic's replication factor may exceed the number of nodes, because Postgres replicates the records. A single",
    "  node can create a topic with three replicas, and Metadata lists as many live nodes as exist. Brokers named in a",
    "  replica assignment must exist (INVALID_REPLICA_ASSIGNMENT).",
    "- A preferred leader that comes back leads at once. Kafka waits for an election or for some minutes. If no",
    "  replica is alive, another node leads, because no records are lost with the replicas. A reassignment moves no",
    "  data, so it is complete when the node responds. A node that does not lead a partition serves it all the same.",
    "- The leader epoch rises if the log has another history (a failover that lost commits). It does not rise if",
    "  another node leads, because the log is the same.",
    "- Controllers form no quorum, because Postgres keeps the metadata. One controller is enough. If no controller is",
    "  alive, brokers do its work.",
    "- `min.insync.replicas` has no effect. With any `acks` other than 0, a produce request is answered when Postgres",
    "  has committed its records.",
    "- The first ShareFetch of a new share group returns records of all partitions that have some, up to its limits.",
    "  Kafka returns records of the partition that it initializes first. Later fetches return those of the others.",
    "- If another node must answer an OffsetFetch, the node refuses it for the group, as Kafka does. It also lists the",
    "  partitions with UNSTABLE_OFFSET_COMMIT, because librdkafka never repeats a request for partitions that the",
    "  response does not list.",
    "- A live node cannot be unregistered (INVALID_REQUEST): stop it first. Kafka fences such a broker and lets it",
    "  continue to run.",
    "- `__consumer_offsets` may be deleted. It is then missing from listings until a client looks up a group's",
    "  coordinator. Groups and their committed offsets are not stored in it, so they stay.",
    "- Any node serves any partition, so no client receives NOT_LEADER_OR_FOLLOWER because it asked another node than",
    "  the leader.",
    "- COMMIT markers of WriteTxnMarkers are refused (INVALID_REQUEST): only Kafka's coordinators send them.",
    "- Groups, offsets and transactions are rows of tables. Nodes write `__consumer_offsets` and `__transaction_state`",
    "  only while a client reads them. So these topics begin with the state at that time and lack earlier states.",
    "- A broker's setting may be changed through any live broker. Kafka accepts the change only through the broker",
    "  itself. Two kinds of settings are excepted: levels of loggers, which belong to one process, and a node's",
    "  settings of listeners (`listener.name.NAME.ssl.*`).",
    "- DescribeConfigs lists all broker settings that Kafka has. A setting without effect here may be set. Its",
    "  documentation and a warning in the log say why nothing changes.",
    "- A static member that returns with other subscribed topics starts a rebalance. Kafka returns its old assignment",
    "  until the next rebalance (KAFKA-12759).",
    "- No fetch sessions exist. A Fetch that requests a session receives session id 0, as KIP-227 allows, and the",
    "  client sends full fetches.",
    "- Unsigned OAUTHBEARER tokens are refused. Kafka accepts them by default. A listener must name the source of its",
    "  issuer's keys.",
    "- One node at a time exports the cluster's metrics (topics, groups, lag). It holds a lease for this.",
]


def markdown(card: dict[str, Any]) -> str:
    suites: list[dict[str, Any]] = card["suites"]
    run = [suite for suite in suites if not suite["left_out"]]
    lines = [
        "# Compatibility",
        "",
        "Stock clients, in their own languages, against a Sluice gateway. Generated by `make compat`; do not edit.",
        f"Gateway {_joined(gateway for suite in run for gateway in suite.get('gateways', (suite['gateway'],)))}, run on"
        f" {_joined(_days(suite) for suite in run)}.",
        "",
        "A group scenario passes only if its delivery log shows no partition with two owners, nothing lost, nothing",
        "delivered twice (except, after a crash, records since the last commit) and, in cooperative groups, no",
        "retained partition that was revoked or paused.",
        "",
        f"{MARKS['passed']} passed, {MARKS['failed']} failed, {MARKS['unserved']} not served yet,"
        f" {MARKS['skipped']} skipped (a skip never counts as passed; its reason is below),"
        f" {MARKS['unasked']} not asked, because this run had no time for it.",
        "",
        "## Clients",
        "",
        "| Client | Language | Version | Passed | Failed | Not served | Skipped | Not asked | Seconds |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for suite in suites:
        if suite["left_out"]:
            lines.append(
                f"| {suite['client']} | {suite['language']} | left out: {_cell(suite['left_out'])} | | | | | | |"
            )
            continue
        counts = Counter(row["outcome"] for row in suite["rows"])
        lines.append(
            f"| {suite['client']} | {suite['language']} | {_cell(suite['version'])} | {counts['passed']} |"
            f" {counts['failed']} | {counts['unserved']} | {counts['skipped']} | {counts['unasked']} |"
            f" {suite['seconds']:.0f} |"
        )
    lines += _beside_kafka(card)
    lines += _scenario_table([suite for suite in run if any(scenarios.find(row["scenario"]) for row in suite["rows"])])
    lines += _own_scenarios(run)
    lines += _explanations(run)
    lines += _pauses(run)
    lines += _api_versions(run)
    lines += ON_PURPOSE
    return "\n".join(lines) + "\n"


def _scenario_table(suites: Sequence[dict[str, Any]]) -> list[str]:
    if not suites:
        return []
    lines = ["", "## Scenarios that every client is asked", ""]
    lines.append("| Scenario | " + " | ".join(suite["client"] for suite in suites) + " |")
    lines.append("|---|" + ":-:|" * len(suites))
    outcomes = [{row["scenario"]: row["outcome"] for row in suite["rows"]} for suite in suites]
    names = sorted({name for answered in outcomes for name in answered if scenarios.find(name)}, key=_order)
    for name in names:
        marks = [MARKS[answered[name]] if name in answered else " " for answered in outcomes]
        lines.append(f"| {name} | " + " | ".join(marks) + " |")
    lines += ["", "A scenario with an assignor in its name is run with each assignor that the client offers.", ""]
    lines += [f"- `{scenario.name}`: {scenario.meaning}" for scenario in scenarios.SCENARIOS]
    return lines


def _own_scenarios(suites: Sequence[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for suite in suites:
        rows = [row for row in suite["rows"] if scenarios.find(row["scenario"]) is None]
        if rows:
            lines += ["", f"### {suite['client']}", "", "| Scenario | | Seconds | |", "|---|:-:|--:|---|"]
            lines += [
                f"| {row['scenario']} | {MARKS[row['outcome']]} | {row['seconds']:.1f} | {_cell(row['detail'])} |"
                for row in rows
            ]
    return ["", "## Scenarios of single clients", *lines] if lines else []


def _explanations(suites: Sequence[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for outcome, title, why in (
        ("failed", "Failed", "Reason"),
        ("unserved", "Not served yet", "What is missing"),
        ("skipped", "Skipped, and why", "Reason"),
        ("passed", "Passed, with a remark", "Remark"),
    ):
        rows = [
            (suite, row)
            for suite in suites
            for row in suite["rows"]
            if row["outcome"] == outcome
            and row["detail"]
            and (outcome in ("failed", "unserved") or scenarios.find(row["scenario"]) is not None)
        ]
        if rows:
            lines += ["", f"## {title}", "", f"| Client | Scenario | {why} |", "|---|---|---|"]
            lines += [f"| {suite['client']} | {row['scenario']} | {_cell(row['detail'])} |" for suite, row in rows]
    return lines


def _pauses(suites: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        (suite, row)
        for suite in suites
        for row in suite["rows"]
        if row["deliveries"] and row["deliveries"]["handovers"] and row["outcome"] == "passed"
    ]
    if not rows:
        return []
    lines = [
        "",
        "## Group scenarios, as the delivery logs show them",
        "",
        "*Hand-overs*: how often a partition got a new owner. *Records*: deliveries. *Again*: deliveries of records",
        "that had been delivered before. *Retained ms* and *Moved ms*: the longest time for which a record waited",
        "while other partitions moved, and while its own partition moved. The load of the machine contributes to",
        "these times.",
        "",
        "| Client | Scenario | Hand-overs | Records | Again | Retained ms | Moved ms |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for suite, row in rows:
        counts = row["deliveries"]
        pauses = [str(counts[name]) if name in counts else "" for name in ("pause_retained_ms", "pause_moved_ms")]
        lines.append(
            f"| {suite['client']} | {row['scenario']} | {counts['handovers']} | {counts['deliveries']} |"
            f" {counts['duplicates']} | {pauses[0]} | {pauses[1]} |"
        )
    return lines


def _api_versions(suites: Sequence[dict[str, Any]]) -> list[str]:
    apis = sorted({api for suite in suites for api in suite["api_versions"]})
    if not apis:
        return []
    lines = ["", "## Versions on the wire", "", "The versions of each API that the clients sent.", ""]
    lines.append("| API | " + " | ".join(suite["client"] for suite in suites) + " |")
    lines.append("|---|" + "---|" * len(suites))
    for api in apis:
        cells = [_numbers(suite["api_versions"].get(api, [])) for suite in suites]
        lines.append(f"| {api} | " + " | ".join(cells) + " |")
    return lines


def _numbers(versions: Sequence[int]) -> str:
    return ", ".join(str(version) for version in versions)


def _joined(values: Any) -> str:
    return ", ".join(sorted(set(values))) or "none"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _order(name: str) -> tuple[int, str]:
    return _POSITIONS.get(name, len(_POSITIONS)), name


_POSITIONS: dict[str, int] = {}
for _scenario in scenarios.SCENARIOS:
    for _assignor in (*scenarios.ASSIGNORS, scenarios.ASSIGNOR_FIELD):
        _POSITIONS.setdefault(_scenario.name.replace(scenarios.ASSIGNOR_FIELD, _assignor), len(_POSITIONS))
