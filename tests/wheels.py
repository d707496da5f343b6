"""The wheel, which is built and installed once per run."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packages import ROOT, outside
from tests.postgres import short_directory

BUILD_SECONDS = 120
VERSION = "7.8.9"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-qq", "-w", directory, ROOT]
    subprocess.run(command, check=True, timeout=BUILD_SECONDS, env=outside(SLUICE_BUILD_VERSION=VERSION))
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Iterator[Path]:
    """A virtual environment with the wheel, and with distributions of other projects named `storage` and `protocol`.
    Its dependencies come from the environment of the tests, without the editable Sluice there.
    """
    with short_directory() as directory:
        environment = directory / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=BUILD_SECONDS)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
        dependencies = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "dependencies.pth").write_text("\n".join(dependencies))
        (packages / "storage.py").write_text("OWNER = 'the user'\n")
        (packages / "protocol").mkdir()
        (packages / "protocol" / "__init__.py").write_text("OWNER = 'the user'\n")
        command = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "-qq"]
        subprocess.run([*command, "--no-deps", wheel], check=True, timeout=BUILD_SECONDS, env=outside())
        yield environment


def run(command: list[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd="/", env=outside(**environment), capture_output=True, text=True, timeout=BUILD_SECONDS
    )
