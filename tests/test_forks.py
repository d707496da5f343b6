"""Commands that start as forks behave as processes of their own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import GatewayFactory
from tests.forks import ROOT, Fork, forks

SECONDS = 60
STARTS_AND_ENDS = """
from tests.forks import forks
print(forks().parent_pid)
"""


def started(log: Path, *arguments: str, environment: dict[str, str] | None = None) -> Fork:
    with log.open("wb") as output:
        return forks().start(arguments, directory=ROOT, environment=environment or dict(os.environ), log=output)


def descriptors(pid: int) -> set[str]:
    return {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}


def test_command_writes_to_its_log_and_returns_its_exit_code(tmp_path: Path) -> None:
    given = {**os.environ, "SLUICE_LOG_LEVEL": "warning"}
    assert started(tmp_path / "log", "config", environment=given).wait(SECONDS) == 0
    assert "SLUICE_LOG_LEVEL" in (tmp_path / "log").read_text()
    assert started(tmp_path / "refused", "unheard").wait(SECONDS) == 2
    assert "there is no command 'unheard'" in (tmp_path / "refused").read_text()


def test_killed_gateway_returns_its_signal_and_a_running_one_times_out(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory()
    process = gateway.process
    assert isinstance(process, Fork)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    gateway.kill()
    assert process.poll() == -signal.SIGKILL
    assert not gateway.running


def test_gateway_holds_no_descriptor_of_its_parent_or_of_another(gateway_factory: GatewayFactory) -> None:
    first, second = gateway_factory(), gateway_factory()
    assert Path(f"/proc/{second.pid}/cwd").resolve() == ROOT
    held = descriptors(second.pid)
    assert str(second.log_path) in held
    assert str(first.log_path) not in held
    assert not {name for name in held & descriptors(forks().parent_pid) if name.startswith(("socket:", "pipe:"))}
    assert first.stop() == second.stop() == 0


def test_gateway_shares_most_of_its_memory_with_its_parent(gateway_factory: GatewayFactory) -> None:
    """Copying pages is the largest part of a fork's cost."""
    lines = Path(f"/proc/{gateway_factory().pid}/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {name: int(size.split()[0]) for name, size in (line.split(":") for line in lines)}
    assert kilobytes["Shared_Dirty"] > kilobytes["Private_Dirty"], kilobytes


def test_parent_of_forks_ends_with_the_process_that_started_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTS_AND_ENDS], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    try:
        ended = os.pidfd_open(int(done.stdout))
    except ProcessLookupError:
        return
    try:
        assert select.select([ended], [], [], SECONDS)[0]
    finally:
        os.close(ended)
