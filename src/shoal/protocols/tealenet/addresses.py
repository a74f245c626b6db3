"""The addresses at which peers and relays are had, as URLs."""

from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

from shoal.domain.errors import ConfigError
from shoal.protocols.crowd import Protection, Sighting
from shoal.protocols.session import Member

EXPECTED = "expected http://HOST:PORT, tcp://HOST:PORT or wss://HOST/ws"
DIRECT: Mapping[str, Protection] = {"tcp": Protection.PLAIN, "tls": Protection.TLS}
RELAYS: Mapping[str, str] = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
RELAY_PATH = "/ws"
NODE = "node"  # the parameter of a relay's URL that says who connects


def peer_url(address: str) -> str:
    """Return the URL of a peer that is given as HOST:PORT, or by its URL.

    Raises ConfigError if it cannot be dialled.
    """
    url = address if "://" in address else f"tcp://{address}"
    if _split(url).scheme not in DIRECT:
        raise ConfigError(f"peer {shown(address)!a}: expected HOST:PORT")
    return url


def sighted_url(sighting: Sighting) -> str | None:
    """Return the URL of a peer that was found; None if it says nowhere to find it."""
    if not sighting.addresses:
        return None
    address = min(sighting.addresses, key=lambda each: ":" in each)  # IPv4 first
    if ":" in address:
        # The zone of an address begins with a percent sign (RFC 6874).
        address = f"[{address.replace('%', '%25')}]"
    return f"tcp://{address}:{sighting.port}"


def relay_url(url: str, node_id: str) -> str:
    """Return where a relay is to be dialled: what real ones ignore helps proxies.

    Raises ConfigError if the URL cannot be dialled.
    """
    parts = _split(url)
    if parts.scheme not in RELAYS:
        raise ConfigError(f"relay {shown(url)}: expected wss://HOST/ws")
    path = parts.path.rstrip("/")
    if parts.scheme.startswith("http") or not path:
        path += RELAY_PATH
    given = [pair for pair in parse_qsl(parts.query) if pair[0] != NODE]
    query = urlencode([*given, (NODE, node_id)], quote_via=quote, errors="replace")
    return f"{RELAYS[parts.scheme]}://{parts.netloc}{path}?{query}"


def ways(url: str, member: Member) -> list[str]:
    """Return the addresses to try: directly first, if the coordinator says where.

    Raises ConfigError if the URL cannot be dialled.
    """
    parts = _split(url)
    if parts.scheme in DIRECT:
        return [f"{parts.scheme}://{parts.netloc}"]
    assert member.identity is not None, "a node is known by its key"
    relay = relay_url(url, member.identity.public_key.hex())
    return [member.direct, relay] if member.direct else [relay]


def shown(url: str) -> str:
    """Return a URL as messages show it: without what may be secret."""
    return url.partition("?")[0]


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port  # the port raises if it is none
    except ValueError as error:
        raise ConfigError(f"URL {shown(url)!a}: {error}; {EXPECTED}") from error
    if parts.scheme not in DIRECT and parts.scheme not in RELAYS:
        raise ConfigError(f"URL {shown(url)!a}: {EXPECTED}")
    if not host or (parts.scheme in DIRECT and port is None):
        missing = "host" if not host else "port"
        raise ConfigError(f"URL {shown(url)!a}: no {missing}; {EXPECTED}")
    return parts
