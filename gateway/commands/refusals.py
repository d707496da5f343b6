"""Sentences for a broker's error codes: the reason, and the next step if one exists."""

from __future__ import annotations

from protocol.errors import ErrorCode

MISSING_ACL = frozenset(
    {
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
    }
)


def code_name(code: int) -> str:
    """Return Kafka's name of an error code, or its number if the code is unknown."""
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"error {code}"


def reason(code: int, message: str | None = None, *, needs: str = "") -> str:
    """Return why a broker refused a request: the broker's `message`, or the code's name.

    `needs` are the options of `sluice acls add` that permit the request, e.g. `--operation read --topic orders`.
    """
    if code in MISSING_ACL:
        step = f"; ask an administrator for `sluice acls add --allow User:NAME {needs}`" if needs else ""
        return f"no ACL permits this ({code_name(code)}){step}"
    if code == ErrorCode.SECURITY_DISABLED:
        return "the broker has no authorizer: set authorizer.class.name on each node"
    return message or code_name(code)
