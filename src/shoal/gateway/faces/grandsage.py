"""GrandSage's HTTP endpoint: answers a chat in lines of JSON, always with status 200.

Source: exchanges recorded with the original server; ``docs/protocols/grandsage.md``.
The original forwards input that crashes its nodes; Shoal answers "invalid request".
Ollama's clients know the same path: what is evidently theirs gets an error that they
understand, with the address of Ollama's API.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from shoal.domain import errors
from shoal.domain.credentials import Scope, usage_of
from shoal.domain.moderation import BLOCKED
from shoal.domain.outcome import AnswerPiece, plain_texts
from shoal.domain.work import INSTRUCTIONS, JSON, Chat, message_text
from shoal.gateway.chat.job_answers import answer_moderator
from shoal.gateway.chat.messages import MESSAGES_MAX
from shoal.gateway.chat.ollama.endpoints import (
    OLLAMA_FIELDS,
    OllamaMisdirected,
    is_ollama_client,
)
from shoal.gateway.context import JobsGateway
from shoal.gateway.faces import javascript
from shoal.gateway.http import responses
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.decoding import MODEL_MAX, TOKENS_MAX, missing
from shoal.gateway.http.errors import PLAIN_ERRORS, error_status
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.request_record import record_of
from shoal.gateway.jobs.job_options import build_job

api = Operations(PLAIN_ERRORS)

MODEL = "openbuddy-13b-v1.3-fp16"
SYSTEM = "You are a helpful assistant name Buddy."
MAX_NEW_TOKENS = 50
TEMPERATURE_MIN, TEMPERATURE_MAX = 0.01, 0.99  # other temperatures count as 0
TEXT_TEMPERATURE_MAX = 2.0  # of a text that only begins with a number
TOTAL = 600.0  # seconds a request may take
BODY_MAX = 2 << 20  # bytes: coercing as JavaScript does is slow

# The lines are not server-sent events, despite the type.
STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
UNAUTHORIZED_HEADERS = {"Content-Type": responses.NDJSON_TYPE}

DONE = b'{"done":true}\n'
MODERATED = (
    b'{"e":" ","err":"moderation","mod":{"eng":0,"suggestion":"stop"},"done":true}\n'
)

ERRORS: Mapping[type[errors.ShoalError], str] = {
    errors.Unauthorized: "unauthorized",
    errors.InvalidRequest: "invalid request",
    errors.TooLarge: "request too large",
    errors.TooSlow: "request timeout",
    errors.UnknownModel: "unknown model",
    errors.NoWorker: "timeout waiting for node",
    # The original does not have these.
    errors.QueueFull: "too many requests are waiting",
    errors.Forbidden: "unauthorized",
    errors.TooManyFailures: "too many requests",
    errors.RateLimited: "too many requests",
    errors.DaySpent: "too many requests",
    errors.BudgetSpent: "too many requests",
    errors.InsufficientFunds: "too many requests",
    errors.ClientError: "invalid request",
    errors.ShuttingDown: "the server is stopping",
    errors.StoreError: "the server cannot take requests",
    errors.WorkerLost: "the node was lost",
    errors.JobError: "the node failed",
    errors.Cancelled: "cancelled",
    errors.ShoalError: "timeout waiting for finish",
}


@api.post("/api/chat", "Answer a chat", documented=False)
async def create_chat(gateway: JobsGateway, request: web.Request) -> web.StreamResponse:
    if is_ollama_client(request):
        raise OllamaMisdirected
    try:
        caller = await gateway.access.authorize(request, Scope.USE, exact=True)
    except errors.ShoalError as error:
        record_of(request).error = error_status(error).code
        return await _finish(
            request,
            web.StreamResponse(headers=UNAUTHORIZED_HEADERS),
            _error_line(error),
        )
    response = web.StreamResponse(headers=STREAM_HEADERS)
    record = record_of(request)
    try:
        last = await _stream_answer(gateway, request, response, caller)
    except responses.ClientGone:
        record.error = "client_gone"
        return response
    except OllamaMisdirected:
        raise  # an error in Ollama's form, not a line
    except errors.ShoalError as error:
        record.error = error_status(error).code
        errors.release_frames(error)
        last = _error_line(error)
    return await _finish(request, response, last)


async def _stream_answer(
    gateway: JobsGateway,
    request: web.Request,
    response: web.StreamResponse,
    caller: ApiCaller,
) -> bytes:
    """Stream the answer; return the last line."""
    chat = await gateway.bodies.decode(request, caller.name, decode_chat, BODY_MAX)
    moderation = gateway.moderation_for(caller.name)
    if moderation is not None and moderation.blocks(_moderated_texts(chat)):
        return b'{"err":"moderation"}\n'
    if len(chat.model) > MODEL_MAX:
        raise errors.UnknownModel("the name is too long")
    job = build_job(gateway, request, chat, caller)
    job = replace(job, limits=replace(job.limits, total=min(TOTAL, job.limits.total)))
    async with gateway.access.submit(job, caller) as reader:
        record = record_of(request)
        record.set_reader(reader)
        await response.prepare(request)
        moderator = answer_moderator(gateway, caller.name)
        if not await responses.forward_pieces(
            request, response, reader, encode_pieces, watch=moderator
        ):
            gateway.jobs.cancel(reader.job_id, BLOCKED)
            return MODERATED
        record.usage = usage_of(chat, await reader.outcome())
    return DONE


async def _finish(
    request: web.Request, response: web.StreamResponse, last: bytes
) -> web.StreamResponse:
    try:
        if not response.prepared:
            await response.prepare(request)
        await responses.write(request, response, last, last=True)
    except responses.ClientGone:
        pass
    return response


def decode_chat(data: bytes) -> Chat:
    """Decode a body as the original does.

    Raises InvalidRequest, or OllamaMisdirected.
    """
    try:
        body = javascript.parse_json(data)
    except ValueError as error:
        raise errors.InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise errors.InvalidRequest("the body: expected an object")
    if not OLLAMA_FIELDS.isdisjoint(body):
        raise OllamaMisdirected
    model = _given(body, "model", MODEL)
    system = _text(_given(body, "system", SYSTEM), "system")
    max_new_tokens = javascript.parse_int(body.get("max_new_tokens"), TOKENS_MAX)
    if max_new_tokens < 0:
        raise errors.InvalidRequest("max_new_tokens: expected a positive number")
    return Chat(
        # A name that is not a text matches no model.
        responses.well_formed(model) if isinstance(model, str) else "",
        ({"role": "system", "content": system}, *_messages(body.get("messages"))),
        max_new_tokens or MAX_NEW_TOKENS,
        _temperature(body.get("temperature")),
    )


def _given(fields: Mapping[str, Any], name: str, default: str) -> Any:
    """Return the value of a field, or the default if JavaScript counts it as false."""
    value = fields.get(name)
    return default if javascript.is_falsy(value) else value


def _temperature(given: Any) -> float:
    """Return the temperature; the original tests the bounds before it parses a text.

    So a text that only begins with a number is within them.
    """
    number = javascript.to_number(given)
    if number < TEMPERATURE_MIN or number > TEMPERATURE_MAX:
        return 0.0
    parsed = javascript.parse_float(given)
    return 0.0 if math.isnan(parsed) else max(0.0, min(parsed, TEXT_TEMPERATURE_MAX))


def _messages(given: Any) -> list[Mapping[str, JSON]]:
    """Decode the messages, with the original's coercions."""
    if given is None:
        raise missing("messages")
    messages = [_message(message) for message in _items(given)]
    if messages and all(each["role"] in INSTRUCTIONS for each in messages):
        # Real nodes treat every message as a question, except the assistant's.
        messages[-1] = {**messages[-1], "role": "user"}
    return messages


def _items(given: Any) -> list[Any]:
    """Return the items of an array or an array-like object, as the original does.

    Raises InvalidRequest if there are too many, or one is missing.
    """
    if isinstance(given, str):
        # The original reads each character as a message without fields.
        given = [given] * javascript.utf16_length(given[: MESSAGES_MAX + 1])
    elif isinstance(given, dict):
        length = javascript.to_number(given.get("length", {}))
        if math.isnan(length):
            return []
        count = min(math.ceil(max(0.0, min(length, MESSAGES_MAX + 1))), len(given) + 1)
        given = [given.get(str(index)) for index in range(count)]
    if not isinstance(given, list):
        return []
    if len(given) > MESSAGES_MAX:
        raise errors.InvalidRequest(f"messages: more than {MESSAGES_MAX}")
    return given


def _message(given: Any) -> Mapping[str, JSON]:
    if given is None:
        raise errors.InvalidRequest("messages: expected objects")
    if not isinstance(given, dict):
        return {"role": "user", "content": ""}
    return {
        "role": _text(_given(given, "role", "user"), "role"),
        "content": _text(_given(given, "content", ""), "content"),
    }


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise errors.InvalidRequest(f"{field}: expected a text")
    return responses.well_formed(value)


def _moderated_texts(chat: Chat) -> list[str]:
    """Return the moderated texts: all but the system text."""
    return [message_text(message) for message in chat.messages[1:]]


def encode_pieces(pieces: Sequence[AnswerPiece]) -> bytes:
    """Return a line for each piece with text."""
    texts = plain_texts(pieces)
    return responses.encode_lines([{"o": text} for text in texts if text])


def _error_line(error: errors.ShoalError) -> bytes:
    line = next(ERRORS[each] for each in type(error).__mro__ if each in ERRORS)
    return b'{"err":' + responses.encode_text(line) + b"}\n"
