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
from shoal.protocols.macfleet.local_node import Config
from shoal.protocols.macfleet.membership import HEARTBEAT_PORT, NodeAddress
from shoal.protocols.seam.endpoints import plain_label
from shoal.protocols.seam.peer_addresses import split_url
from shoal.protocols.seam.protocol import FleetAccess

EXPECTED = (
    "expected http://HOST:PORT of a Shoal coordinator, or HOST:PORT of a node's "
    "heartbeats"
)
SECURE_SCHEME = (
    "tls-any"  # TLS with any certificate: the session authenticates the peer
)
PLAIN_SCHEME = "tcp"
STREAM_SCHEMES = frozenset({PLAIN_SCHEME, "tls", SECURE_SCHEME})
WEB_SCHEMES = frozenset({"http", "https", "ws", "wss"})
TRANSPORT_LABEL = "transport"  # the label of its port
HEARTBEAT_LABEL = "heartbeat"
FLEET_PARAMETER = "fleet"  # the query parameter with the fleet's id
HEARTBEAT_PARAMETER = "heartbeat"  # of a coordinator's transport: its other port


def parse_contact(address: str) -> NodeAddress:
    """Parse the heartbeat address of a node: HOST:PORT, or HOST for the default port.

    Raises ConfigError if it is not an address.
    """
    expected = f"--macfleet-peers {address!a}: expected HOST:PORT"
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{expected}: {error}") from error
    has_space_or_userinfo = any(
        character == "@" or character.isspace() for character in address
    )
    if not host or parts.netloc != address or has_space_or_userinfo:
        raise ConfigError(expected)
    return NodeAddress(host, port or HEARTBEAT_PORT)


def transport_url(address: str, *, secure: bool) -> str:
    """Return the URL of a node's port at HOST:PORT.

    Certificates are self-signed; the session authenticates the node.
    """
    return f"{SECURE_SCHEME if secure else PLAIN_SCHEME}://{address}"


def coordinator_url(host: str, ports: Mapping[str, int]) -> str:
    """Return the transport URL of a Shoal coordinator, from its ports by label.

    Its query has the heartbeat port.  Returns "" if it has no transport port.  An open
    fleet does not use TLS.
    """
    for secure in (True, False):
        transport, heartbeat = (
            ports.get(label if secure else plain_label(label))
            for label in (TRANSPORT_LABEL, HEARTBEAT_LABEL)
        )
        if transport is not None:
            url = transport_url(f"{host}:{transport}", secure=secure)
            return f"{url}?{HEARTBEAT_PARAMETER}={heartbeat}" if heartbeat else url
    return ""


def heartbeat_url(transport: SplitResult) -> str:
    """Return the URL of the heartbeat port of a coordinator's transport URL.

    Returns "" if that does not have it.
    """
    port = parse_qs(transport.query).get(HEARTBEAT_PARAMETER, [""])[0]
    host = transport.netloc.rpartition(":")[0]
    return f"{transport.scheme}://{host}:{port}" if port else ""


def parse_url(url: str) -> SplitResult:
    """Split a URL, or HOST:PORT.

    Raises ConfigError if it is malformed or has a scheme this protocol does not use.
    """
    absolute = url if "://" in url else f"{PLAIN_SCHEME}://{url}"
    schemes = (*STREAM_SCHEMES, *WEB_SCHEMES)
    return split_url(absolute, schemes, EXPECTED, with_port=STREAM_SCHEMES)


def fleet_in_url(parts: SplitResult) -> str:
    """Return the fleet id in a URL, or "" if it has none."""
    return parse_qs(parts.query).get(FLEET_PARAMETER, [""])[0]


def within_fleet(url: str, fleet: str) -> str | None:
    """Return a node's URL with the id of its fleet.

    Returns None if the URL names another fleet, or has the scheme of open fleets, tcp.

    Raises ConfigError as ``parse_url`` does.
    """
    fleet_id = fleet_in_url(parse_url(url))
    if url.startswith(f"{PLAIN_SCHEME}://") or fleet_id not in ("", fleet):
        return None
    return (
        url if fleet_id or not fleet else f"{url}?{urlencode({FLEET_PARAMETER: fleet})}"
    )


PAIRING_SCHEME = "macfleet"
PAIRING_HOST = "pair"
PAIRING_URL_MAX = 4096  # characters
PAIRING_FIELDS_MAX = 16  # fields in the query


class FleetInvitation(NamedTuple):
    """What a machine needs to join a fleet; ``fleet`` is "" for the default fleet."""

    token: str
    fleet: str = ""


def pairing_url(token: str, fleet: str = "") -> str:
    """Return the pairing URL of a fleet; the inverse of ``parse_pairing_url``.

    Raises ConfigError if the token is empty.
    """
    if not token:
        raise ConfigError("a fleet without a token is open and needs no pairing URL")
    url = f"{PAIRING_SCHEME}://{PAIRING_HOST}?token={quote(token, safe='')}"
    return f"{url}&fleet={quote(fleet, safe='')}" if fleet else url


def parse_pairing_url(url: str) -> FleetInvitation:
    """Parse a pairing URL in the format that MacFleet's own programs use.

    Raises ConfigError if it is malformed.  The token itself is not validated.
    """
    if len(url) > PAIRING_URL_MAX:
        raise ConfigError(f"a pairing URL has at most {PAIRING_URL_MAX} characters")
    try:
        url.encode()  # an argument of a command line may contain lone surrogates
        parts = urlsplit(url)
        fields = parse_qs(
            parts.query, errors="strict", max_num_fields=PAIRING_FIELDS_MAX
        )
        host = parts.hostname or ""
    except ValueError as error:
        raise ConfigError(f"not a pairing URL: {error}") from error
    # The token is a secret, so error messages never show the URL.
    if parts.scheme != PAIRING_SCHEME or PAIRING_HOST not in (
        host,
        parts.path.strip("/"),
    ):
        raise ConfigError(
            f"not a pairing URL: expected {PAIRING_SCHEME}://{PAIRING_HOST}?token=..."
        )
    if "token" not in fields:
        raise ConfigError("the pairing URL has no token: print it again")
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
