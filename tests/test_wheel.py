"""The wheel: one importable package, beside modules of a user that have the same names as our rooms (top-level
packages).
"""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.gateway_process import free_ports
from tests.packages import ROOT, outside, serving
from tests.postgres import short_directory
from tests.wheels import VERSION, run
from tests.wheels import installed as installed
from tests.wheels import wheel as wheel


def test_the_wheel_holds_one_top_level_package_and_no_bytecode(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"sluice", f"sluice_kafka-{VERSION}.dist-info"}
    assert "sluice/py.typed" in names
    assert not [name for name in names if "__pycache__" in name]
    for room in ("gateway", "pipeline", "protocol", "storage"):
        kept = subprocess.run(["git", "ls-files", room], cwd=ROOT, capture_output=True, text=True, check=True)
        missing = {f"sluice/_rooms/{name}" for name in kept.stdout.splitlines() if (ROOT / name).exists()} - set(names)
        assert not missing


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(f"sluice_kafka-{VERSION}.dist-info/METADATA").decode()
    for line in ("Name: sluice-kafka", f"Version: {VERSION}", "License-Expression: Apache-2.0", "Author: The Sluice"):
        assert line in metadata
    for extra in ("embedded", "testing", "pipeline", "demo"):
        assert f"Provides-Extra: {extra}" in metadata
    licenses = {name.rpartition("/")[2] for name in archive.namelist() if "/licenses/" in name}
    assert licenses == {"LICENSE", "NOTICE", "THIRD-PARTY.md"}


def test_a_users_modules_of_the_rooms_names_stay_the_users(installed: Path) -> None:
    python = installed / "bin" / "python"
    program = "import sluice.testing, storage, protocol; print(storage.OWNER, protocol.OWNER, storage.__file__)"
    assert run([python, "-c", program]).stdout.startswith(f"the user the user {installed}")
    assert "No module named 'gateway'" in run([python, "-c", "import sluice.testing, gateway"]).stderr


@pytest.mark.parametrize("name", ["sluice", "sluice-kafka"])
def test_the_installed_command_runs_by_both_names(installed: Path, name: str) -> None:
    assert run([installed / "bin" / name, "--version"]).stdout == f"sluice {VERSION}\n"
    assert run([installed / "bin" / "python", "-m", "sluice", "--version"]).stdout == f"sluice {VERSION}\n"


@pytest.mark.parametrize("workers", [1, 2])
def test_the_installed_gateway_serves_from_a_directory_with_such_modules(installed: Path, workers: int) -> None:
    port, metrics_port = free_ports(2, in_a_row=workers)
    with short_directory() as directory:
        (directory / "storage.py").write_text("raise SystemExit('the working directory was imported')\n")
        arguments = ["--listen", f"127.0.0.1:{port}", "--metrics-listen", f"127.0.0.1:{metrics_port}"]
        command = [str(installed / "bin" / "sluice"), "serve", *arguments, "--workers", str(workers)]
        with serving(command, directory, outside(), f"127.0.0.1:{port + workers - 1}") as said:
            assert "the working directory was imported" not in said.read_text()


def test_the_pipelines_python_workers_find_the_rooms(installed: Path) -> None:
    """Spark starts these workers as grandchildren of its own process, with the environment of the command."""
    program = (
        "import os, subprocess, sys, types, sluice._commands as commands\n"
        "sys.modules['pipeline'] = types.ModuleType('pipeline')\n"
        "sys.modules['pipeline.cli'] = types.ModuleType('pipeline.cli')\n"
        "worker = [sys.executable, '-c', 'import pipeline.cli, storage; print(pipeline.__file__, storage.__file__)']\n"
        "sys.modules['pipeline.cli'].main = lambda: subprocess.run(worker).returncode\n"
        "sys.exit(commands.pipeline_main())\n"
    )
    answer = run([installed / "bin" / "python", "-c", program], PYTHONPATH=f"{os.sep}nowhere")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("/sluice/_rooms/") == 2
