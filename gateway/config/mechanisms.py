"""The SASL mechanisms that a node offers, each with the login module that its settings name.

The one idea: a mechanism is one line here and one in `EXCHANGES` (`gateway/security/authenticator.py`). A test checks
that both are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gateway.config.jaas import OAUTHBEARER_MODULE, PLAIN_MODULE, SCRAM_MODULE

PLAIN, OAUTHBEARER = "PLAIN", "OAUTHBEARER"

LOGIN_MODULES: Mapping[str, str] = MappingProxyType(
    {
        PLAIN: PLAIN_MODULE,
        "SCRAM-SHA-256": SCRAM_MODULE,
        "SCRAM-SHA-512": SCRAM_MODULE,
        OAUTHBEARER: OAUTHBEARER_MODULE,
    }
)
"""Login modules by mechanism, in the order in which settings list the mechanisms."""
