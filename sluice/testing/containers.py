"""Sluice's container image for Testcontainers, with the methods of its `KafkaContainer`.

The one idea: clients outside the container need the port that the engine has mapped. This port is known only once the
container runs. So the container waits for a script that contains the address, and then serves.
"""

from __future__ import annotations

import io
import shlex
import tarfile
import time

from testcontainers.core.container import DockerContainer  # pyright: ignore[reportMissingTypeStubs]

PORT = 9092
START_SECONDS = 60.0
POLL_SECONDS = 0.05
SCRIPT = "/tmp/sluice-start.sh"


class SluiceContainer(DockerContainer):
    """One node with its embedded Postgres. `start` returns when the node serves."""

    def __init__(self, image: str, port: int = PORT, **more: object) -> None:
        """Take the image's name and the port that the node listens on inside the container."""
        super().__init__(image, **more)  # pyright: ignore[reportArgumentType]
        self.port = port
        self._settings: dict[str, str] = {}
        self.with_exposed_ports(port)
        self.with_kwargs(entrypoint=["sh", "-c", f"while [ ! -f {SCRIPT} ]; do sleep 0.05; done; exec sh {SCRIPT}"])

    def with_setting(self, name: str, value: str) -> SluiceContainer:
        """Set a broker setting by Kafka's name."""
        self._settings[name] = value
        return self

    def with_kraft(self) -> SluiceContainer:
        """Return the container unchanged. The method exists because KafkaContainer has it."""
        return self

    def get_bootstrap_server(self) -> str:
        """Return HOST:PORT, at which clients outside the container reach the node."""
        return f"{self.get_container_host_ip()}:{self.get_exposed_port(self.port)}"

    def start(self, timeout: float = START_SECONDS) -> SluiceContainer:
        """Start the container and wait until the node serves. Raise TimeoutError with its log if it does not."""
        super().start()
        command = ["sluice", "serve", f"--listen=0.0.0.0:{self.port}", f"--advertise={self.get_bootstrap_server()}"]
        command += [f"--set={name}={value}" for name, value in self._settings.items()]
        self._put(SCRIPT, f"exec {shlex.join(command)}\n")
        deadline = time.monotonic() + timeout
        check = ["sluice", "healthcheck", f"127.0.0.1:{self.port}"]
        while self.get_wrapped_container().exec_run(check).exit_code != 0:
            if time.monotonic() > deadline:
                out, err = self.get_logs()
                self.stop()
                raise TimeoutError(f"the node does not serve after {timeout:g} s:\n{(out + err).decode()[-4000:]}")
            time.sleep(POLL_SECONDS)
        return self

    def _put(self, path: str, text: str) -> None:
        """Write a file into the running container."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            entry = tarfile.TarInfo(path.rpartition("/")[2])
            entry.size, entry.mode = len(text.encode()), 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
        container = self.get_wrapped_container()
        container.put_archive(path.rpartition("/")[0], packed.getvalue())  # pyright: ignore[reportUnknownMemberType]
