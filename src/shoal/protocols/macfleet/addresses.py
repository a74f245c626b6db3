"""URLs of MacFleet nodes, and pairing URLs that admit a machine to a fleet.

Source of the pairing URL: the MacFleet document, "Pairing":
``macfleet://pair?token=..&fleet=..``.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qs, quote, urlencode, urlsplit

from shoal.domain.errors import ConfigError
from shoal.protocols.macfleet.codec.keys import TOKEN_FILE, TOKEN_VARIABLE, fleet_key
from shoal.protocols.macfleet.config import HEARTBEAT_PORT, Config
from shoal.protocols.macfleet.membership import NodeAddress
from shoal.protocols.seam.multi_peer import plain_label
from shoal.protocols.seam.protocol import FleetAccess

EXPECTED = (
    "expected http://HOST:PORT of a Shoal coordinator, or HOST:PORT of a node's "
    "heartbeats"
)
SECURE_SCHEME = "tls-any"  # TLS with whoever answers: who that is the session finds out
PLAIN_SCHEME = "tcp"
STREAM_SCHEMES = frozenset({PLAIN_SCHEME, "tls", SECURE_SCHEME})
WEB_SCHEMES = frozenset({"http", "https", "ws", "wss"})
TRANSPORT_LABEL = "transport"  # the label of its port
FLEET_PARAMETER = "fleet"  # the parameter that says which fleet a node is of


def parse_contact(address: str) -> NodeAddress:
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
    return NodeAddress(host, port or HEARTBEAT_PORT)


def transport_url(address: str, *, secure: bool) -> str:
    """Return how to connect to HOST:PORT."""
    return f"{SECURE_SCHEME if secure else PLAIN_SCHEME}://{address}"


def coordinator_url(host: str, ports: Mapping[str, int]) -> str:
    """Return where one of our coordinators has its transport, by its ports' labels.

    Empty: it has none.  In an open fleet it speaks no TLS, to whomever.
    """
    for label, secure in (
        (TRANSPORT_LABEL, True),
        (plain_label(TRANSPORT_LABEL), False),
    ):
        if label in ports:
            return transport_url(f"{host}:{ports[label]}", secure=secure)
    return ""


def parse_url(url: str) -> SplitResult:
    """Split a URL, or HOST:PORT.

    Raises ConfigError if it is none that this wire can do anything with.
    """
    full = url if "://" in url else f"{PLAIN_SCHEME}://{url}"
    try:
        parts = urlsplit(full)
        host, port = parts.hostname, parts.port  # the port raises if it is none
    except ValueError as error:
        raise ConfigError(f"URL {redacted(url)!a}: {error}; {EXPECTED}") from error
    if parts.scheme not in STREAM_SCHEMES and parts.scheme not in WEB_SCHEMES:
        raise ConfigError(f"URL {redacted(url)!a}: {EXPECTED}")
    if not host or (parts.scheme in STREAM_SCHEMES and not port):
        missing = "port" if host else "host"
        raise ConfigError(f"URL {redacted(url)!a}: no {missing}; {EXPECTED}")
    return parts


def fleet_in_url(parts: SplitResult) -> str:
    """Return the id of the fleet that a URL names; empty: none."""
    return parse_qs(parts.query).get(FLEET_PARAMETER, [""])[0]


def within_fleet(url: str, fleet: str) -> str | None:
    """Return a node's URL with the id of its fleet.

    None: it names another, or is ``tcp://..``, as nodes of open fleets have it.

    Raises ConfigError as ``parse_url`` does.
    """
    named = fleet_in_url(parse_url(url))
    if url.startswith(f"{PLAIN_SCHEME}://") or named not in ("", fleet):
        return None
    return url if named or not fleet else f"{url}?{urlencode({FLEET_PARAMETER: fleet})}"


def redacted(url: str) -> str:
    """Return a URL as messages show it: without what may be secret."""
    return url.partition("?")[0]


PAIRING_SCHEME = "macfleet"
PAIRING_HOST = "pair"
PAIRING_URL_MAX = 4096  # characters
PAIRING_FIELDS_MAX = 16  # names and values in one


class FleetInvitation(NamedTuple):
    """What a machine needs to be of a fleet; one without a name is the default one."""

    token: str
    fleet: str = ""


def pairing_url(token: str, fleet: str = "") -> str:
    """Return the URL that ``parse_pairing_url`` reads.

    Raises ConfigError if there is no token.
    """
    if not token:
        raise ConfigError("a fleet without a token is open: there is nothing to pair")
    url = f"{PAIRING_SCHEME}://{PAIRING_HOST}?token={quote(token, safe='')}"
    return f"{url}&fleet={quote(fleet, safe='')}" if fleet else url


def parse_pairing_url(url: str) -> FleetInvitation:
    """Read a URL as other programs of this wire write and read it.

    Raises ConfigError if it is none; whether the token will do is not looked at.
    """
    if len(url) > PAIRING_URL_MAX:
        raise ConfigError(f"a pairing URL has at most {PAIRING_URL_MAX} characters")
    try:
        url.encode()  # what came from a command line need not be text
        parts = urlsplit(url)
        fields = parse_qs(
            parts.query, errors="strict", max_num_fields=PAIRING_FIELDS_MAX
        )
        host = parts.hostname or ""
    except ValueError as error:
        raise ConfigError(f"this is no pairing URL: {error}") from error
    # The token is a secret: of a URL that is not right, nothing is shown.
    if parts.scheme != PAIRING_SCHEME or PAIRING_HOST not in (
        host,
        parts.path.strip("/"),
    ):
        raise ConfigError(
            f"this is no pairing URL: it begins with {PAIRING_SCHEME}://{PAIRING_HOST}?token="
        )
    if "token" not in fields:
        raise ConfigError("the pairing URL has no token: have it printed anew")
    return FleetInvitation(fields["token"][0], fields.get("fleet", [""])[0])


def _with_credentials(config: Config, token: str, fleet: str) -> Config:
    return replace(config, token=token, fleet=fleet)


FLEETS: FleetAccess[Config] = FleetAccess(
    invite=pairing_url,
    read=parse_pairing_url,
    check=fleet_key,
    file=TOKEN_FILE,
    variable=TOKEN_VARIABLE,
    within=within_fleet,
    credentials=lambda config: (config.token, config.fleet),
    with_credentials=_with_credentials,
    is_open=lambda config: config.open,
    port=HEARTBEAT_PORT,
)
