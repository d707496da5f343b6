"""SCRAM with the examples of RFC 7677 and later RFCs, and with attempts that must be refused."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.security import scram
from gateway.security.scram import (
    DEFAULT_ITERATIONS,
    MECHANISMS,
    ScramError,
    ScramMechanism,
    ScramServer,
    credential,
    decoy,
    parse_client_first,
    salted_password,
)
from tests.secured import ScramClient

SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")


def known(mechanism: ScramMechanism, user: str, password: str, salt: bytes = SALT, iterations: int = 4096):
    return credential(user, mechanism, salted_password(mechanism, password, salt, iterations), salt, iterations)


def test_the_exchange_of_rfc_7677(monkeypatch: pytest.MonkeyPatch) -> None:
    nonce = b"%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    first = parse_client_first(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO")
    server = ScramServer(first, known(ScramMechanism.SHA_256, "user", "pencil"))
    monkeypatch.setattr(server, "_nonce", "rOprNGfwEbeRWgbNEkqO" + nonce.decode())
    server_first = f"r={'rOprNGfwEbeRWgbNEkqO' + nonce.decode()},s={base64.b64encode(SALT).decode()},i=4096"
    monkeypatch.setattr(server, "_signed", f"{first.bare},{server_first},")
    final = (
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    )
    assert server.finish(final) == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


@pytest.mark.parametrize("mechanism", list(ScramMechanism))
def test_a_password_is_proven_and_the_server_proves_itself(mechanism: ScramMechanism) -> None:
    client = ScramClient(mechanism.hash_name, "a,b=c", "pencil")
    server = ScramServer(parse_client_first(client.first), known(mechanism, "a,b=c", "pencil"))
    assert server.finish(client.final(server.first)) == client.expected


@pytest.mark.parametrize("mechanism", list(ScramMechanism))
def test_another_password_and_a_decoy_are_refused_alike(mechanism: ScramMechanism) -> None:
    absent = decoy("absent", mechanism, b"secret")
    for held in (known(mechanism, "user", "pencil"), absent):
        client = ScramClient(mechanism.hash_name, held.user, "crayon")
        server = ScramServer(parse_client_first(client.first), held)
        with pytest.raises(ScramError, match="wrong password, or no such user"):
            server.finish(client.final(server.first))
    assert (absent.iterations, len(absent.salt)) == (DEFAULT_ITERATIONS, scram.SALT_BYTES)
    assert absent == decoy("absent", mechanism, b"secret"), "who asks twice must not see a difference"
    assert absent.salt != decoy("other", mechanism, b"secret").salt
    assert absent.salt != decoy("absent", mechanism, b"other secret").salt
    assert len(absent.stored_key) == len(known(mechanism, "user", "pencil").stored_key)


def test_a_proof_for_another_exchange_is_refused() -> None:
    client = ScramClient("sha256", "user", "pencil")
    held = known(ScramMechanism.SHA_256, "user", "pencil")
    one, other = (ScramServer(parse_client_first(client.first), held) for _ in range(2))
    assert one.first != other.first
    with pytest.raises(ScramError, match="another nonce"):
        other.finish(client.final(one.first))


def test_names_are_read_as_upstream_reads_them() -> None:
    first = parse_client_first(b"n,a=a=2Cb,n=a=2Cb=3D,r=nonce,ext=1,tokenauth=true")
    assert (first.name, first.authorization_id, first.nonce) == ("a,b=", "a=2Cb", "nonce")
    assert first.bare == "n=a=2Cb=3D,r=nonce,ext=1,tokenauth=true"


def test_a_mandatory_extension_is_refused() -> None:
    with pytest.raises(ScramError, match=r"extension \(m=\)"):
        parse_client_first(b"n,,m=x,n=user,r=nonce")


def test_the_nonce_of_an_old_librdkafka_is_named() -> None:
    """The message names old librdkafka releases, which send the client's nonce before the combined nonce."""
    client = ScramClient("sha256", "user", "pencil", nonce="abc")
    server = ScramServer(parse_client_first(client.first), known(ScramMechanism.SHA_256, "user", "pencil"))
    final = client.final(server.first)
    assert b",r=abc" in final
    with pytest.raises(ScramError, match=r"librdkafka before 2\.6\.1 .* upgrade the client, or use PLAIN over TLS"):
        server.finish(final.replace(b",r=abc", b",r=abcabc", 1))


@pytest.mark.parametrize(
    ("extensions", "by_token"),
    [
        (b"", False),
        (b",tokenauth=true", True),
        (b",a=1,tokenauth=True,b=x=y", True),
        (b",tokenauth=yes", False),
        (b",TOKENAUTH=true", False),
        (b",other=tokenauth", False),
        (b",tokenauth=true,tokenauth=false", False),
    ],
)
def test_token_extension_marks_the_name_as_a_tokens(extensions: bytes, by_token: bool) -> None:
    assert parse_client_first(b"n,,n=user,r=nonce" + extensions).by_token is by_token


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"y,,n=user,r=nonce",
        b"p=tls-unique,,n=user,r=nonce",
        b"n,,n=,r=nonce",
        b"n,,n=user,r=",
        b"n,,n=us=er,r=nonce",
        b"n,,n=user,r=non ce",
        "n,,n=üser,r=nonce".encode(),
        b"n,,n=user,r=nonce,",
        b"n,,n=user\0,r=nonce",
        b"n,,n=" + b"u" * scram.MAX_MESSAGE_BYTES + b",r=nonce",
    ],
)
def test_a_malformed_first_message_is_refused(message: bytes) -> None:
    with pytest.raises(ScramError):
        parse_client_first(message)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_as_an_error_of_the_exchange(message: bytes) -> None:
    server = ScramServer(parse_client_first(b"n,,n=user,r=nonce"), decoy("user", ScramMechanism.SHA_512, b""))
    for read in (parse_client_first, server.finish):
        with pytest.raises(ScramError):
            read(message)


def test_mechanisms_have_their_names() -> None:
    assert {name: (int(each), each.hash_name) for name, each in MECHANISMS.items()} == {
        "SCRAM-SHA-256": (1, "sha256"),
        "SCRAM-SHA-512": (2, "sha512"),
    }
