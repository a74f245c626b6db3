"""Webhook messages, and their signatures."""

import base64
import hashlib
import hmac
import json
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.domain.errors import InvalidRequest
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Job, Webhook
from shoal.domain.work import Chat
from shoal.gateway.jobs.webhooks import (
    ATTEMPTS_MAX,
    MESSAGE_TYPES,
    describe_delivery,
    encode_message,
    retry_delay,
    signed_headers,
    signing_key,
)
from shoal.pool.lifecycle import ENDED, JobState
from shoal.store.port import StoredJob
from shoal.store.webhooks import DeliveryState, WebhookDelivery

DAY = 86_400.0
CALL = WebhookDelivery(JobId("j1"), Webhook("https://one.example/?token=t0p", "s" * 16))
LANE = ("alice", "alice one.example:443")
DOCUMENT = Path(__file__).parents[3] / "docs" / "webhooks.md"


def ended(state: JobState = JobState.DONE) -> StoredJob:
    job = Job(JobId("j1"), Chat("m", ({"role": "user", "content": "hi"},)))
    return StoredJob(job, state, LeaseNumber(1), 1_700_000_000.0, 1_700_000_001.5)


def test_message_has_the_documented_fields() -> None:
    body = encode_message(ended(), b'{"id": "j1",  "result": 1.0}')

    # The job is as it was written, to the byte.
    assert body == (
        b'{"id":"msg_j1","type":"job.completed",'
        b'"created_at":"2023-11-14T22:13:21.500Z","data":{"id": "j1",  "result": 1.0}}'
    )


def test_every_end_of_a_job_has_a_type() -> None:
    assert MESSAGE_TYPES.keys() == ENDED
    assert (
        json.loads(encode_message(ended(JobState.EXPIRED), b"{}"))["type"]
        == "job.expired"
    )


def test_signature_is_the_one_of_the_specification() -> None:
    # Source: the example of the Standard Webhooks specification's libraries.
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = b'{"test": 2432232314}'

    headers = signed_headers(
        JobId("p5jXN8AQM9LWM0D4loKWxJek"), body, secret, 1614265330
    )

    assert headers["webhook-id"] == "msg_p5jXN8AQM9LWM0D4loKWxJek"
    assert headers["webhook-timestamp"] == "1614265330"
    assert headers["webhook-signature"] == (
        "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    )


def test_secret_without_a_prefix_is_its_own_key() -> None:
    secret = "just some words, ümläuts too"

    headers = signed_headers(JobId("j"), b"{}", secret, 7)

    digest = hmac.new(secret.encode(), b"msg_j.7.{}", hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize("secret", ["whsec_", "whsec_abc", "whsec_a-b_", "whsec_ä==="])
def test_secret_that_is_not_the_base64_it_claims_is_refused(secret: str) -> None:
    with pytest.raises(InvalidRequest, match="expected base64") as caught:
        signing_key(secret)

    assert secret.removeprefix("whsec_") == "" or secret not in str(caught.value)


@pytest.mark.parametrize(
    ("tried", "line"),
    [
        (DeliveryState(CALL, *LANE, 0, 7.0), "not delivered yet"),
        (
            DeliveryState(CALL, *LANE, 2, 1_700_000_000.0, "HTTP 500"),
            "2 of 8 attempts failed (HTTP 500), the next is due at "
            "2023-11-14T22:13:20.000Z",
        ),
        (
            DeliveryState(CALL, *LANE, 8, None, "HTTP 500"),
            "given up after 8 attempts: HTTP 500",
        ),
        (DeliveryState(CALL, *LANE, 3), "delivered by attempt 3"),
    ],
)
def test_explanation_shows_the_state_of_the_delivery(
    tried: DeliveryState, line: str
) -> None:
    assert describe_delivery(tried) == f"webhook at one.example: {line}"


def test_eight_attempts_take_about_a_day() -> None:
    pauses = [retry_delay(attempts, 0.5) for attempts in range(1, ATTEMPTS_MAX)]

    assert pauses == [5.0, 25.0, 125.0, 625.0, 3125.0, 15625.0, 78125.0]
    assert retry_delay(ATTEMPTS_MAX, 0.5) is None
    assert DAY < sum(pause for pause in pauses if pause) < 1.2 * DAY


@pytest.mark.parametrize(("chance", "pause"), [(0.0, 20.0), (1.0, 30.0)])
def test_delays_have_jitter(chance: float, pause: float) -> None:
    assert retry_delay(2, chance) == pytest.approx(pause)


def test_documented_receiver_verifies_signatures() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = encode_message(ended(), b"{}")
    now = 1_700_000_000
    headers = signed_headers(JobId("j1"), body, secret, now)
    late = now + 301

    def is_real(headers: dict[str, str], body: bytes, secret: str, now: int) -> bool:
        real: bool = names["is_real"](headers, body, secret, now)
        return real

    assert is_real(headers, body, secret, now)
    assert not is_real(headers, body + b" ", secret, now)
    assert not is_real(headers, body, "whsec_AAAA", now)
    assert not is_real(headers, body, secret, late)
    assert not is_real(headers | {"webhook-id": "msg_j2"}, body, secret, now)
