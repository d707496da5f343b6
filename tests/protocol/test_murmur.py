"""The hash by which records with a key are assigned to partitions."""

from __future__ import annotations

from protocol.murmur import murmur2

JAVA = {  # upstream: UtilsTest.testMurmur2
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def test_murmur2_equals_javas_with_the_sign_bit_cleared() -> None:
    assert {key: murmur2(key) for key in JAVA} == {key: value & 0x7FFFFFFF for key, value in JAVA.items()}
