"""Members in processes of their own, which a scenario can kill, stop and continue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

from tests.compat.python.journal import Journal
from tests.compat.python.options import MemberOptions

CHILD_SECONDS = 30.0


class Child(ABC):
    """A member's process. `name` is the member's name. The `journal` records the end of its ownership if the member
    itself cannot.
    """

    name: str
    journal: Journal

    @property
    @abstractmethod
    def process(self) -> subprocess.Popen[bytes]: ...

    @abstractmethod
    def stop(self) -> None:
        """Send SIGTERM, and wait until the member has closed in order."""

    def kill(self) -> None:
        """Kill the process with kill −9."""
        self.process.kill()
        self.process.wait()
        self.journal.killed(self.name)

    def freeze(self) -> None:
        """Send SIGSTOP: the process keeps its connections open, but no longer responds."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
        self.journal.killed(self.name)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class ProgramChild(Child):
    """A suite's program that runs as one member until SIGTERM. The program itself writes to the delivery log."""

    def __init__(self, command: Sequence[str], bootstrap: str, options: MemberOptions, journal: Journal) -> None:
        self.name, self.journal = options.name, journal
        environment = {
            **os.environ,
            "COMPAT_BOOTSTRAP": bootstrap,
            "COMPAT_MEMBER": "1",
            "COMPAT_MEMBER_NAME": options.name,
            "COMPAT_GROUP": options.group,
            "COMPAT_TOPIC": ",".join(options.topics),
            "COMPAT_ASSIGNOR": options.assignor,
            "COMPAT_COMMIT": options.commit,
            "COMPAT_DELIVERIES_FILE": str(journal.path),
        }
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._process

    def stop(self) -> None:
        self._process.terminate()
        assert self._process.wait(CHILD_SECONDS) == 0, f"{self.name} ended with {self._process.returncode}"
