"""Which requests come from a program of this machine, and from no web page.

A browser lets any page send requests to 127.0.0.1.  It tells the page's origin when it
does, but not to a page whose own name was pointed at 127.0.0.1 after it was loaded
(DNS rebinding): there the Host header has that name.
"""

import ipaddress
from urllib.parse import urlsplit

from multidict import CIMultiDictProxy

from shoal.domain.addresses import is_loopback

FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")
"""What proxies add: behind one on this machine, everybody comes from 127.0.0.1."""

OWN_SITES = frozenset({"same-origin", "none"})


def is_local(address: str, headers: CIMultiDictProxy[str]) -> bool:
    """Say whether a request from ``address`` was made on this machine, by no page.

    A page that this coordinator itself has served may.
    """
    hosts = headers.getall("Host", [])
    if not is_loopback(address) or len(hosts) != 1 or not _names_loopback(hosts[0]):
        return False
    if any(name in headers for name in FORWARDED):
        return False
    if headers.get("Sec-Fetch-Site", "none") not in OWN_SITES:
        return False
    origins = headers.getall("Origin", [])
    own = {f"http://{hosts[0]}", f"https://{hosts[0]}"}
    return all(origin in own for origin in origins)


def _names_loopback(host: str) -> bool:
    try:
        parts = urlsplit(f"//{host}")
        name, _ = parts.hostname, parts.port  # the port raises if it is none
    except ValueError:
        return False
    if not name or parts.netloc != host or "@" in host:
        return False
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
