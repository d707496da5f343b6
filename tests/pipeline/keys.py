"""Ed25519 key pairs in PEM files, made by OpenSSL."""

from __future__ import annotations

import subprocess
from pathlib import Path


def ed25519_keys(folder: Path, name: str) -> tuple[str, str]:
    """Return the files of a private key and its public key."""
    private, public = str(folder / f"{name}.pem"), str(folder / f"{name}-public.pem")
    _openssl("genpkey", "-algorithm", "ed25519", "-out", private)
    _openssl("pkey", "-in", private, "-pubout", "-out", public)
    return private, public


def _openssl(*given: str) -> None:
    subprocess.run(["openssl", *given], check=True, capture_output=True, timeout=60)
