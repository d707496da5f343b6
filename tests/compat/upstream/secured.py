"""A gateway with authentication, by SASL or by TLS, for tests of other projects that need one. The one idea: these
suites normally run against a gateway without authentication. Tests that need authentication get this gateway, with
users, certificates and the variables of their environments.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.config.jaas import PLAIN_MODULE
from tests.compat.suites import ROOT
from tests.gateway_process import GatewayProcess, free_ports
from tests.postgres import short_directory
from tests.secured import Authority, Certificate
from tests.tokens import Issuer, Published, base64url, key_set, oauth_settings, published

USER, PASSWORD = "tester", "tester-secret"
KEY_PASSWORD = "key-secret"


@dataclass(frozen=True, slots=True)
class SecuredGateway:
    sasl: str
    """Address of the SASL_PLAINTEXT listener with PLAIN and SCRAM-SHA-256."""
    oauth: str
    """Address of the SASL_PLAINTEXT listener with OAUTHBEARER."""
    tls: str
    authority: Path
    client: Certificate
    """Certificate with a key that has KEY_PASSWORD."""
    environment: Mapping[str, str]
    """Variables of librdkafka's tests: the client's certificates in every encoding, and the address that issues access
    tokens.
    """


@contextlib.contextmanager
def secured_gateway() -> Iterator[SecuredGateway]:
    with contextlib.ExitStack() as stack:
        certificates = stack.enter_context(short_directory())
        authority = Authority(certificates, "authority")
        client = authority.issue("/CN=client", password=KEY_PASSWORD)
        data = stack.enter_context(short_directory())
        issuer, place = Issuer(certificates), stack.enter_context(published())
        place.answers["/keys"] = key_set(issuer.jwk())
        opened, sasl, oauth, tls = free_ports(4)
        gateway = GatewayProcess(
            data,
            database_url=None,
            settings={
                "listeners": f"OPEN://127.0.0.1:{opened},SASL://127.0.0.1:{sasl},OAUTH://127.0.0.1:{oauth},"
                f"TLS://127.0.0.1:{tls}",
                "listener.security.protocol.map": "OPEN:PLAINTEXT,SASL:SASL_PLAINTEXT,OAUTH:SASL_PLAINTEXT,TLS:SSL",
                **oauth_settings(f"{place.url}/keys", "oauth"),
                "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
                "listener.name.sasl.plain.sasl.jaas.config": f'{PLAIN_MODULE} required user_{USER}="{PASSWORD}";',
                "ssl.keystore.location": str(authority.issue("/CN=localhost").whole),
                "ssl.truststore.location": str(authority.certificate),
                "ssl.client.auth": "required",
            },
            environment={},
        )
        stack.callback(gateway.close)
        gateway.start()
        words = ["users", "add", USER, "--mechanism", "SCRAM-SHA-256", "--password-stdin", "--data-dir", str(data)]
        subprocess.run(
            [sys.executable, "-m", "gateway.cli", *words],
            cwd=ROOT,
            input=f"{PASSWORD}\n",
            text=True,
            check=True,
            stdout=sys.stderr,
        )
        yield SecuredGateway(
            sasl=f"127.0.0.1:{sasl}",
            oauth=f"127.0.0.1:{oauth}",
            tls=f"127.0.0.1:{tls}",
            authority=authority.certificate,
            client=client,
            environment={**_in_every_encoding(certificates, authority, client), **_given_out(issuer, place)},
        )


def _given_out(issuer: Issuer, place: Published) -> dict[str, str]:
    """Publish tokens for librdkafka's test of OIDC: a valid token, a token signed by an unknown key, and an expired
    token.
    """
    now = int(time.time())
    right = issuer.token(exp=now + 3_600)
    tokens = {
        "VALID_OIDC_URL": right,
        "INVALID_OIDC_URL": f"{right.rpartition('.')[0]}.{base64url(bytes(256))}",
        "EXPIRED_TOKEN_OIDC_URL": issuer.token(iat=now - 7_200, exp=now - 3_600),
    }
    for name, token in tokens.items():
        answer = {"access_token": token, "token_type": "Bearer", "expires_in": 3_600}
        place.answers[f"/{name}"] = json.dumps(answer).encode()
    return {name: f"{place.url}/{name}" for name in tokens}


def _in_every_encoding(directory: Path, authority: Authority, client: Certificate) -> dict[str, str]:
    made = {name: directory / name for name in ("client.p12", "client.crt.der", "client.key.der", "authority.der")}
    key, secret = ("-in", str(client.key)), ("-passin", f"pass:{KEY_PASSWORD}")
    for command in (
        [
            *("pkcs12", "-export", "-inkey", str(client.key), "-in", str(client.certificate), *secret),
            *("-certfile", str(authority.certificate), "-passout", f"pass:{KEY_PASSWORD}"),
            *("-out", str(made["client.p12"])),
        ],
        ["x509", "-in", str(client.certificate), "-outform", "DER", "-out", str(made["client.crt.der"])],
        ["pkey", *key, *secret, "-outform", "DER", "-out", str(made["client.key.der"])],
        ["x509", "-in", str(authority.certificate), "-outform", "DER", "-out", str(made["authority.der"])],
    ):
        subprocess.run(["openssl", *command], check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    return {
        "SSL_password": KEY_PASSWORD,
        "SSL_pkcs": str(made["client.p12"]),
        "SSL_pub_pem": str(client.certificate),
        "SSL_pub_der": str(made["client.crt.der"]),
        "SSL_priv_pem": str(client.key),
        "SSL_priv_der": str(made["client.key.der"]),
        "SSL_ca_der": str(made["authority.der"]),
        "SSL_all_cas_pem": str(authority.certificate),
    }
