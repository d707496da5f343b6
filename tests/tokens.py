"""An issuer of access tokens. OpenSSL makes its keys and signatures, and a local server publishes the keys."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Thread
from typing import Any

AUDIENCE, ISSUER = "gateway", "https://issuer.example.org"


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class Issuer:
    """An issuer with one RSA key."""

    def __init__(self, directory: Path, kid: str = "first", *, bits: int = 2048, exponent: int = 65537) -> None:
        self.kid = kid
        self.key = directory / f"{kid}.pem"
        options = ("-pkeyopt", f"rsa_keygen_bits:{bits}", "-pkeyopt", f"rsa_keygen_pubexp:{exponent}")
        _openssl("genpkey", "-algorithm", "RSA", *options, "-out", str(self.key))
        said = _openssl("rsa", "-in", str(self.key), "-noout", "-text").decode()
        self.modulus, self.private_exponent = (_number(said, name) for name in ("modulus", "privateExponent"))
        self.exponent = exponent

    def jwk(self, **more: Any) -> dict[str, Any]:
        size = (self.modulus.bit_length() + 7) // 8
        e = self.exponent.to_bytes((self.exponent.bit_length() + 7) // 8, "big")
        n = self.modulus.to_bytes(size, "big")
        return {"kty": "RSA", "use": "sig", "kid": self.kid, "n": base64url(n), "e": base64url(e), **more}

    def token(
        self, claims: Mapping[str, Any] | None = None, header: Mapping[str, Any] | None = None, **more: Any
    ) -> str:
        """Return a signed token. `claims` replaces all correct claims. `more` changes some of them; None removes a
        claim.
        """
        now = int(time.time())
        right = {"sub": "alice", "iat": now - 1, "exp": now + 300, "aud": AUDIENCE, "iss": ISSUER, "scope": ["a", "b"]}
        said = {name: value for name, value in {**(claims or right), **more}.items() if value is not None}
        head = {"alg": "RS256", "kid": self.kid, **(header or {})}
        head = {name: value for name, value in head.items() if value is not None}
        signed = f"{base64url(json.dumps(head).encode())}.{base64url(json.dumps(said).encode())}"
        return f"{signed}.{base64url(self.sign(signed.encode(), head['alg']))}"

    def sign(self, data: bytes, algorithm: str = "RS256") -> bytes:
        return _openssl("dgst", f"-sha{algorithm.removeprefix('RS')}", "-sign", str(self.key), given=data)

    def sign_raw(self, padded: bytes) -> bytes:
        """Sign `padded` without checking its content. It must be as long as the key."""
        signature = pow(int.from_bytes(padded, "big"), self.private_exponent, self.modulus)
        return signature.to_bytes(len(padded), "big")


def key_set(*keys: Mapping[str, Any]) -> bytes:
    return json.dumps({"keys": keys}).encode()


def client_first(token: str, authorization_id: str = "", extensions: str = "") -> bytes:
    asked = f"a={authorization_id}" if authorization_id else ""
    return f"n,{asked},\x01auth=Bearer {token}\x01{extensions}\x01".encode()


def oauth_settings(jwks_url: str, listener: str = "asking") -> dict[str, str]:
    return {
        f"listener.name.{listener}.sasl.enabled.mechanisms": "OAUTHBEARER",
        f"listener.name.{listener}.sasl.oauthbearer.jwks.endpoint.url": jwks_url,
        "sasl.oauthbearer.expected.audience": AUDIENCE,
        "sasl.oauthbearer.expected.issuer": ISSUER,
        "sasl.oauthbearer.clock.skew.seconds": "5",
    }


class Published:
    """A server that responds to each path with fixed content. `asked` counts the requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: dict[str, bytes] = {}
        self.asked = 0
        self._told = Condition()

    def was_asked(self) -> None:
        with self._told:
            self.asked += 1
            self._told.notify_all()

    def until_asked(self, count: int) -> None:
        with self._told:
            assert self._told.wait_for(lambda: self.asked >= count, 60)


@contextlib.contextmanager
def published() -> Iterator[Published]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place.was_asked()
            self._answer()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            self._answer()

        def _answer(self) -> None:
            body = place.answers.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    place = Published(f"http://127.0.0.1:{server.server_address[1]}")
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield place
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _number(said: str, name: str) -> int:
    found = re.search(rf"^{name}:\n((?: +[0-9a-f:]+\n)+)", said, re.MULTILINE)
    assert found is not None
    return int(re.sub(r"[^0-9a-f]", "", found[1]), 16)


def _openssl(*words: str, given: bytes = b"") -> bytes:
    return subprocess.run(["openssl", *words], input=given, check=True, capture_output=True, timeout=60).stdout
