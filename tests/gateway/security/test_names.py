"""The name in a certificate as Java writes it, and upstream's rules for mapping it."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.security.names import MAX_NAME_CHARACTERS, UnusableNameError, mapped, parse_rules, subject
from tests.secured import Authority

DN = "CN=kafka1.example.org,OU=people,O=Sluice\\, Inc.,C=DE"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "authority")


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("/C=DE/O=Sluice, Inc./OU=people/CN=alice", "CN=alice,OU=people,O=Sluice\\, Inc.,C=DE"),
        ("/CN=a=b#c+d", 'CN=a\\=b\\#c\\+d'),
        ("/CN= alice ", "CN=\\ alice\\ "),
        ("/DC=org/DC=example/UID=al/CN=Ä\\\\ö", "CN=Ä\\\\ö,UID=al,DC=example,DC=org"),
        (
            "/O=x/emailAddress=a@b.c",
            "1.2.840.113549.1.9.1=#1605614062" + "2e63" + ",O=x",
        ),
        ("/ST=Bayern/L=München/street=Weg 1/serialNumber=7", "2.5.4.5=#130137,STREET=Weg 1,L=München,ST=Bayern"),
    ],
)  # fmt: skip
def test_a_subject_is_written_as_java_writes_it(authority: Authority, given: str, written: str) -> None:
    name = given.replace("+d", "\\+d")
    assert subject(der(authority.issue(name).certificate)) == written


@given(st.binary(max_size=300))
def test_invalid_certificate_has_no_name(data: bytes) -> None:
    with pytest.raises(UnusableNameError):
        subject(data)


def test_a_certificate_that_is_cut_off_has_no_name(authority: Authority) -> None:
    whole = der(authority.issue("/CN=alice").certificate)
    for size in range(0, len(whole) - 1, 7):
        with pytest.raises(UnusableNameError):
            subject(whole[:size])


@pytest.mark.parametrize(
    ("rules", "name", "made"),
    [
        ("DEFAULT", DN, DN),
        ("RULE:^CN=(.*?),OU=people.*$/$1/", DN, "kafka1.example.org"),
        ("RULE:^CN=(.*?),OU=(.*?),O=.*$/$1@$2/U, DEFAULT", DN, "KAFKA1.EXAMPLE.ORG@PEOPLE"),
        ("RULE:^CN=(.*?),.*$/$1/L,DEFAULT", "CN=Alice,O=x", "alice"),
        ("RULE:^OU=(.*)$/$1/,DEFAULT", DN, DN),
        (r"RULE:.*CN=([^,]+),OU=a\/b.*/$1\/$2\$1/", "CN=x,OU=a/b", "x/$2$1"),
        ("RULE:CN=(.)(.)(.)(.)(.)(.)(.)(.)(.)(.).*/$12$0/", "CN=abcdefghijkl", "a2CN=abcdefghijkl".replace("a2", "a2")),
        ("RULE:(CN=).*(x)?/$1$2/", "CN=y", "CN="),
        ("RULE:^.*$/fixed/,RULE:^.*$/other/", DN, "fixed"),
        # Java replaces each part that fits the pattern, not the whole name.
        ("RULE:CN=(.*?)(,.*)?/$1/", "CN=alice,OU=people", "alice,OU=people"),
        ("RULE:(.*)/$1@x/", "CN=alice", "CN=alice@x@x"),
        # In Java, neither \w nor (?i) knows letters beyond ASCII. U+212A, the Kelvin sign, is K to Python.
        ("RULE:(?i)CN=(kafka)/$1/L,DEFAULT", "CN=\u212aafka", "CN=\u212aafka"),
        (r"RULE:CN=(\w+)/$1/,DEFAULT", "CN=ana\u00e4", "CN=ana\u00e4"),
    ],
)
def test_rules_are_applied_as_upstream_applies_them(rules: str, name: str, made: str) -> None:
    assert mapped(name, parse_rules(rules)) == made


def test_name_that_fits_no_rule_is_refused() -> None:
    rules = parse_rules("RULE:^CN=alice$/alice/")
    assert mapped("CN=alice", rules) == "alice"
    with pytest.raises(UnusableNameError, match="no rule applies"):
        mapped("CN=alice,O=x", rules)
    with pytest.raises(UnusableNameError, match="characters"):
        mapped("x" * (MAX_NAME_CHARACTERS + 1), rules)


@pytest.mark.parametrize("text", ["RULE", "RULE:a", "RULE:(/x/", "RULE:a/b/X", "DEFAULT RULE:a/b/", "default"])
def test_invalid_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_rules(text)
