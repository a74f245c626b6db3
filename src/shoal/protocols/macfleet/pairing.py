"""URLs that let a machine into a fleet: its token and its name, to be scanned or typed.

Source: the MacFleet document, "Pairing".  ``macfleet://pair?token=..&fleet=..``
"""

from dataclasses import replace
from typing import NamedTuple
from urllib.parse import parse_qs, quote, urlsplit

from shoal.domain.errors import ConfigError
from shoal.protocols import Fleets
from shoal.protocols.macfleet.addresses import within_fleet
from shoal.protocols.macfleet.config import HEARTBEAT_PORT, Config
from shoal.protocols.macfleet.wire.keys import TOKEN_FILE, TOKEN_VARIABLE, fleet_key

SCHEME = "macfleet"
PAIR = "pair"
URL_MAX = 4096  # characters
FIELDS_MAX = 16  # names and values in one


class Invitation(NamedTuple):
    """What a machine needs to be of a fleet; one without a name is the default one."""

    token: str
    fleet: str = ""


def pairing_url(token: str, fleet: str = "") -> str:
    """Return the URL that ``read_pairing_url`` reads.

    Raises ConfigError if there is no token.
    """
    if not token:
        raise ConfigError("a fleet without a token is open: there is nothing to pair")
    url = f"{SCHEME}://{PAIR}?token={quote(token, safe='')}"
    return f"{url}&fleet={quote(fleet, safe='')}" if fleet else url


def read_pairing_url(url: str) -> Invitation:
    """Read a URL as other programs of this wire write and read it.

    Raises ConfigError if it is none; whether the token will do is not looked at.
    """
    if len(url) > URL_MAX:
        raise ConfigError(f"a pairing URL has at most {URL_MAX} characters")
    try:
        url.encode()  # what came from a command line need not be text
        parts = urlsplit(url)
        fields = parse_qs(parts.query, errors="strict", max_num_fields=FIELDS_MAX)
        host = parts.hostname or ""
    except ValueError as error:
        raise ConfigError(f"this is no pairing URL: {error}") from error
    # The token is a secret: of a URL that is not right, nothing is shown.
    if parts.scheme != SCHEME or PAIR not in (host, parts.path.strip("/")):
        raise ConfigError(
            f"this is no pairing URL: it begins with {SCHEME}://{PAIR}?token="
        )
    if "token" not in fields:
        raise ConfigError("the pairing URL has no token: have it printed anew")
    return Invitation(fields["token"][0], fields.get("fleet", [""])[0])


def _with_credentials(config: Config, token: str, fleet: str) -> Config:
    return replace(config, token=token, fleet=fleet)


FLEETS: Fleets[Config] = Fleets(
    invite=pairing_url,
    read=read_pairing_url,
    check=fleet_key,
    file=TOKEN_FILE,
    variable=TOKEN_VARIABLE,
    within=within_fleet,
    credentials=lambda config: (config.token, config.fleet),
    with_credentials=_with_credentials,
    is_open=lambda config: config.open,
    port=HEARTBEAT_PORT,
)
