"""Bytes in the forms that people copy: hexadecimal, base64, or a packet dump of tcpdump or xxd.

The one idea: the text's own form shows which of these it is. A packet begins with the headers of IP and TCP; they are
skipped.
"""

from __future__ import annotations

import base64
import binascii
import re

_DUMP_LINE = re.compile(r"^\s*(?:0x)?[0-9a-fA-F]{4,8}:\s+((?:[0-9a-fA-F]{2,4} ?)+)(?:\s.*)?$")
_TCP = 6
_IPV4_HEAD_BYTES, _IPV6_HEAD_BYTES, _TCP_HEAD_BYTES = 20, 40, 20


def bytes_of(text: str) -> bytes:
    """Return the bytes that a text shows. Raise ValueError if it is none of the known forms."""
    lines = [line for line in text.splitlines() if line.strip()]
    dumped = [found[1] for line in lines if (found := _DUMP_LINE.match(line))]
    if dumped:
        # Before the bytes tcpdump prints a line with times and addresses, which does not belong to the dump.
        return _payload(bytes.fromhex("".join("".join(dumped).split())))
    joined = re.sub(r"[\s:]", "", text)
    try:
        return bytes.fromhex(joined)
    except ValueError:
        pass
    try:
        return base64.b64decode(joined, validate=True)
    except binascii.Error:
        raise ValueError("the bytes are neither hexadecimal, nor base64, nor a dump of tcpdump -X or xxd") from None


def _payload(packet: bytes) -> bytes:
    """Return what a TCP packet carries, or the bytes as they are if they are no IP packet."""
    if len(packet) < _IPV4_HEAD_BYTES:
        return packet
    version = packet[0] >> 4
    if version == 4 and packet[9] == _TCP and int.from_bytes(packet[2:4], "big") == len(packet):
        tcp = packet[(packet[0] & 15) * 4 :]
    elif version == 6 and packet[6] == _TCP and int.from_bytes(packet[4:6], "big") + _IPV6_HEAD_BYTES == len(packet):
        tcp = packet[_IPV6_HEAD_BYTES:]
    else:
        return packet
    return tcp[(tcp[12] >> 4) * 4 :] if len(tcp) >= _TCP_HEAD_BYTES else packet
