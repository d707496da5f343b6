"""The systemd unit: systemd accepts it, it is hardened, and a node accepts its settings."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config.settings import load
from tests.gateway_process import ROOT

UNIT = ROOT / "deploy/systemd/sluice.service"
PROGRAM = "/opt/sluice/bin/sluice"
HIGHEST_EXPOSURE = 1.4
"""Limit of the exposure rating by systemd, which goes from 0 to 10."""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def values(name: str) -> list[str]:
    return re.findall(rf"^#?{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


@needs_systemd
def test_systemd_accepts_the_unit_and_rates_it_as_hardened(tmp_path: Path) -> None:
    unit = tmp_path / "sluice.service"
    unit.write_text(UNIT.read_text().replace(PROGRAM, sys.executable))
    checked = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(unit)], capture_output=True, text=True, timeout=60
    ).stdout
    found = re.search(r"Overall exposure level for sluice.service: ([\d.]+)", rated)
    assert found is not None
    assert float(found[1]) <= HIGHEST_EXPOSURE


def test_a_node_accepts_the_units_settings(tmp_path: Path) -> None:
    environment = dict(pair.split("=", 1) for line in values("Environment") for pair in line.split())
    secret = tmp_path / "database-url"
    secret.write_text("postgresql://sluice@/sluice")
    assert environment["SLUICE_DATABASE_URL_FILE"] == f"%d/{secret.name}"
    environment["SLUICE_DATABASE_URL_FILE"] = str(secret)
    settings = load({}, (), environment).settings
    (state,), (stop_s,), (start,) = values("StateDirectory"), values("TimeoutStopSec"), values("ExecStart")
    assert settings.data_dir == Path("/var/lib") / state
    assert int(stop_s) > settings.drain_ms / 1000
    assert start == f"{PROGRAM} serve --config /etc/{values('ConfigurationDirectory')[0]}/sluice.toml"
