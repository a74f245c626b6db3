"""The lines of a batch's files: requests in any dialect, and what became of them.

Another dialect is another row of ``DIALECTS``.

Source: OpenAI's API reference, "The request input object" and "The request output
object" of batches.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw

from shoal.domain.credentials import usage_of
from shoal.domain.errors import InvalidRequest, ShoalError
from shoal.domain.ids import JobId
from shoal.domain.outcome import Outcome
from shoal.domain.work import Inference
from shoal.gateway.chat.openai import embeddings
from shoal.gateway.chat.openai.answers import answer_form
from shoal.gateway.chat.openai.chat_request import decode_chat_request
from shoal.gateway.chat.openai.completion_request import decode_completion_request
from shoal.gateway.chat.responses.request import decode_response_request
from shoal.gateway.chat.responses.response_object import ResponseDraft
from shoal.gateway.chat.responses.stored_responses import chat_of, storable
from shoal.gateway.context import JobsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.decoding import ModelName, decode, decode_field, size_of
from shoal.gateway.http.errors import error_body, error_status
from shoal.gateway.http.ids import new_id
from shoal.gateway.http.responses import encode_json
from shoal.store.batches import BatchStatus

CUSTOM_ID_MAX = 512  # characters
LINE_VALUES_MAX = 1 << 20  # values of a line: its body has a smaller limit of its own

_LEFT_OUT = {
    BatchStatus.EXPIRED: "This request could not be done before the batch expired.",
    BatchStatus.CANCELLED: "This request was not done before the batch was cancelled.",
}


class BatchLine(msgspec.Struct, frozen=True):
    """A line of an input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=CUSTOM_ID_MAX)]
    method: Literal["POST"]
    url: str
    body: Raw


class LineResponse(msgspec.Struct, frozen=True):
    """The response that the request would have got."""

    status_code: int
    request_id: str
    body: Raw


class LineError(msgspec.Struct, frozen=True):
    """Why a request got no response."""

    code: str
    message: str


class BatchLineResult(msgspec.Struct, frozen=True):
    """A line of an output file or of an error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


class _NamedModel(msgspec.Struct, frozen=True):
    model: ModelName


_line = msgspec.json.Decoder(BatchLine)
_model = msgspec.json.Decoder(_NamedModel)


def decode_line(data: bytes) -> BatchLine:
    """Decode a line of an input file.  Raises InvalidRequest."""
    return decode(_line, data.strip(), LINE_VALUES_MAX)


def model_of(line: BatchLine) -> str:
    """Return the model that a line names.  Raises InvalidRequest."""
    return decode_field(_model, line.body, "body", size_of(line.body)).model


def encode_response(custom_id: str, job_id: JobId, body: bytes) -> bytes:
    """Encode the result of a line whose job is done."""
    response = LineResponse(200, job_id, Raw(body))
    return _encode(custom_id, response, None)


def encode_failure(custom_id: str, job_id: JobId | None, error: ShoalError) -> bytes:
    """Encode the result of a line that failed."""
    body = Raw(error_body(error))
    response = LineResponse(error_status(error).status, job_id or new_id(), body)
    return _encode(custom_id, response, None)


def encode_left_out(data: bytes, status: BatchStatus) -> bytes:
    """Encode the result of a line that its batch ended without."""
    try:
        custom_id = decode_line(data).custom_id
    except InvalidRequest:
        custom_id = ""  # its batch was cancelled before the line was checked
    error = LineError(f"batch_{status.value}", _LEFT_OUT[status])
    return _encode(custom_id, None, error)


def _encode(
    custom_id: str, response: LineResponse | None, error: LineError | None
) -> bytes:
    result = BatchLineResult(f"batch_req_{new_id()}", custom_id, response, error)
    return encode_json(result)


@dataclass(frozen=True, slots=True)
class DecodedLine:
    """The request of a line.

    What moderation reads is in the ``field`` of the body.  ``encode`` encodes the whole
    answer of a job, created at a time in Unix seconds.  ``api_fields`` is as in
    ``JobTerms``.
    """

    work: Inference
    field: str
    encode: Callable[[JobId, Outcome, int], bytes]
    api_fields: str = ""


LineDecoder: TypeAlias = Callable[
    [JobsGateway, ApiCaller, bytes], Awaitable[DecodedLine]
]
"""Decodes the body of a caller's request.

Raises InvalidRequest naming the invalid field.
"""


async def _chat(gateway: JobsGateway, caller: ApiCaller, body: bytes) -> DecodedLine:
    decoded = await gateway.bodies.decode_bytes(body, caller.name, decode_chat_request)
    work = decoded.work
    return DecodedLine(work, "messages", answer_form(work).encode)


async def _completion(
    gateway: JobsGateway, caller: ApiCaller, body: bytes
) -> DecodedLine:
    decoded = await gateway.bodies.decode_bytes(
        body, caller.name, decode_completion_request
    )
    work = decoded.work
    return DecodedLine(work, "prompt", answer_form(work).encode)


async def _embeddings(
    gateway: JobsGateway, caller: ApiCaller, body: bytes
) -> DecodedLine:
    decoded = await gateway.bodies.decode_bytes(
        body, caller.name, embeddings.decode_embedding_request
    )
    texts: list[str] = []
    if decoded.tokens:
        texts = await gateway.token_texts.decode(decoded.tokens, "input")
    work = decoded.work(texts)

    def encode(job_id: JobId, outcome: Outcome, created: int) -> bytes:
        return embeddings.encode_embeddings(decoded, outcome, usage_of(work, outcome))

    return DecodedLine(work, "input", encode)


async def _response(
    gateway: JobsGateway, caller: ApiCaller, body: bytes
) -> DecodedLine:
    created = int(gateway.clock.wall())
    decode = partial(decode_response_request, created=created)
    decoded = storable(
        caller, await gateway.bodies.decode_bytes(body, caller.name, decode)
    )
    chat = await chat_of(gateway, caller, decoded)

    def encode(job_id: JobId, outcome: Outcome, created: int) -> bytes:
        draft = ResponseDraft(job_id, chat, decoded.fields, decoded.stored)
        return encode_json(draft.answered(outcome))

    fields = decoded.fields.encode() if decoded.stored else ""
    return DecodedLine(chat, "input", encode, fields)


DIALECTS: Mapping[str, LineDecoder] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/embeddings": _embeddings,
    "/v1/responses": _response,
}
"""By the path that a line names."""
