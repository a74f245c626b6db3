"""Signed webhook messages about ended jobs, and the schedule of retries.

Source: Standard Webhooks 1.0 (standardwebhooks.com), the symmetric signature ``v1``.
Its own library verifies our messages in the tests.  It signs text only: the two copies
of a body of 16 MiB make that 28 ms instead of 10, on the event loop.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.domain.ids import JobId
from shoal.ledger.canonical import to_time
from shoal.pool.lifecycle import JobState
from shoal.store.port import StoredJob
from shoal.store.webhooks import DeliveryState

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
