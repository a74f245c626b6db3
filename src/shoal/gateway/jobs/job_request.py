"""Decodes committed jobs: the work and its terms."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from shoal.domain import json_limits
from shoal.domain.errors import InvalidRequest
from shoal.domain.job import JobTerms, Policy, Privacy, Webhook
from shoal.domain.work import ANY_MODEL, JSON, Chat, JobKind, Task
from shoal.gateway.http import decoding
from shoal.gateway.http.body import BODY_MAX
from shoal.gateway.jobs.webhooks import signing_key
from shoal.ledger.accounts import PriceList

USER_MAX = 256  # characters of a user's id
REF_MAX = 256  # characters of a payment's reference
URL_MAX = 2048  # characters of a webhook's URL
SECRET_MIN, SECRET_MAX = 16, 256  # characters of a webhook's secret
TOKENS = 256  # limit of an answer by default: its client waits for 60 s
VALUES_MAX = 200_000  # values in a payload: few bytes can make many

MISSING = "Missing required fields: job_type, payload, user_id"
INVALID_TYPE = "Invalid job_type"

CommitKind: TypeAlias = Literal[JobKind.CHAT, JobKind.TASK]
"""The kinds of jobs that clients can commit."""

KINDS: Mapping[str, CommitKind] = {"LLM_INFER": JobKind.CHAT, "TASK": JobKind.TASK}
"""Those kinds by their names in this API."""

UserId = Annotated[
    Raw, Meta(extra_json_schema={"type": ["string", "number"], "maxLength": USER_MAX})
]
"""A user's id; a number counts as its digits, because clients send both."""


class NewWebhook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The webhook of a job; ``secret`` signs its messages."""

    url: Annotated[str, Meta(min_length=1, max_length=URL_MAX)]
    secret: Annotated[str, Meta(min_length=SECRET_MIN, max_length=SECRET_MAX)]


class CommitJob(msgspec.Struct, frozen=True):
    """A job to commit; the first three fields are required, and not empty.

    The payload of an LLM_INFER job is an object with a ``prompt``, and optionally a
    ``model`` and ``max_tokens`` (256 by default).  That of a TASK may be anything;
    workers know objects with a ``task_type`` and its parameters.
    """

    job_type: Annotated[Raw, Meta(extra_json_schema={"enum": [*KINDS]})] | UnsetType = (
        UNSET
    )
    payload: Annotated[Raw, Meta(extra_json_schema={})] | UnsetType = UNSET
    user_id: UserId | UnsetType = UNSET
    privacy_class: (
        Annotated[str, Meta(extra_json_schema={"enum": [*Privacy.__members__]})] | None
    ) = None
    payment_ref: Annotated[str, Meta(max_length=REF_MAX)] | None = None
    webhook: NewWebhook | None = None


class _Prompt(msgspec.Struct, frozen=True):
    """The known fields in the payload of an LLM_INFER job."""

    prompt: str
    model: Any = None
    max_tokens: Annotated[float, Meta(ge=1, le=decoding.TOKENS_MAX)] | None = None


_commits = msgspec.json.Decoder(CommitJob)
_any = msgspec.json.Decoder()
_user_ids = msgspec.json.Decoder(str | int | float)


def decode_commit(
    data: bytes, policy: Policy, prices: PriceList
) -> tuple[Chat | Task, JobTerms]:
    """Decode the body of a commit into the work and its terms.

    The terms also hold the payload as it was sent, because some protocols forward it
    unchanged.

    Raises InvalidRequest.
    """
    if not data or data.lstrip()[:1] == b"[":
        raise InvalidRequest(MISSING)
    body = decoding.decode(
        _commits, data, 2 * VALUES_MAX
    )  # the payload has its own limit
    job_type, payload, user_id = body.job_type, body.payload, body.user_id
    if (
        isinstance(job_type, UnsetType)
        or isinstance(payload, UnsetType)
        or isinstance(user_id, UnsetType)
        or is_falsy(job_type, "job_type")
        or is_falsy(payload, "payload")
        or is_falsy(user_id, "user_id")
    ):
        raise InvalidRequest(MISSING)
    kind = _kind(job_type)
    return _work(kind, _decode_payload(payload)), JobTerms(
        policy,
        _privacy(body.privacy_class),
        decode_user(user_id),
        prices.price(policy, kind),
        body.payment_ref or "",
        bytes(payload).decode(),
        _webhook(body.webhook),
        detached=True,
    )


def is_falsy(raw: Raw, field: str) -> bool:
    """Say whether JavaScript would treat a value as false: null, 0, "" or false.

    Raises InvalidRequest if it is not JSON.
    """
    written = memoryview(raw)
    if written[0] in b'"[{':
        return bytes(written[:3]) == b'""'
    small = len(written) <= decoding.SMALL
    return small and decoding.decode_field(_any, raw, field) in (None, 0)


def decode_user(raw: Raw) -> str:
    """Decode a user's id.  Raises InvalidRequest."""
    value = decoding.decode_field(_user_ids, raw, "user_id")
    text = value if isinstance(value, str) else bytes(raw).decode()
    if len(text) > USER_MAX:
        raise InvalidRequest(f"user_id: more than {USER_MAX} characters", "user_id")
    return text


# Private parts, in the order in which they are called.


def _kind(job_type: Raw) -> CommitKind:
    name = None
    if decoding.size_of(job_type) <= decoding.SMALL:
        name = decoding.decode_field(_any, job_type, "job_type")
    if not isinstance(name, str) or name not in KINDS:
        raise InvalidRequest(INVALID_TYPE, "job_type")
    return KINDS[name]


def _decode_payload(raw: Raw) -> JSON:
    text = bytes(raw).decode()
    if json_limits.has_more_values(text, VALUES_MAX):
        raise InvalidRequest(f"payload: more than {VALUES_MAX} values", "payload")
    value: JSON = decoding.decode_field(_any, raw, "payload", BODY_MAX)
    if json_limits.may_be_too_deep(text) and json_limits.is_too_deep(value):
        raise InvalidRequest(
            f"payload: nested more than {json_limits.NESTING_MAX} deep", "payload"
        )
    return value


def _work(kind: CommitKind, payload: JSON) -> Chat | Task:
    match kind:
        case JobKind.CHAT:
            return _chat(payload)
        case JobKind.TASK:
            return _task(payload)


def _chat(payload: JSON) -> Chat:
    try:
        decoded = msgspec.convert(payload, _Prompt)
    except msgspec.ValidationError as error:
        raise decoding.validation_error(str(error), "payload") from error
    model = (
        decoded.model if isinstance(decoded.model, str) and decoded.model else ANY_MODEL
    )
    if len(model) > decoding.MODEL_MAX:
        text = f"payload.model: more than {decoding.MODEL_MAX} characters"
        raise InvalidRequest(text, "payload.model")
    message = {"role": "user", "content": decoded.prompt}
    return Chat(model, (message,), int(decoded.max_tokens or TOKENS))


def _task(payload: JSON) -> Task:
    name = payload.get("task_type") if isinstance(payload, dict) else None
    return Task(name if isinstance(name, str) else "", payload)


def _privacy(name: str | None) -> Privacy:
    if name is None:
        return Privacy.PUBLIC
    if name not in Privacy.__members__:
        # No default: a typo must not make a private job public.
        expected = " or ".join(Privacy.__members__)
        text = f"privacy_class: expected {expected}, got {name[:40]!r}"
        raise InvalidRequest(text, "privacy_class")
    return Privacy[name]


def _webhook(wanted: NewWebhook | None) -> Webhook | None:
    if wanted is None:
        return None
    try:
        url = urlsplit(wanted.url)
        valid = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:  # the port, or the brackets of an IPv6 address
        valid = False
    if not valid or not all("!" <= each <= "~" for each in wanted.url):
        raise InvalidRequest(
            "webhook.url: expected an address such as https://host/path, with its "
            "special characters escaped",
            "webhook.url",
        )
    if "@" in url.netloc:
        raise InvalidRequest(
            "webhook.url: leave out the user name: the messages are signed",
            "webhook.url",
        )
    signing_key(wanted.secret)  # raises InvalidRequest if it is invalid
    return Webhook(wanted.url, wanted.secret)
