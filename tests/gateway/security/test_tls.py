"""TLS contexts of listeners: which keys and certificates are accepted. A refusal names the file or setting, before any
client connects.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import ssl
from pathlib import Path

import pytest

from gateway.config.definition import ConfigError
from gateway.config.security import TlsSettings
from gateway.security.tls import identify_by, make_context
from tests.secured import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "authority")


@pytest.fixture(scope="module")
def settings(authority: Authority) -> TlsSettings:
    return TlsSettings(
        key_file=str(authority.issue("/CN=localhost", password="hush").whole),
        certificate_chain="",
        key="",
        key_password="hush",
        trusted_file=str(authority.certificate),
        trusted=None,
        client_auth="required",
        protocols=("TLSv1.2", "TLSv1.3"),
        principal_rules="DEFAULT",
    )


def test_files_and_texts_are_read(settings: TlsSettings, authority: Authority) -> None:
    issued = authority.issue("/CN=localhost")
    in_one_line = dataclasses.replace(
        settings,
        key_file=None,
        key=issued.key.read_text().replace("\n", " "),
        certificate_chain=issued.certificate.read_text().replace("\n", " "),
        trusted_file=None,
        trusted=authority.certificate.read_text().replace("\n", " "),
    )
    for each in (settings, in_one_line):
        assert make_context(each, lambda reason: None).cert_store_stats()["x509_ca"] == 1


BEYOND_ASCII = "-----BEGIN CERTIFICATE-----\nä\n-----END CERTIFICATE-----"


def test_unusable_key_or_certificate_is_refused_without_its_content(settings: TlsSettings, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    pipe = tmp_path / "pipe.pem"
    os.mkfifo(pipe)
    for changed, named in (
        ({"key_file": str(pipe)}, "ssl.keystore.location"),
        ({"trusted_file": "/dev/zero"}, "ssl.truststore.location"),
        (
            {"trusted_file": None, "trusted": "-----BEGIN CERTIFICATE-----\nä\n-----END CERTIFICATE-----"},
            "ssl.truststore.location",
        ),
        ({"key_file": str(tmp_path / "absent.pem")}, "ssl.keystore.location"),
        ({"key_file": str(nothing)}, "ssl.keystore.location"),
        ({"key_password": "wrong"}, "ssl.keystore.location"),
        ({"key_password": None}, "ssl.keystore.location"),
        ({"key_file": None, "key": "nothing"}, "ssl.keystore.location"),
        ({"trusted_file": str(nothing)}, "ssl.truststore.location"),
        ({"trusted_file": None, "trusted": "nothing"}, "ssl.truststore.location"),
    ):
        with pytest.raises(ConfigError) as refused:
            make_context(dataclasses.replace(settings, **changed), lambda reason: None)
        assert refused.value.name == named
        assert "hush" not in str(refused.value)
    with pytest.raises(ConfigError, match="expected DEFAULT or RULE"):
        identify_by(dataclasses.replace(settings, principal_rules="RULE:x"))


def test_no_file_with_a_key_is_left(
    settings: TlsSettings, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    issued = authority.issue("/CN=localhost")
    given = {"key_file": None, "key": issued.key.read_text(), "certificate_chain": issued.certificate.read_text()}
    make_context(dataclasses.replace(settings, **given), lambda reason: None)
    with pytest.raises(ConfigError):
        make_context(dataclasses.replace(settings, **{**given, "key": "nothing"}), lambda reason: None)
    assert list(tmp_path.iterdir()) == []


def test_silent_handshake_does_not_block_others(settings: TlsSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.security.tls.MAX_HANDSHAKES", 2)
    reasons: list[str] = []
    context = make_context(settings, reasons.append)

    def begun() -> ssl.SSLObject:
        handshake = context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True)
        with pytest.raises(ssl.SSLWantReadError):
            handshake.do_handshake()
        return handshake

    first, second, third = begun(), begun(), begun()
    assert reasons == ["too many handshakes at once"]
    with pytest.raises(ssl.SSLError, match="too many handshakes"):
        first.do_handshake()
    for waiting in (second, third):
        with pytest.raises(ssl.SSLWantReadError):
            waiting.do_handshake()
    del waiting, second, third
    gc.collect()
    assert not context.pending, "who is gone has no place"
