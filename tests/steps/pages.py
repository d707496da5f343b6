"""Code blocks of a documentation page, and a shell that runs them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.packages import ROOT, outside


def blocks(page: str, language: str, heading: str = "") -> list[str]:
    """Return the blocks of a language on a page, or only those of the section below `heading`."""
    text = (ROOT / page).read_text()
    if heading:
        (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
        text = section
    return re.findall(rf"^[ ]*```{language}\n(.*?)^[ ]*```$", text, re.DOTALL | re.MULTILINE)


def replaced(block: str, changes: Mapping[str, str]) -> str:
    """Return a block in which some words are replaced. Raise AssertionError if the block lacks one of them."""
    for written, word in changes.items():
        assert written in block, f"{written!r} is not in the block:\n{block}"
        block = block.replace(written, word)
    return block


class Shell:
    """A shell in one directory, without the suite's variables and packages."""

    def __init__(self, directory: Path, *, path: str = "", **variables: str) -> None:
        """`path` is searched before the machine's own PATH."""
        self.directory = directory
        self.environment = outside(**variables)
        own = [part for part in self.environment["PATH"].split(":") if not part.startswith(str(ROOT))]
        self.environment["PATH"] = ":".join([path, *own] if path else own)

    def run(self, block: str, *, seconds: float) -> str:
        """Run a block and return its output. If it fails, raise AssertionError with the output."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, f"{block}\nended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def start(self, block: str, output: Path) -> subprocess.Popen[bytes]:
        """Start a block that is one command. The command replaces the shell and writes its output to a file."""
        with output.open("wb") as said:
            return subprocess.Popen(
                ["bash", "-euc", f"exec {block}"],
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
