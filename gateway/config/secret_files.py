"""Secrets in files: the variable `SLUICE_X_FILE` names a file with the value of the secret setting `SLUICE_X`.

The one idea: a file's content takes the place of the variable before the settings are loaded, so no other module knows
of these files. `SLUICE_SET_FILE` names a file with one KEY=VALUE per line, for secrets that have no variable.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SUFFIX = "_FILE"
MAX_SECRET_BYTES = 64 * 1024
"""Largest size of a file with a secret."""


class SecretFileError(Exception):
    """A file that a variable names and that cannot be used. The reason contains no part of the file's content."""

    def __init__(self, variable: str, path: str, reason: str) -> None:
        super().__init__(f"{variable}: {reason}")
        self.variable, self.path, self.reason = variable, path, reason


@dataclass(frozen=True, slots=True)
class SecretFiles:
    """The environment with the contents of files in place of the variables that name them, and these files."""

    environment: Mapping[str, str]
    files: Mapping[str, Path]
    """The file of each variable that is set by a file. The key is `SLUICE_X`, not `SLUICE_X_FILE`."""

    def origin(self, variable: str) -> str:
        """Return where the variable's value came from, as a text for people."""
        path = self.files.get(variable)
        return f"environment {variable}" if path is None else f"file {path} of {variable}{SUFFIX}"


def read_secret_files(environment: Mapping[str, str], secret_variables: Iterable[str]) -> SecretFiles:
    """Read the files that the environment names for these variables. Raise SecretFileError."""
    replaced, files = dict(environment), dict[str, Path]()
    for variable in secret_variables:
        named = replaced.pop(variable + SUFFIX, None)
        if named is None:
            continue
        if variable in environment:
            raise SecretFileError(variable + SUFFIX, named, f"{variable} is set, too: remove one of the two")
        path = Path(named)
        try:
            replaced[variable] = read_secret(path)
        except ValueError as error:
            raise SecretFileError(variable + SUFFIX, named, str(error)) from error
        files[variable] = path
    return SecretFiles(replaced, files)


def read_secret(path: Path) -> str:
    """Return a file's text without the line break at its end. Raise ValueError with the reason."""
    try:
        # A read of a pipe or a device may never end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("must be a file")
            content = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    if len(content) > MAX_SECRET_BYTES:
        raise ValueError(f"has more than {MAX_SECRET_BYTES} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError("is not UTF-8") from error
    text = text.rstrip("\r\n")
    if not text:
        raise ValueError("is empty")
    return text
