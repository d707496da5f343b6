"""The README's two commands, and a tester's installation, on a machine that only has Python, make and git."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.containers.conftest import ORDINARY_USER
from tests.containers.engine import CACHE, Engine, checked
from tests.gateway_process import free_ports
from tests.postgres import short_directory
from tests.steps.pages import blocks, replaced
from tests.wheels import wheel

__all__ = ["wheel"]

LIMIT_SECONDS = 300

RUN = """
set -eu
python3 --version
make run ARGS="--listen 127.0.0.1:$PORT --metrics-listen 127.0.0.1:$METRICS_PORT" &
server=$!
until .venv/bin/sluice healthcheck 127.0.0.1:$PORT 2>/dev/null; do
  kill -0 $server
  sleep 0.2
done
kill $server
wait $server || test $? = 143
"""
"""Run `make run` until a round trip succeeds, then end it. make exits with 143, which is the code for SIGTERM."""

# A part of the suite with every kind of test: tests without a database, tests on a real Postgres, and tests of the
# runner. The last use tools that are not installed, and programs that the runner must end. The whole suite runs outside
# the container, because CI's time is limited.
STORAGE = "tests/storage/test_database_url.py tests/storage/test_append.py"
RUNNER = " ".join(
    f"tests/compat/test_runner.py::test_{name}"
    for name in ("a_missing_toolchain_leaves_the_suite_out", "a_suite_that_hangs_is_killed_with_its_children_and_fails")
)
PART = f"tests/gateway/config {STORAGE} {RUNNER} -q"


@pytest.mark.timeout(2 * LIMIT_SECONDS)
@pytest.mark.parametrize(("machine", "user"), [("oldest", ORDINARY_USER), ("newest", 0)])
def test_make_run_and_make_test_work_on_a_bare_machine(
    request: pytest.FixtureRequest, engine: Engine, checkout: Path, machine: str, user: int
) -> None:
    image: str = request.getfixturevalue(machine)
    kept = CACHE / f"pip-{user}"
    kept.mkdir(parents=True, exist_ok=True)
    subprocess.run(["chown", "-R", f"{user}:{user}", str(checkout), str(kept)], check=True)
    port, metrics_port = free_ports(2)
    command = [
        *("run", "--rm", "--init", "--network", "host", "--user", f"{user}:{user}"),
        *("--volume", f"{checkout}:/home/sluice", "--workdir", "/home/sluice", "--env", "HOME=/home/sluice"),
        *("--volume", f"{kept}:/var/cache/pip", "--env", "PIP_CACHE_DIR=/var/cache/pip"),
        *("--env", f"PORT={port}", "--env", f"METRICS_PORT={metrics_port}", image, "sh", "-c"),
    ]
    script = f'{RUN}\ngit init --quiet . && git add --all\nmake test ARGS="{PART}"\n'
    said = checked(engine.command(*command, script), engine.environment(), LIMIT_SECONDS)
    # The suite prints one summary of the parallel tests and one of the tests that run alone. This part of the suite has
    # no test that runs alone.
    assert re.search(r"^\d+ passed in ", said, re.MULTILINE), said


@pytest.mark.timeout(2 * LIMIT_SECONDS)
def test_one_pip_install_gives_a_tester_a_green_test_on_a_bare_machine(
    engine: Engine, newest: str, wheel: Path
) -> None:
    install, test = blocks("docs/testing.md", "sh")[0], blocks("docs/testing.md", "python", "In pytest")[0]
    install = replaced(install, {"sluice-kafka[testing]": f"/tester/{wheel.name}[testing]"})
    prepare = "set -eu\npython3 -m venv env\nPATH=$PWD/env/bin:$PATH\n"
    script = f"{prepare}{install}python -m pytest -q -p no:cacheprovider\n"
    with short_directory() as directory:
        shutil.copy(wheel, directory)
        (directory / "test_orders.py").write_text(test)
        subprocess.run(["chown", "-R", f"{ORDINARY_USER}:{ORDINARY_USER}", str(directory)], check=True)
        command = [
            *("run", "--rm", "--init", "--network", "host", "--user", f"{ORDINARY_USER}:{ORDINARY_USER}"),
            *("--volume", f"{directory}:/tester", "--workdir", "/tester", "--env", "HOME=/tester"),
            *(newest, "sh", "-c", script),
        ]
        said = checked(engine.command(*command), engine.environment(), LIMIT_SECONDS)
    assert re.search(r"^1 passed in ", said, re.MULTILINE), said
