"""The network of an address: the part that distinguishes one client from another.

The one idea: a client with IPv6 has a whole network of addresses. Work and memory that addresses share are therefore
shared by network.
"""

from __future__ import annotations

import ipaddress

IPV6_PREFIX_BITS = 64
"""A household or machine has all addresses of such a network."""


def network_of(address: str) -> str:
    """Return the network of an IPv6 address. Any other text is returned, without the slash of `client_host`."""
    try:
        found = ipaddress.ip_address(address.removeprefix("/").partition("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), IPV6_PREFIX_BITS), strict=False))
