"""The end of a certificate's validity, read from its DER (RFC 5280), because `ssl` cannot show a program's own
certificate.

The one idea: five elements of the certificate precede the validity, and each begins with its length.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17


def not_after(pem: str) -> datetime | None:
    """Return the end of the validity of the first certificate in `pem`; None if it cannot be read."""
    found = _PEM.search(pem)
    try:
        return None if found is None else _not_after(ssl.PEM_cert_to_DER_cert(found[0]))
    except (IndexError, ValueError):
        return None


def _not_after(der: bytes) -> datetime:
    _, certificate, _ = _element(der, 0)
    _, position, _ = _element(der, certificate)
    tag, _, end = _element(der, position)
    if tag == _VERSION:
        position = end
    for _ in ("serial number", "signature", "issuer"):
        _, _, position = _element(der, position)
    _, start, _ = _element(der, position)
    _, _, position = _element(der, start)
    tag, begin, end = _element(der, position)
    layout = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(der[begin:end].decode("ascii"), layout).replace(tzinfo=UTC)


def _element(der: bytes, position: int) -> tuple[int, int, int]:
    """Return the tag of the element at a position, and the positions at which its content begins and ends."""
    tag, length, begin = der[position], der[position + 1], position + 2
    if length & 0x80:
        width = length & 0x7F
        length, begin = int.from_bytes(der[begin : begin + width], "big"), begin + width
    return tag, begin, begin + length
