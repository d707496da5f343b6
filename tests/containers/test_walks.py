"""The four walks (what four kinds of users do first with Sluice), on machines that have only what the pages tell each
user to install.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.containers.conftest import ORDINARY_USER
from tests.containers.engine import CACHE, Engine, checked
from tests.kafka.process import LIBRARIES, assemble

LIMIT_SECONDS = 1200

# The walks of the newcomer and the tester run first, with Python, make and git only. Then the script installs
# Prometheus for the operator's walk and Java for the migrator's Kafka. $AS is the command that runs a walk as the user;
# if it is empty, root runs the walk. No package may start a service, because the container uses this machine's network.
WALKS = """
set -eu
walk() { $AS .venv/bin/python -m pytest -q -p no:cacheprovider -m long "$@"; }
$AS git init --quiet . && $AS git add --all
$AS make .venv/dev.stamp
walk tests/walks/test_newcomer.py tests/walks/test_tester.py
printf '#!/bin/sh\\nexit 101\\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends prometheus default-jre-headless
walk tests/walks/test_operator.py tests/walks/test_migrator.py
"""


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_SECONDS)
@pytest.mark.parametrize(("machine", "user"), [("oldest", ORDINARY_USER), ("python_image", 0)])
def test_the_walks_pass_on_a_bare_machine(
    request: pytest.FixtureRequest, engine: Engine, checkout: Path, machine: str, user: int
) -> None:
    image: str = request.getfixturevalue(machine)
    assemble()
    kafka = checkout / ".compat" / "kafka"
    kafka.mkdir(parents=True)
    kept = CACHE / f"pip-{user}"
    kept.mkdir(parents=True, exist_ok=True)
    subprocess.run(["chown", "-R", f"{user}:{user}", str(checkout), str(kept)], check=True)
    command = [
        *("run", "--rm", "--init", "--network", "host", "--env", f"AS={'runuser -u ordinary --' if user else ''}"),
        *("--volume", f"{checkout}:/home/sluice", "--workdir", "/home/sluice", "--env", "HOME=/home/sluice"),
        *("--volume", f"{kept}:/var/cache/pip", "--env", "PIP_CACHE_DIR=/var/cache/pip"),
        *("--volume", f"{LIBRARIES.parent}:/home/sluice/.compat/kafka:ro", image, "sh", "-c", WALKS),
    ]
    said = checked(engine.command(*command), engine.environment(), LIMIT_SECONDS)
    # If a walk was skipped, the summary of the run does not match.
    assert re.findall(r"^(\d+) passed(?:, \d+ warnings?)? in ", said, re.MULTILINE) == ["2", "2"], said
