"""Run compatibility suites against a gateway of their own: `python -m tests.compat.run [SUITE …]`.

The one idea: every suite ends as rows, in any case. There is a row for an answer, for a missing answer, for a delivery
log that disproves an answer, for a crash, a hang and a failed build. Only the outcome `passed` counts as passed.

Every suite gets a fresh gateway with an embedded Postgres, or with --nodes several that share one. Its logs stay in
.compat/runs/<suite>. Without a suite's name all suites run and docs/compatibility.* is written. For named suites it is
written only with --report.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from tests.compat import report
from tests.compat.answers import WHOLE_SUITE, ask, ending, tail_of
from tests.compat.brokers import APACHE_KAFKA, SLUICE, Broker, end_starting, sluice_nodes, starting
from tests.compat.control import Control
from tests.compat.process import Limit, end_all, run_limited
from tests.compat.report import OUTCOMES, Row, SuiteResult
from tests.compat.suites import CACHE, ROOT, Suite, SuiteError, discover
from tests.postgres import short_directory
from tests.rotation import PARTS

SETTINGS = {"group.initial.rebalance.delay.ms": "0"}
VERSION_SECONDS = 60.0
SCRAPE_SECONDS = 60.0
LOG_CHARACTERS = 500
LIMIT_SECONDS = 2700.0
"""Seconds for all suites together. Continuous integration has an hour, including checks and tests."""
LONG_SECONDS = 1200.0
"""Suites whose limit is larger than this start earlier."""
BUILD_TRIES = 2
END_SECONDS = 0.1
FLAKY = "flaky: failed first, passed then"
MAX_FLAKY = 8
"""Number of scenarios in all suites that may pass only at the second try. With more of them the run fails."""

_building = threading.Lock()
"""Lock for builds. Maven, npm and similar tools have a shared store of packages, which two builds
cannot use at once.
"""


class Versions:
    """The API versions that the clients sent, summed over the gateway's restarts."""

    def __init__(self, metrics_url: str | None) -> None:
        self._metrics_url = metrics_url
        self.seen: dict[str, set[int]] = {}

    def scrape(self) -> None:
        if self._metrics_url is None:
            return
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"{self._metrics_url}/metrics", timeout=SCRAPE_SECONDS) as answer:
                text = answer.read().decode()
            for line in text.splitlines():
                if line.startswith("sluice_requests_total{"):
                    labels = dict(
                        pair.split("=", 1)
                        for pair in line.partition("{")[2].partition("}")[0].replace('"', "").split(",")
                    )
                    api, version = labels["api"].title().replace("_", ""), int(labels["version"])
                    # The check that the gateway had started sent one ApiVersions 0.
                    if (api, version) != ("ApiVersions", 0) or float(line.rpartition(" ")[2]) > 1:
                        self.seen.setdefault(api, set()).add(version)


def run_suite(
    suite: Suite,
    *,
    named: Sequence[str] = (),
    build_first: Sequence[Suite] = (),
    directory: Path,
    on_row: Callable[[Row], None],
    limit: Limit | None = None,
    broker: Broker = SLUICE,
) -> SuiteResult:
    """Build a suite, run it (only the `named` scenarios, if any) against a gateway, and judge its delivery logs.

    Logs go to `directory`, which is emptied first. `on_row` receives each row as it becomes known. `limit` is the
    remaining time of the whole run.
    """
    limit = limit or Limit()
    started = time.monotonic()
    result = SuiteResult(suite.name, suite.client, suite.language, date=_now(), gateway=_version_of(broker, suite))
    if suite.fault:
        result.rows = [_reported(Row(WHOLE_SUITE, "failed", 0.0, suite.fault), on_row)]
        return result
    missing = _missing(suite, build_first)
    if missing is not None:
        result.left_out = missing
        return result
    with _alone(directory):
        result.rows = _run(suite, named, build_first, directory, result, on_row, limit, broker)
    if broker is not APACHE_KAFKA:
        result.rows = [_as_known(suite, row, on_row) for row in result.rows]
    result.seconds = time.monotonic() - started
    return result


def _version_of(broker: Broker, suite: Suite) -> str:
    """Return the version of the broker that answers a suite."""
    return suite.own_kafka if broker is APACHE_KAFKA and suite.own_kafka else broker.version()


def _as_known(suite: Suite, row: Row, on_row: Callable[[Row], None]) -> Row:
    """Mark a failed scenario as unserved if `[unserved]` lists it. If a listed scenario passes, mark it as failed,
    because the suite must not list it any more.
    """
    reason = suite.unserved.get(row.scenario)
    if reason is None or row.outcome in ("skipped", "unasked"):
        return row
    if row.outcome == "passed":
        return _reported(replace(row, outcome="failed", detail="is served: take it off [unserved]"), on_row)
    return _reported(replace(row, outcome="unserved", detail=reason), on_row)


def _missing(suite: Suite, uses: Sequence[Suite]) -> str | None:
    """Return why this machine cannot run the suite, or a suite that it uses; None if it can."""
    return suite.missing() or next((f"{used.name} {why}" for used in uses if (why := used.missing())), None)


def _run(
    suite: Suite,
    named: Sequence[str],
    build_first: Sequence[Suite],
    directory: Path,
    result: SuiteResult,
    on_row: Callable[[Row], None],
    limit: Limit,
    broker: Broker,
) -> list[Row]:
    deliveries, stderr = directory / "deliveries", directory / "stderr.log"
    deliveries.mkdir()
    with _building:
        started = time.monotonic()
        for part in (*build_first, suite):
            failure = _build(part, stderr, limit)
            if failure is not None:
                return [_reported(Row(WHOLE_SUITE, "failed", time.monotonic() - started, failure), on_row)]
        result.build_seconds = time.monotonic() - started
    result.version = _version(suite, stderr)
    if not limit.left_s:
        return [_reported(Row(WHOLE_SUITE, "failed", 0.0, f"not run: {limit.reached(0)} has passed"), on_row)]

    with short_directory() as data, contextlib.ExitStack() as stack:
        gateway = broker.process(data, {**SETTINGS, **suite.settings})
        stack.callback(shutil.copy, gateway.log_path, directory / "gateway.log")
        stack.callback(gateway.close)
        try:
            with starting(gateway):
                gateway.start()
        except AssertionError as error:
            return [_reported(Row(WHOLE_SUITE, "failed", 0.0, str(error)[-LOG_CHARACTERS:]), on_row)]
        versions = Versions(gateway.metrics_url)
        control = stack.enter_context(Control(gateway, versions.scrape))
        environment = {
            **_environment(),
            "COMPAT_BOOTSTRAP": gateway.bootstrap,
            "COMPAT_CONTROL": control.url,
            "COMPAT_METRICS": "" if gateway.metrics_url is None else f"{gateway.metrics_url}/metrics",
            "COMPAT_BROKER": broker.name,
            "COMPAT_DELIVERIES": str(deliveries),
            "COMPAT_SCENARIOS": ",".join(named),
            "COMPAT_SUITE": suite.name,
        }
        rows = ask(
            suite, named, environment=environment, deliveries=deliveries, stderr=stderr, on_row=on_row, limit=limit
        )
        versions.scrape()
        result.api_versions = {api: sorted(seen) for api, seen in sorted(versions.seen.items())}
        if not gateway.running:
            said = gateway.log_tail()[-LOG_CHARACTERS:]
            rows.append(_reported(Row(WHOLE_SUITE, "failed", 0.0, f"the gateway had ended: {said}"), on_row))
    return rows


def _build(suite: Suite, stderr: Path, limit: Limit) -> str | None:
    """Build a suite. Return why that failed, or None. Try twice, because a build downloads packages and connections
    break.
    """
    if not suite.build:
        return None
    suite.build_dir.mkdir(parents=True, exist_ok=True)
    failure = None
    for _ in range(BUILD_TRIES):
        if not limit.left_s:
            return failure or f"{suite.name}: not built: {limit.reached(0)} has passed"
        try:
            ended = run_limited(
                suite.command(suite.build),
                cwd=suite.folder,
                environment=_environment(),
                limit_s=limit.of(suite.build_limit_s),
                stderr=stderr,
                on_line=lambda line: _append(stderr, line),
            )
        except OSError as error:
            return f"{suite.name} could not be built: {error}"
        if ended.timed_out:
            return f"{suite.name}: the build was killed after {limit.reached(suite.build_limit_s)}"
        if not ended.returncode:
            return None
        failure = f"{suite.name}: the build ended with {ending(ended.returncode)}{tail_of(stderr)}"
        print(failure, flush=True)
    return failure


def _version(suite: Suite, stderr: Path) -> str:
    if not suite.version:
        return "unknown"
    lines: list[str] = []
    try:
        ended = run_limited(
            suite.command(suite.version),
            cwd=suite.folder,
            environment=_environment(),
            limit_s=VERSION_SECONDS,
            stderr=stderr,
            on_line=lines.append,
        )
    except OSError:
        return "unknown"
    return " ".join(lines).strip() if lines and not ended.timed_out and not ended.returncode else "unknown"


def _environment() -> Mapping[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    return {**inherited, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Reserve an empty directory. Raise SuiteError if another run uses it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SuiteError(f"{directory.name} is being run already") from None
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        yield


def _append(path: Path, line: str) -> None:
    with path.open("a") as log:
        log.write(line + "\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _reported(row: Row, on_row: Callable[[Row], None]) -> Row:
    on_row(row)
    return row


def _say(suite: str, row: Row) -> None:
    detail = f"  {row.detail}" if row.detail and row.outcome != "passed" else ""
    print(f"  {row.outcome:7} {suite} {row.scenario} {row.seconds:.1f} s{detail}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compat.run", description=__doc__.partition("\n")[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="folders of tests/compat; all if none is named")
    parser.add_argument("--scenarios", default="", help="only these, separated by commas")
    parser.add_argument(
        "--report", type=Path, nargs="?", const=report.FOLDER, help="write the report card, to a folder"
    )
    parser.add_argument(
        "--broker",
        choices=("sluice", "kafka"),
        default="sluice",
        help="kafka: ask Apache Kafka the same, for the column beside ours (docs/oracle.json)",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        help="so many gateways on one Postgres, not one; no report card is written",
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many suites run at a time")
    parser.add_argument(
        "--again", action="store_true", help="ask a scenario that failed once more, to say whether it is flaky"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_SECONDS,
        help="seconds for all suites together; what is not done has failed",
    )
    parser.add_argument(
        "--bounded",
        action="store_true",
        help="of other people's tests that are longer than continuous integration's time, the part that they name",
    )
    parser.add_argument(
        "--part",
        type=int,
        choices=range(1, PARTS + 1),
        help="all scenarios of the suites of this part, and of the others their core",
    )
    parser.add_argument("--list", action="store_true", help="say which suites there are and which can run here")
    options = parser.parse_args(arguments)
    try:
        return _main(options)
    except SuiteError as error:
        print(f"compat: {error}", file=sys.stderr)
        return 2


def _main(options: argparse.Namespace) -> int:
    known = {suite.name: suite for suite in discover()}
    names = [name.replace("-", "_") for name in options.suites]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SuiteError(f"no suite {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    chosen = [known[name] for name in names] or list(known.values())

    def used_by(suite: Suite) -> list[Suite]:
        return [known[name] for name in suite.uses if name in known]

    if options.list:
        for suite in chosen:
            print(f"{suite.name:18} {suite.client} ({suite.language}): {_missing(suite, used_by(suite)) or 'can run'}")
        return 0
    scenario_names = [name for name in options.scenarios.split(",") if name]
    limit = Limit(options.limit)
    if options.bounded:
        os.environ["COMPAT_BOUNDED"] = "1"

    broker, runs = _broker(options)

    def run(suite: Suite) -> SuiteResult:
        uses = used_by(suite)
        directory = runs / suite.name
        asked = scenario_names if options.part is None else suite.asked_in(options.part)
        try:
            if asked is None:
                return _left_to_its_part(suite, broker)
            result = _run_and_say(suite, uses, asked, directory, limit, broker)
            again = runs / f"{suite.name}.again"
            return ask_again(suite, uses, result, again, limit, broker) if options.again else result
        except Exception as error:  # An error in one suite must not stop the other suites and the card.
            return _unrunnable(suite, error, broker)

    # Handle SIGTERM like Ctrl-C, so that every started process ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    broker.version()  # If Kafka's jars are needed, download them here, where a signal can end the download.
    pool = ThreadPoolExecutor(options.jobs)
    running: list[Future[SuiteResult]] = []
    try:
        # Start the longest suites first. Otherwise the run would at its end wait for one long suite. Then start the
        # suites without a build, because another suite's build may wait for its registry.
        ordered = sorted(chosen, key=lambda suite: (-max(suite.limit_s, LONG_SECONDS), bool(suite.build or suite.uses)))
        running.extend(pool.submit(run, suite) for suite in ordered)
        results = [future.result() for future in running]
    except BaseException:
        limit.end()
        pool.shutdown(wait=False, cancel_futures=True)
        # Repeat this, because a suite that is being ended may be about to start its next command.
        while left := [future for future in running if future.running()]:
            end_all()
            end_starting()
            wait(left, timeout=END_SECONDS)
        raise
    finally:
        pool.shutdown()
    whole = not names and not scenario_names
    folder = options.report or (report.FOLDER if whole and options.nodes == 1 else None)
    if folder is not None and broker is SLUICE:
        report.write(folder, results, keep_others=not whole, keep_rows=bool(scenario_names))
        print(f"Report card: {folder / 'compatibility.md'}")
    elif folder is not None:
        report.write_oracle(folder, results, keep_others=not whole, keep_rows=bool(scenario_names))
        print(f"Apache Kafka's answers: {folder / report.ORACLE_NAME}")
    rows = [row for result in results for row in result.rows]
    for result in results:
        if result.left_out:
            print(f"Left out: {result.client}: {result.left_out}")
    flaky = [(result, row) for result in results for row in result.rows if row.detail.startswith(FLAKY)]
    for result, row in flaky:
        print(f"FLAKY: {result.name} {row.scenario}: {row.detail}")
    red = report.reds(results) if broker is not APACHE_KAFKA else []
    for line in red:
        print(f"RED: {line}")
    print(f"compat: {_counts(rows)}{f'; {len(red)} red: Apache Kafka passes them' if red else ''}")
    return 1 if len(flaky) > MAX_FLAKY or any(row.outcome == "failed" for row in rows) else 0


def _broker(options: argparse.Namespace) -> tuple[Broker, Path]:
    """Return the broker to test, and the folder of its logs."""
    if options.nodes == 1:
        return (APACHE_KAFKA, CACHE / "runs-kafka") if options.broker == "kafka" else (SLUICE, CACHE / "runs")
    if options.nodes < 1:
        raise SuiteError(f"--nodes {options.nodes}: a suite needs at least one node")
    if options.broker == "kafka" or options.report:
        raise SuiteError("--nodes goes with neither --broker kafka nor --report: Kafka and the card have one node")
    return sluice_nodes(options.nodes), CACHE / f"runs-{options.nodes}-nodes"


def _unrunnable(suite: Suite, error: Exception, broker: Broker) -> SuiteResult:
    """Return the result of a suite that the runner itself could not run."""
    if not isinstance(error, SuiteError):
        traceback.print_exception(error)
    row = Row(WHOLE_SUITE, "failed", 0.0, str(error) if isinstance(error, SuiteError) else f"the runner: {error!r}")
    _say(suite.name, row)
    return SuiteResult(suite.name, suite.client, suite.language, _now(), broker.version(), rows=[row])


def _left_to_its_part(suite: Suite, broker: Broker) -> SuiteResult:
    result = SuiteResult(suite.name, suite.client, suite.language, _now(), broker.version())
    result.left_out = f"part {suite.part} of {PARTS} asks it"
    return result


def _run_and_say(
    suite: Suite, uses: Sequence[Suite], scenario_names: Sequence[str], directory: Path, limit: Limit, broker: Broker
) -> SuiteResult:
    print(f"{suite.name}: {suite.client} ({suite.language})", flush=True)

    def say(row: Row) -> None:
        _say(suite.name, row)

    result = run_suite(
        suite, named=scenario_names, build_first=uses, directory=directory, on_row=say, limit=limit, broker=broker
    )
    if result.left_out:
        print(f"{suite.name}: left out: {result.left_out}", flush=True)
        return result
    if directory.exists():
        (directory / "result.json").write_text(report.suite_json(result))
    print(f"{suite.name}: {_counts(result.rows)}, in {result.seconds:.0f} s; {result.version}", flush=True)
    return result


def ask_again(
    suite: Suite,
    uses: Sequence[Suite],
    first: SuiteResult,
    directory: Path,
    limit: Limit,
    broker: Broker = SLUICE,
) -> SuiteResult:
    """Run the failed scenarios again. Return the result; scenarios that pass now are marked as flaky. A program that
    hung or crashed is not run again.
    """
    failed = {row.scenario: row for row in first.rows if row.outcome == "failed"}
    if not failed or WHOLE_SUITE in failed:
        return first
    print(f"{suite.name}: asking again: {', '.join(failed)}", flush=True)
    second = {row.scenario: row for row in _run_and_say(suite, uses, list(failed), directory, limit, broker).rows}
    rows: list[Row] = []
    for row in first.rows:
        answer = second.get(row.scenario) if row.scenario in failed else None
        if answer is not None and answer.outcome == "passed":
            reason = suite.flaky.get(row.scenario)
            print(f"FLAKY: {suite.name} {row.scenario}, {reason or 'for no known reason'}: {row.detail}", flush=True)
            detail = f"{FLAKY}, {reason or 'for no known reason'}; the first: {row.detail}"
            answer = replace(answer, detail=detail)
        rows.append(answer or row)
    return replace(first, rows=rows)


def _counts(rows: Sequence[Row]) -> str:
    counts = Counter(row.outcome for row in rows)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)


if __name__ == "__main__":
    sys.exit(main())
