"""What the name of a host says about who can reach it."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether `host` is reached by this machine alone; a name other than localhost may mean anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
