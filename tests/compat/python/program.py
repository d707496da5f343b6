"""Main program of every Python suite: it runs the scenarios with JSON lines on stdout, or one group member until
SIGTERM."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.compat.python import admin, data, groups, transactions  # noqa: F401  (importing registers their scenarios)
from tests.compat.python.client import Client, MemberOptions, UnsupportedError
from tests.compat.python.journal import Journal
from tests.compat.python.scenario import SCENARIOS, Run

SCENARIO_SECONDS = 100.0
MAX_DETAIL = 600


def main(
    suite: str,
    program: str,
    client_class: Callable[[str], Client],
    arguments: Sequence[str],
    *,
    server_side: Callable[[str], Client] | None = None,
) -> int:
    """Run the suite.

    `program` is the calling module; members that a scenario kills run it as a new process. `server_side` makes members
    of the consumer protocol, if the client supports it.
    """
    if "--version" in arguments:
        print(client_class.version())  # type: ignore[attr-defined]
        return 0
    logging.basicConfig(
        level=os.environ.get("COMPAT_LOG_LEVEL", "WARNING"), format="%(asctime)s %(threadName)s %(name)s %(message)s"
    )
    bootstrap = os.environ["COMPAT_BOOTSTRAP"]
    if os.environ.get("COMPAT_MEMBER"):
        asked = os.environ.get("COMPAT_ASSIGNOR") == groups.SERVER_SIDE
        return _member((server_side if asked and server_side is not None else client_class)(bootstrap))
    named = [name for name in os.environ.get("COMPAT_SCENARIOS", "").split(",") if name]
    asked_of = [(name, body, client_class) for name, body in SCENARIOS.items()]
    if server_side is not None:
        asked_of += [(name, body, server_side) for name, body in groups.CONSUMER_PROTOCOL.items()]
    for name, body, made in asked_of:
        if named and name not in named:
            continue
        outcome, seconds, detail = _run(
            lambda name=name, made=made: Run(
                name,
                suite,
                program,
                made(bootstrap),
                Path(os.environ["COMPAT_DELIVERIES"]),
                os.environ["COMPAT_CONTROL"],
            ),
            body,
        )
        answer = {"scenario": name, "outcome": outcome, "seconds": round(seconds, 2), "detail": detail[:MAX_DETAIL]}
        print(json.dumps(answer), flush=True)
    sys.stdout.flush()
    # If a scenario hangs, its threads must not keep the program running.
    os._exit(0)


def _run(prepare: Callable[[], Run], body: Callable[[Run], None]) -> tuple[str, float, str]:
    """Run one scenario on a thread of its own, within its deadline. Return outcome, seconds and detail."""
    ended: list[tuple[str, str]] = []

    def attempt() -> None:
        try:
            run = prepare()
            try:
                body(run)
            finally:
                run.end()
                run.client.close()
            ended.append(("passed", run.detail))
        except UnsupportedError as reason:
            ended.append(("skipped", str(reason)))
        except BaseException as error:  # Any exception is the outcome of the scenario.
            traceback.print_exc()
            ended.append(("failed", f"{type(error).__name__}: {error}"))

    started = time.monotonic()
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(SCENARIO_SECONDS)
    seconds = time.monotonic() - started
    outcome, detail = ended[0] if ended else ("failed", f"did not end in {SCENARIO_SECONDS:.0f} s")
    return outcome, seconds, detail


def _member(client: Client) -> int:
    """Run one consumer until SIGTERM, then close it in order."""
    environment = os.environ
    journal = Journal(Path(environment["COMPAT_DELIVERIES_FILE"]))
    failures: list[str] = []
    options = MemberOptions(
        environment["COMPAT_MEMBER_NAME"],
        environment["COMPAT_GROUP"],
        environment.get("COMPAT_ASSIGNOR") or client.assignors[0],
        tuple(environment["COMPAT_TOPIC"].split(",")),
        commit=environment.get("COMPAT_COMMIT") or "auto",
    )
    member = client.member(options, journal, failures)
    signal.signal(signal.SIGTERM, lambda *_: member.request_stop())
    member.start()
    while member.is_alive():
        member.join(0.2)
    for failure in failures:
        print(failure, file=sys.stderr, flush=True)
    return 1 if failures else 0
