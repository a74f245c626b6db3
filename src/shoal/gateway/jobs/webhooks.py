"""Messages that tell of the end of a job, signed, and when to try again.

Source: Standard Webhooks 1.0 (standardwebhooks.com), the symmetric signature ``v1``.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping

import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.domain.ids import JobId
from shoal.ledger.canonical import to_time
from shoal.pool.lifecycle import JobState
from shoal.store.port import StoredJob
from shoal.store.webhooks import DeliveryState

BASE64_PREFIX = "whsec_"  # before a secret that is written in base64

# Five times as long each time: eight attempts take 27 hours, about.
ATTEMPTS_MAX = 8
FIRST_DELAY = 5.0  # seconds
GROWTH = 5.0
SPREAD = 0.2  # part of a pause, up or down, so that not all come back together

MESSAGE_TYPES: Mapping[JobState, str] = {
    JobState.DONE: "job.completed",
    JobState.FAILED: "job.failed",
    JobState.CANCELLED: "job.cancelled",
    JobState.EXPIRED: "job.expired",
}


class WebhookMessage(msgspec.Struct, frozen=True):
    """What a webhook is told; ``data`` is the job as ``GET /v1/jobs/{id}`` shows it."""

    id: str
    type: str
    created_at: str
    data: msgspec.Raw


def message_id(job_id: JobId) -> str:
    """Return what a message is known by, however often it is sent."""
    return f"msg_{job_id}"


def encode_message(ended: StoredJob, data: bytes) -> bytes:
    """Return the body that tells of a job that has ended."""
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
    """Return the headers that a message is sent with, signed; ``at`` is Unix seconds.

    Raises InvalidRequest as ``key_of`` does.
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
    """Return the key that a secret stands for: ``whsec_`` and base64, or any text.

    Raises InvalidRequest if it is said to be base64 and is not.
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
    """Say in a line how far telling a webhook has come; its URL is not in it."""
    host, attempts = tried.delivery.host, tried.attempts
    what = f"webhook at {host}"
    if tried.due_at is not None and tried.error is None:
        return f"{what}: not told yet"
    if tried.due_at is not None:
        return (
            f"{what}: {attempts} of {ATTEMPTS_MAX} attempts failed ({tried.error}), "
            f"the next is due at {to_time(tried.due_at)}"
        )
    if tried.error is not None:
        return f"{what}: given up after {attempts} attempts: {tried.error}"
    return f"{what}: told, by attempt {attempts}"


def retry_delay(attempts: int, chance: float) -> float | None:
    """Return the seconds until the next attempt; None: there is none.

    ``attempts`` have failed, one at least; ``chance`` is from 0 to 1.
    """
    if attempts >= ATTEMPTS_MAX:
        return None
    spread = 1 - SPREAD + 2 * SPREAD * chance
    return FIRST_DELAY * GROWTH ** (attempts - 1) * spread
