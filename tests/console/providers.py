"""An OpenID Connect provider with a login page, real RSA keys, and faults on demand.

The console and the provider are different sites (localhost and 127.0.0.1), so the browser applies its rules for cookies
of other sites.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from tests.tokens import Issuer, base64url, key_set

CLIENT_ID, SECRET = "sluice console", "a:secret/with+signs"


@dataclass
class Provider:
    issuer: str
    signer: Issuer
    user: str = "alice"
    claims: dict[str, Any] = field(default_factory=dict)
    """Claims that replace the correct claims of the next ID tokens."""
    answer: dict[str, str] = field(default_factory=dict)
    """Parameters that replace the correct ones in the next redirects to the console."""
    metadata: dict[str, Any] = field(default_factory=dict)
    status: int = 200
    """HTTP status of every answer except the login page."""
    codes: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """Requests to log in, by the code that the provider issued for them."""
    exchanges: int = 0

    def discovery(self) -> dict[str, Any]:
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
            "authorization_response_iss_parameter_supported": True,
            **self.metadata,
        }

    def redirect(self, asked: Mapping[str, str]) -> str:
        """Return the URL to which the provider sends a person after the login."""
        assert asked["response_type"] == "code"
        assert asked["client_id"] == CLIENT_ID
        assert "openid" in asked["scope"].split()
        assert asked["code_challenge_method"] == "S256"
        code = secrets.token_urlsafe(16)
        self.codes[code] = asked
        said = {"code": code, "state": asked["state"], "iss": self.issuer, **self.answer}
        return f"{asked['redirect_uri']}?{urlencode(said)}"

    def exchange(self, form: Mapping[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        self.exchanges += 1
        user, _, password = base64.b64decode(authorization.removeprefix("Basic ")).decode().partition(":")
        if (unquote(user), unquote(password)) != (CLIENT_ID, SECRET):
            return 401, {"error": "invalid_client"}
        asked = self.codes.pop(form.get("code", ""), None)
        challenge = base64url(hashlib.sha256(form.get("code_verifier", "").encode()).digest())
        if (
            asked is None
            or form.get("grant_type") != "authorization_code"
            or form.get("redirect_uri") != asked["redirect_uri"]
            or challenge != asked["code_challenge"]
        ):
            return 400, {"error": "invalid_grant"}
        now = int(time.time())
        right = {
            "iss": self.issuer,
            "sub": self.user,
            "aud": CLIENT_ID,
            "iat": now - 1,
            "exp": now + 60,
            "nonce": asked["nonce"],
        }
        token = self.signer.token(right, **self.claims)
        return 200, {"access_token": "unused", "token_type": "Bearer", "expires_in": 60, "id_token": token}

    def settings(self) -> dict[str, str]:
        return {
            "console.oidc.issuer": self.issuer,
            "console.oidc.client.id": CLIENT_ID,
            "console.oidc.client.secret": SECRET,
            "sasl.oauthbearer.clock.skew.seconds": "5",
        }


@contextlib.contextmanager
def provider(directory: Path) -> Iterator[Provider]:
    signer = Issuer(directory)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
            if parts.path == "/.well-known/openid-configuration":
                self._json(place.status, place.discovery())
            elif parts.path == "/keys":
                self._answer(place.status, "application/json", key_set(signer.jwk()))
            elif parts.path == "/authorize":
                target = escape(place.redirect(asked), quote=True)
                page = (
                    f'<!doctype html><title>Provider</title><h1>Provider</h1><a href="{target}">I am {place.user}</a>'
                )
                self._answer(200, "text/html", page.encode())
            else:
                self._answer(404, "text/plain", b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            status, said = place.exchange(form, self.headers.get("Authorization", ""))
            self._json(place.status if place.status != 200 else status, said)

        def _json(self, status: int, said: Mapping[str, Any]) -> None:
            self._answer(status, "application/json", json.dumps(said).encode())

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    place = Provider(f"http://localhost:{server.server_address[1]}", signer)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield place
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
