"""The proof by which one node forwards a client's requests to another: both are nodes of the same database.

The one idea: nodes share a secret that lies in Postgres. Each side sends a nonce, and authenticates both nonces. The
called node also authenticates its id. So a recorded proof is worthless, and a proof for one node is refused by all
others. With its proof the calling node states the client for which it speaks. From then on, the called node treats the
connection as that client's.

The frames of the calling node have the key of an API that Kafka does not have. Only the listener
`inter.broker.listener.name` accepts them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Coroutine, Sequence

from gateway.net.context import ConnectionInfo, Principal
from gateway.net.requests import Admission, Guard, Requests, UnanswerableError
from protocol.buffer import Buffer
from protocol.errors import ErrorCode
from protocol.framing import Frame

NODE_KEY = b"\x7f\xff"
"""No API has this key."""
HELLO, CLAIM, WELCOME, FAREWELL = b"\0", b"\1", b"\2", b"\3"
NONCE_BYTES = MAC_BYTES = 32
MAX_CLAIM_BYTES = 32 * 1024
"""Largest statement about a client. Its longest part is the name of a principal, which a certificate may give."""

_ALONE = Admission()


class NodeProofError(Exception):
    """Error: the peer is no node of this database, or not the node that was meant."""


def derive_key(secret: bytes) -> bytes:
    """Return the key of proofs between nodes. Decoys are made from the same secret, by another hash and from other
    texts, so a client that asks for decoys learns nothing about the key."""
    return hmac.digest(secret, b"sluice: a node forwards requests to a node", hashlib.sha256)


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Authenticate the parts and their lengths."""
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(key, text, hashlib.sha256)


def _called(key: bytes, node_id: int, caller_nonce: bytes, called_nonce: bytes) -> bytes:
    return _mac(key, b"called", b"%d" % node_id, caller_nonce, called_nonce)


def _calling(key: bytes, caller_nonce: bytes, called_nonce: bytes, claim: bytes) -> bytes:
    return _mac(key, b"calling", caller_nonce, called_nonce, claim)


# --- the calling node -------------------------------------------------------------------------------------------------


def hello(nonce: bytes) -> bytes:
    """Return the first frame of the calling node."""
    return NODE_KEY + HELLO + nonce


def claim(key: bytes, node_id: int, nonce: bytes, answer: bytes, client: ConnectionInfo) -> bytes:
    """Return the second frame of the calling node, after the `answer` of node `node_id`. Raise NodeProofError if that
    node did not give the answer."""
    called_nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _called(key, node_id, nonce, called_nonce)):
        raise NodeProofError(f"the address of node {node_id} leads to another server")
    stated = _state(client)
    return NODE_KEY + CLAIM + _calling(key, nonce, called_nonce, stated) + stated


def farewell() -> bytes:
    """Return the frame by which a stopping node says that the connection ends because of the node, not because of its
    client."""
    return NODE_KEY + FAREWELL


def _state(client: ConnectionInfo) -> bytes:
    principal = client.principal
    return json.dumps(
        {
            "principal": [principal.type, principal.name, principal.by_token],
            "host": client.client_host,
            "listener": client.listener,
            "shared": client.shared,
            "software": [client.client_software_name, client.client_software_version],
        }
    ).encode()


# --- the called node --------------------------------------------------------------------------------------------------


class NodeDoor:
    """Handles the requests of the listener that other nodes call. `requests` serves them: those of clients of this
    listener, and those that nodes forward. So a forwarded request is never forwarded again."""

    def __init__(self, requests: Requests, key: bytes, node_id: Callable[[], int]) -> None:
        self._requests = requests
        self._key = key
        self._node_id = node_id

    def admission(self, frame: Frame) -> Admission:
        return _ALONE if is_proof(frame) else self._requests.admission(frame)

    def handle(self, frame: Frame, connection: ConnectionInfo) -> Coroutine[object, None, Sequence[Buffer]]:
        return self._answer(frame, connection) if is_proof(frame) else self._requests.handle(frame, connection)

    async def refuse(self, frame: Frame, code: ErrorCode, message: str | None) -> Sequence[Buffer]:
        return await self._requests.refuse(frame, code, message)

    async def _answer(self, frame: Frame, connection: ConnectionInfo) -> Sequence[Buffer]:
        try:
            answer = self._prove(bytes(frame), connection)
        except (NodeProofError, ValueError) as error:
            raise UnanswerableError("node_proof", str(error)) from error
        return (len(answer).to_bytes(4, "big") + answer,)

    def _prove(self, frame: bytes, connection: ConnectionInfo) -> bytes:
        kind, text = frame[2:3], frame[3:]
        if kind == HELLO and len(text) == NONCE_BYTES:
            nonce = secrets.token_bytes(NONCE_BYTES)
            connection.challenge = text + nonce
            return nonce + _called(self._key, self._node_id(), text, nonce)
        if kind == FAREWELL:
            connection.is_blameless = True
            return WELCOME
        challenge, connection.challenge = connection.challenge, b""
        if kind != CLAIM or not challenge or len(text) > MAX_CLAIM_BYTES:
            raise NodeProofError("the frames of a proof are out of order")
        proof, stated = text[:MAC_BYTES], text[MAC_BYTES:]
        expected = _calling(self._key, challenge[:NONCE_BYTES], challenge[NONCE_BYTES:], stated)
        if not hmac.compare_digest(proof, expected):
            raise NodeProofError("the peer is no node of this database, or it meant another node")
        _become(connection, stated)
        return WELCOME


def is_proof(frame: Frame) -> bool:
    return frame[:2] == NODE_KEY


def _become(connection: ConnectionInfo, stated: bytes) -> None:
    """Treat the connection as the stated client's."""
    client = json.loads(stated)
    kind, name, by_token = client["principal"]
    connection.principal = Principal(name, kind, by_token)
    connection.client_host = client["host"]
    connection.listener = client["listener"]
    connection.shared = (client["shared"][0], client["shared"][1]) if client["shared"] else None
    connection.client_software_name, connection.client_software_version = client["software"]


class NodeGuard:
    """Guard of a listener whose clients authenticate: a node proves itself instead (`gateway.net.requests.Guard`)."""

    def __init__(self, door: NodeDoor, clients: Guard) -> None:
        self._door = door
        self._clients = clients
        self._proved = False
        # `clients` checks its own limit, which may be too small for a proof.
        self.max_request_bytes = max(clients.max_request_bytes, len(NODE_KEY + CLAIM) + MAX_CLAIM_BYTES)
        self.passed: Callable[[], None] = lambda: None
        clients.passed = lambda: self.passed()

    def admission(self, frame: Frame) -> Admission:
        if self._proved or is_proof(frame):
            return self._door.admission(frame)
        return self._clients.admission(frame)

    def handle(self, frame: Frame, connection: ConnectionInfo) -> Coroutine[object, None, Sequence[Buffer]]:
        if self._proved:
            return self._door.handle(frame, connection)
        if is_proof(frame):
            return self._prove(frame, connection)
        return self._clients.handle(frame, connection)

    async def _prove(self, frame: Frame, connection: ConnectionInfo) -> Sequence[Buffer]:
        chunks = await self._door.handle(frame, connection)
        if frame[2:3] == CLAIM:
            self._proved = True
            self.passed()
        return chunks
