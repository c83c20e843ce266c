"""Addresses of hosts."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether a name or an IP address means the machine that it is said on."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
