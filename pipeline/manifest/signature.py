"""Sign and check a text with Ed25519, by the JVM that runs anyway.

Keys are PEM files, as `openssl genpkey -algorithm ed25519` and `openssl pkey -pubout` write them.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from pipeline.errors import PipelineError
from pipeline.jvm import classes

_ALGORITHM = "Ed25519"
_HOW = (
    "Make one with: openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out public.pem."
)


def sign(spark: SparkSession, text: bytes, key: Path) -> str:
    """Return the signature in base64. Raise PipelineError if `key` is no private key."""
    jvm = classes(spark)
    encoded = jvm.java.security.spec.PKCS8EncodedKeySpec(_pem(key, "PRIVATE KEY"))
    signer = jvm.java.security.Signature.getInstance(_ALGORITHM)
    signer.initSign(_key(key, lambda: jvm.java.security.KeyFactory.getInstance(_ALGORITHM).generatePrivate(encoded)))
    signer.update(text)
    return base64.b64encode(bytes(signer.sign())).decode()


def is_signed(spark: SparkSession, text: bytes, signature: str, key: Path) -> bool:
    """Return whether the owner of the public key has signed `text`. Raise PipelineError if `key` is
    not a public key.
    """
    jvm = classes(spark)
    encoded = jvm.java.security.spec.X509EncodedKeySpec(_pem(key, "PUBLIC KEY"))
    checker = jvm.java.security.Signature.getInstance(_ALGORITHM)
    checker.initVerify(_key(key, lambda: jvm.java.security.KeyFactory.getInstance(_ALGORITHM).generatePublic(encoded)))
    checker.update(text)
    try:
        return bool(checker.verify(base64.b64decode(signature, validate=True)))
    except (binascii.Error, Py4JJavaError):
        # A signature of another length is refused by the JVM.
        return False


def _key(path: Path, read: Any) -> Any:
    try:
        return read()
    except Py4JJavaError as error:
        raise PipelineError(f"{path} is not an Ed25519 key.", _HOW) from error


def _pem(path: Path, kind: str) -> bytes:
    try:
        lines = path.read_text().strip().splitlines()
        if lines[:1] != [f"-----BEGIN {kind}-----"] or lines[-1:] != [f"-----END {kind}-----"]:
            raise PipelineError(f"{path} does not hold a {kind.lower()} in PEM.", _HOW)
        return base64.b64decode("".join(lines[1:-1]), validate=True)
    except (OSError, UnicodeDecodeError, binascii.Error) as error:
        raise PipelineError(f"{path} cannot be read as a key ({error}).", _HOW) from error
