"""A Postgres of a test's own. The test can restore its files to an earlier state."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.embedded import EmbeddedPostgres
from tests.postgres import LoopThread, cluster_directory


class RestorablePostgres:
    """A Postgres of the test's own. The test can restore its files to an earlier state."""

    def __init__(self, loop: LoopThread, directory: Path) -> None:
        self._loop = loop
        self._directory = directory
        self.start()

    def start(self) -> None:
        self._server = EmbeddedPostgres(self._directory)
        self.url = self._loop.run(self._server.start())

    def stop(self) -> None:
        self._loop.run(self._server.stop())

    @property
    def _saved(self) -> Path:
        return self._directory / "saved"

    def save(self) -> None:
        self.stop()
        shutil.copytree(self._server.cluster_dir, self._saved, symlinks=True, copy_function=_copy_owned)
        _own(self._server.cluster_dir, self._saved)
        self.start()

    @contextmanager
    def promoted_copy(self) -> Iterator[str]:
        """Run a second server on the saved files, as a standby that was behind and has been promoted. Yield its URL."""
        with cluster_directory() as directory:
            server = EmbeddedPostgres(directory)
            self._saved.rename(server.cluster_dir)
            try:
                yield self._loop.run(server.start())
            finally:
                self._loop.run(server.stop())

    def put_back(self) -> None:
        self.stop()
        shutil.rmtree(self._server.cluster_dir)
        self._saved.rename(self._server.cluster_dir)
        self.start()


def _copy_owned(source: str, target: str) -> str:
    copied = shutil.copy2(source, target)
    _own(Path(source), Path(target))
    return copied


def _own(source: Path, target: Path) -> None:
    for path in [source, *(source.rglob("*") if source.is_dir() else ())]:
        stat = path.lstat()
        other = target / path.relative_to(source)
        if other.exists():
            shutil.chown(other, stat.st_uid, stat.st_gid)


@contextmanager
def restorable_postgres() -> Iterator[RestorablePostgres]:
    loop = LoopThread()
    try:
        with cluster_directory() as directory:
            server = RestorablePostgres(loop, directory)
            try:
                yield server
            finally:
                server.stop()
    finally:
        loop.close()
