"""Signed webhook messages about ended jobs: their addresses, and when to try again.

Source: Standard Webhooks 1.0 (standardwebhooks.com), the symmetric signature ``v1``.
Its own library verifies our messages in the tests.  It signs text only: the two copies
of a body of 16 MiB make that 28 ms instead of 10, on the event loop.
"""

import base64
import binascii
import errno
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import msgspec
from aiohttp import AddrInfoType

from shoal.domain.errors import InvalidRequest
from shoal.domain.ids import JobId
from shoal.ledger.canonical import to_time
from shoal.pool.lifecycle import JobState
from shoal.store.port import StoredJob
from shoal.store.webhooks import DeliveryState


class EgressPolicy(Enum):
    """The addresses that webhooks may have: none inside the coordinator's network.

    Otherwise a client could make the coordinator send requests to addresses that only
    it can reach: its own ports, the router, or a cloud's metadata service (SSRF).
    """

    PUBLIC = "public"
    ANY = "any"
    OFF = "off"


# Source: IANA's special-purpose address registries.  Global to Python, but no servers:
# they translate between IPv4 and IPv6.
_ODD_4 = (IPv4Network("192.0.0.0/24"), IPv4Network("192.88.99.0/24"))
_ODD_6 = (IPv6Network("2001::/23"), IPv6Network("2002::/16"))
_UNICAST = IPv6Network("2000::/3")  # all of IPv6 that is allocated
_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address


def is_public(address: str) -> bool:
    """Say whether an IP address is a public unicast address.

    False for anything that is not an IP address.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and parsed in _NAT64:
        parsed = IPv4Address(parsed.packed[-4:])
    if not parsed.is_global or parsed.is_multicast or parsed.is_reserved:
        return False
    if isinstance(parsed, IPv4Address):
        return not any(parsed in network for network in _ODD_4)
    return parsed in _UNICAST and not any(parsed in network for network in _ODD_6)


def is_denied(host: str, policy: EgressPolicy) -> bool:
    """Say whether a policy denies a host; names are checked when they are resolved."""
    if policy is not EgressPolicy.PUBLIC:
        return policy is EgressPolicy.OFF
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return not is_public(host)


def _public_socket(info: AddrInfoType) -> socket.socket:
    """Create a socket for a connection to a public address.

    Called for each address just before the connection, whether it is from the URL or
    from DNS: there is no second look-up that could return another address.

    Raises PermissionError for an address that is not public.
    """
    family, kind, protocol, _, place = info
    if not is_public(str(place[0])):
        raise PermissionError(
            errno.EACCES, f"{place[0]} is not a public address (--webhooks public)"
        )
    return socket.socket(family, kind, protocol)


SOCKET_FACTORIES: dict[EgressPolicy, Callable[[AddrInfoType], socket.socket] | None] = {
    EgressPolicy.PUBLIC: _public_socket,
    EgressPolicy.ANY: None,
}
"""The socket factories of aiohttp's connectors."""


BASE64_PREFIX = "whsec_"  # marks a secret in base64

# Delays grow fivefold: eight attempts take about 27 hours.
ATTEMPTS_MAX = 8
FIRST_DELAY = 5.0  # seconds
GROWTH = 5.0
SPREAD = 0.2  # random share of a delay, up or down, so that retries spread out

MESSAGE_TYPES: Mapping[JobState, str] = {
    JobState.DONE: "job.completed",
    JobState.FAILED: "job.failed",
    JobState.CANCELLED: "job.cancelled",
    JobState.EXPIRED: "job.expired",
}


@dataclass(slots=True)
class WebhookResults:
    """Counts of attempts: ``failed`` ones are repeated, ``given_up`` ones are not."""

    delivered: int = 0
    failed: int = 0
    given_up: int = 0


class WebhookMessage(msgspec.Struct, frozen=True):
    """The body of a message; ``data`` is the job as ``GET /v1/jobs/{id}`` shows it."""

    id: str
    type: str
    created_at: str
    data: msgspec.Raw


def message_id(job_id: JobId) -> str:
    """Return the id of a job's message, the same for each attempt."""
    return f"msg_{job_id}"


def encode_message(ended: StoredJob, data: bytes) -> bytes:
    """Encode the message about an ended job."""
    assert ended.ended_at is not None, f"{ended.job.id} has not ended"
    return msgspec.json.encode(
        WebhookMessage(
            message_id(ended.job.id),
            MESSAGE_TYPES[ended.state],
            to_time(ended.ended_at),
            msgspec.Raw(data),
        )
    )


def signed_headers(job_id: JobId, body: bytes, secret: str, at: int) -> dict[str, str]:
    """Return the headers of a message, with its signature; ``at`` is Unix seconds.

    Raises InvalidRequest as ``signing_key`` does.
    """
    name = message_id(job_id)
    signed = b"%s.%d.%s" % (name.encode(), at, body)
    digest = hmac.digest(signing_key(secret), signed, hashlib.sha256)
    return {
        "Content-Type": "application/json",
        "webhook-id": name,
        "webhook-timestamp": str(at),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def signing_key(secret: str) -> bytes:
    """Return the key of a secret: ``whsec_`` and base64, or any text.

    Raises InvalidRequest for ``whsec_`` without valid base64.
    """
    if not secret.startswith(BASE64_PREFIX):
        return secret.encode("utf-8", "surrogatepass")
    try:
        key = base64.b64decode(secret.removeprefix(BASE64_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not key:
        raise InvalidRequest(
            f"webhook.secret: after {BASE64_PREFIX} expected base64, with its padding",
            "webhook.secret",
        )
    return key


def describe_delivery(tried: DeliveryState) -> str:
    """Describe the state of a delivery in a line, without its URL."""
    host, attempts = tried.delivery.host, tried.attempts
    what = f"webhook at {host}"
    if tried.due_at is not None and tried.error is None:
        return f"{what}: not delivered yet"
    if tried.due_at is not None:
        return (
            f"{what}: {attempts} of {ATTEMPTS_MAX} attempts failed ({tried.error}), "
            f"the next is due at {to_time(tried.due_at)}"
        )
    if tried.error is not None:
        return f"{what}: given up after {attempts} attempts: {tried.error}"
    return f"{what}: delivered by attempt {attempts}"


def retry_delay(attempts: int, chance: float) -> float | None:
    """Return the seconds until the next attempt; None if there is none.

    ``attempts`` is the number of failed ones, at least 1; ``chance`` is from 0 to 1.
    """
    if attempts >= ATTEMPTS_MAX:
        return None
    spread = 1 - SPREAD + 2 * SPREAD * chance
    return FIRST_DELAY * GROWTH ** (attempts - 1) * spread


DELAYS_MAX = (0.0, *(retry_delay(n, 1.0) or 0.0 for n in range(1, ATTEMPTS_MAX)))
"""The longest delay after each number of failed attempts, in seconds."""
