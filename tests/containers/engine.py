"""A Docker engine of our own for one test run, and base images without a registry.

The one idea: no image is pulled. A base image is a Debian that debootstrap made from the machine's package mirror. This
base image has the name that the Dockerfile and the compose file use, so both run unchanged. An engine that already runs
is not used, because its images and networks belong to its user.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.gateway_process import POLL_SECONDS, ROOT

CACHE = ROOT / ".compat" / "containers"
NEEDS = ("docker", "dockerd", "docker-compose", "debootstrap")
START_SECONDS = 60.0
STOP_SECONDS = 30.0
BOOTSTRAP_SECONDS = 420.0
LOG_TAIL_CHARACTERS = 3000
PACKAGES = ("ca-certificates", "git", "make", "python3", "python3-venv")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_HANDED_ON = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Variables by which this machine reaches package indexes. They also work in a container on this machine's network."""


class NoEngineError(Exception):
    """Containers cannot run here; the message says why."""


def missing() -> str | None:
    """Return why no engine can be started on this machine. Return None if no reason is known before
    a start is tried.
    """
    absent = [name for name in NEEDS if shutil.which(name) is None]
    if os.geteuid() != 0:
        return "a container engine is started by root"
    return f"{', '.join(absent)} not installed" if absent else None


class Engine:
    """One `dockerd`, which keeps all its files in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.host = f"unix://{directory / 'docker.sock'}"
        self._directory = directory
        self._log = directory / "dockerd.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the engine and wait until it answers. Raise NoEngineError if it does not."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("dockerd", "--host", self.host),
                    *("--data-root", str(self._directory / "data")),
                    *("--exec-root", str(self._directory / "exec")),
                    *("--pidfile", str(self._directory / "dockerd.pid")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_SECONDS
        while subprocess.run(self.command("version"), env=self.environment(), capture_output=True).returncode != 0:
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = self._log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
                self.stop()
                raise NoEngineError(f"dockerd does not serve here:\n{said}")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # The network namespace of `--network host` stays mounted. This would prevent the removal of the directory.
        mounted = [Path(line.split()[1]) for line in Path("/proc/self/mounts").read_text().splitlines()]
        for place in reversed([place for place in mounted if place.is_relative_to(self._directory)]):
            subprocess.run(["umount", str(place)], check=True, timeout=STOP_SECONDS)

    def command(self, *arguments: str) -> list[str]:
        return ["docker", "--host", self.host, *arguments]

    def environment(self) -> dict[str, str]:
        """Environment for programs that find the engine by DOCKER_HOST. It selects the classic builder, because buildx
        is a separate package.
        """
        return {**os.environ, "DOCKER_HOST": self.host, "DOCKER_BUILDKIT": "0"}

    def run(self, *arguments: str, timeout_s: float) -> str:
        """Return a docker command's output. Raise AssertionError with all its output if it fails."""
        return checked(self.command(*arguments), self.environment(), timeout_s)

    def import_base(self, root: Path, image: str, *, environment: Mapping[str, str]) -> None:
        """Make an image from a folder."""
        settings = [f"ENV {name}={value}" for name, value in environment.items()]
        options = [word for change in settings for word in ("--change", change)]
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as packed:
            subprocess.run(
                self.command("import", *options, "-", image),
                stdin=packed.stdout,
                env=self.environment(),
                capture_output=True,
                check=True,
                timeout=BOOTSTRAP_SECONDS,
            )
        assert packed.returncode == 0


def checked(command: Sequence[str], environment: Mapping[str, str], timeout_s: float, directory: Path = ROOT) -> str:
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def debian(release: str) -> Path:
    """Return the root directory of a small Debian with Python, git and make. It is kept for later runs, because making
    it takes a minute or two.
    """
    root = CACHE / release
    complete = CACHE / f"{release}.complete"
    wanted = " ".join(PACKAGES)
    if not complete.exists() or complete.read_text() != wanted:
        shutil.rmtree(root, ignore_errors=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", release, str(root)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BOOTSTRAP_SECONDS,
        )
        if made.returncode != 0:
            raise NoEngineError(f"debootstrap {release} failed:\n{made.stdout[-LOG_TAIL_CHARACTERS:]}")
        for archive in (root / "var/cache/apt/archives").glob("*.deb"):
            archive.unlink()
        complete.write_text(wanted)
    if CERTIFICATES.exists():
        shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    return root


def network() -> dict[str, str]:
    """Return the environment variables that pip needs in a container on the host's network to use this machine's
    package indexes.
    """
    handed = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
    return {"PIP_CERT": str(CERTIFICATES), "PIP_DISABLE_PIP_VERSION_CHECK": "1", **handed}
