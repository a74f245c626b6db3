"""The lines of a batch's files: requests, and what became of them.

Source: OpenAI's API reference, "The request input object" and "The request output
object" of batches.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from shoal.domain.errors import InvalidRequest, ShoalError
from shoal.domain.ids import JobId
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
