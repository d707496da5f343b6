"""Directories survive a power failure once they are created."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage.private_files import make_directory


def test_the_name_of_each_created_directory_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    real = os.fsync

    def sync(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    assert make_directory(tmp_path / "a" / "b" / "log")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    assert not make_directory(tmp_path / "a" / "b" / "log")
