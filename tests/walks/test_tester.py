"""The tester's walk: from the wheel to a passing test on a real broker, in an environment that
contains nothing else.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.postgres import short_directory
from tests.steps.pages import Shell, blocks, replaced
from tests.wheels import wheel

__all__ = ["wheel"]

LIMIT_S = 290
WANTED_S = 120
"""The time that the walk should take on an otherwise idle machine."""


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
def test_one_pip_install_gives_a_tester_a_green_test(wheel: Path) -> None:
    install = blocks("docs/testing.md", "sh")[0]
    test = blocks("docs/testing.md", "python", "In pytest")[0]
    with short_directory() as directory:
        shell = Shell(directory, path=str(directory / "venv/bin"))
        began_s = time.monotonic()
        shell.run(f"{Path(sys.base_prefix) / 'bin' / 'python3'} -m venv venv", seconds=LIMIT_S)
        shell.run(replaced(install, {"sluice-kafka[testing]": f"{wheel}[testing]"}), seconds=LIMIT_S)
        installed_s = time.monotonic()
        (directory / "test_orders.py").write_text(test)
        said = shell.run("python -m pytest -q -p no:cacheprovider", seconds=LIMIT_S)
        took_s = time.monotonic() - began_s
    assert "1 passed" in said
    print(f"installed in {installed_s - began_s:.0f} s, green after {took_s:.0f} s; wanted: {WANTED_S} s")
