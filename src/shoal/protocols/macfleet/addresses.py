"""The addresses at which nodes are had, as URLs."""

from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qs, urlencode, urlsplit

from shoal.domain.errors import ConfigError
from shoal.protocols.crowd import plainly
from shoal.protocols.macfleet.config import HEARTBEAT_PORT
from shoal.protocols.macfleet.fleet.registry import Address

EXPECTED = (
    "expected http://HOST:PORT of a Shoal coordinator, or HOST:PORT of a node's "
    "heartbeats"
)
SECURE = "tls-any"  # TLS with whoever answers: who that is the session finds out
PLAIN = "tcp"
STREAMS = frozenset({PLAIN, "tls", SECURE})
WEB = frozenset({"http", "https", "ws", "wss"})
TRANSPORT = "transport"  # the label of its port
FLEET = "fleet"  # the parameter that says which fleet a node is of


def contact(address: str) -> Address:
    """Return where a node's heartbeats are, given as HOST:PORT, or as HOST alone.

    Raises ConfigError if it is no address.
    """
    expected = f"--macfleet-peers {address!a}: expected HOST:PORT"
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{expected}: {error}") from error
    odd = any(letter == "@" or letter.isspace() for letter in address)
    if not host or parts.netloc != address or odd:
        raise ConfigError(expected)
    return Address(host, port or HEARTBEAT_PORT)


def transport_url(address: str, *, secure: bool) -> str:
    """Return how to connect to HOST:PORT."""
    return f"{SECURE if secure else PLAIN}://{address}"


def address(host: str, ports: Mapping[str, int]) -> str:
    """Return where one of our coordinators has its transport, by its ports' labels.

    Empty: it has none.  In an open fleet it speaks no TLS, to whomever.
    """
    for label, secure in ((TRANSPORT, True), (plainly(TRANSPORT), False)):
        if label in ports:
            return transport_url(f"{host}:{ports[label]}", secure=secure)
    return ""


def split(url: str) -> SplitResult:
    """Split a URL, or HOST:PORT.

    Raises ConfigError if it is none that this wire can do anything with.
    """
    full = url if "://" in url else f"{PLAIN}://{url}"
    try:
        parts = urlsplit(full)
        host, port = parts.hostname, parts.port  # the port raises if it is none
    except ValueError as error:
        raise ConfigError(f"URL {shown(url)!a}: {error}; {EXPECTED}") from error
    if parts.scheme not in STREAMS and parts.scheme not in WEB:
        raise ConfigError(f"URL {shown(url)!a}: {EXPECTED}")
    if not host or (parts.scheme in STREAMS and not port):
        missing = "port" if host else "host"
        raise ConfigError(f"URL {shown(url)!a}: no {missing}; {EXPECTED}")
    return parts


def fleet_of(parts: SplitResult) -> str:
    """Return the id of the fleet that a URL names; empty: none."""
    return parse_qs(parts.query).get(FLEET, [""])[0]


def within_fleet(url: str, fleet: str) -> str | None:
    """Return a node's URL with the id of its fleet.

    None: it names another, or is ``tcp://..``, as nodes of open fleets have it.

    Raises ConfigError as ``split`` does.
    """
    named = fleet_of(split(url))
    if url.startswith(f"{PLAIN}://") or named not in ("", fleet):
        return None
    return url if named or not fleet else f"{url}?{urlencode({FLEET: fleet})}"


def shown(url: str) -> str:
    """Return a URL as messages show it: without what may be secret."""
    return url.partition("?")[0]
