"""Classifies a server's errors, and records the work that a server refuses.

Source: responses of real servers; see ``domain.server_refusals``.
"""

import asyncio
import base64
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from shoal.domain import errors
from shoal.domain import work as works
from shoal.domain.server_refusals import ServerRefusal, classify_refusal
from shoal.domain.worker import ServedModel
from shoal.engines.streams.json_values import decode_json, integer, without_halves

ERROR_MAX = 500  # characters of a server's message that are passed on
RETRY_AFTER_MAX = 600  # seconds

# Errors of msgspec, including invalid UTF-8 and excessive nesting.
DECODE_ERRORS = (ValueError, RecursionError)


class ServerLost(errors.Unavailable):
    """The server cannot be reached, or its connection broke."""


class NotServed(errors.Unavailable):
    """The server lacks the model, or this ``kind`` of work; others may have it."""

    def __init__(self, message: str, *, model: bool) -> None:
        super().__init__(message)
        self.model = model


@dataclass(frozen=True, slots=True)
class ServerProblem:
    """An error in OpenAI's form; servers vary in their values."""

    message: str = "no message"
    code: Any = None
    type: Any = None
    param: Any = None


def refusal_error(
    status: int, content_type: str, body: bytes, *, retry_after: str = "", secret: str
) -> errors.ShoalError:
    """Return the error for a response with an error status.

    Args:
        body: response body, possibly truncated.
        retry_after: Retry-After header; only seconds are used, not dates.
        secret: text removed from the server's error message.
    """
    problem = parse_problem(body, secret)
    if problem is None and "html" in content_type:
        problem = ServerProblem(f"it sent {content_type}, expected JSON")
    error = _error(status, problem or _plain_problem(body, secret))
    if isinstance(error, errors.Unavailable):
        error.retry_after = _seconds(retry_after, error.retry_after)
    return error


def stream_error(event: bytes, secret: str) -> errors.ShoalError:
    """Return the error for an error event in a stream.

    Its code is used if it is an HTTP status.
    """
    problem = parse_problem(event, secret) or _plain_problem(event, secret)
    status = integer(problem.code)
    if status is None or not 400 <= status < 600:
        status = 400 if str(problem.type) in REQUEST_ERRORS else 500
    return _error(status, problem, in_stream=True)


REQUEST_ERRORS = frozenset(
    {"invalid_request_error", "BadRequestError", "exceed_context_size_error"}
)
"""Types of errors at which the request is at fault, whatever else they say."""

MESSAGES = ("message", "msg", "detail", "error_description", "description")


def parse_problem(body: bytes, secret: str = "") -> ServerProblem | None:
    """Decode an error in one of the known formats; None if it is in none.

    OpenAI: ``{"error": {"message": …}}``; Ollama: ``{"error": "…"}``; an older vLLM:
    ``{"object": "error", "message": …}``; FastAPI: ``{"detail": …}``; Gemini has
    OpenAI's in a list.
    """
    try:
        data = decode_json(body)
    except ValueError:
        return None
    if isinstance(data, list) and len(data) == 1:
        (data,) = data
    if not isinstance(data, dict):
        return None
    error: Any = data
    while isinstance(error, dict) and (
        inner := error.get("error") or error.get("errors")
    ):
        error = inner[0] if isinstance(inner, list) else inner
    fields = {**data, **error} if isinstance(error, dict) else data
    message = None if isinstance(error, bool | dict) else error
    for name in MESSAGES:
        message = message or fields.get(name)
    if message is None and error is data:
        return None
    codes = (fields.get(name) for name in ("code", "status", "status_code"))
    return ServerProblem(
        _passed_on(_detail(message), secret),
        next((code for code in codes if code is not None), None),
        fields.get("type"),
        fields.get("param"),
    )


def describes_error(event: bytes) -> bool:
    """Return whether an event of a stream, in which nothing else is, is an error.

    Some servers send others, such as their progress.
    """
    try:
        data = decode_json(event)
    except ValueError:
        return False
    if not isinstance(data, dict):
        return False
    named = (data.get(name) for name in ("object", "type", "status"))
    has_code = any(name in data for name in ("code", "status", "status_code"))
    return (
        any(data.get(name) for name in ("error", "errors", "detail"))
        or "error" in named
        or (has_code and any(data.get(name) for name in MESSAGES))
    )


def _plain_problem(body: bytes, secret: str) -> ServerProblem:
    return ServerProblem(_passed_on(body.decode(errors="replace").strip(), secret))


def _passed_on(text: str, secret: str) -> str:
    """Return a server's message as it is shown: short, and without the secret."""
    text = without_halves(text)
    return (text.replace(secret, "…") if secret else text)[:ERROR_MAX] or "no message"


def _error(
    status: int, problem: ServerProblem, in_stream: bool = False
) -> errors.ShoalError:
    message = problem.message
    codes = {str(problem.code), str(problem.type)}
    field = problem.param if isinstance(problem.param, str) else None
    match classify_refusal(status, message, codes):
        case ServerRefusal.KEY:
            return errors.JobError(
                f"the engine refuses this worker's key (status {status}): set "
                "--engine-key"
            )
        case ServerRefusal.CONTEXT:
            return errors.ContextExceeded(message)
        case ServerRefusal.BUSY:
            return errors.Unavailable(
                f"the engine accepts no jobs (status {status}): {message}"
            )
        case ServerRefusal.BROKEN:
            return errors.EngineFailed(f"the engine fails (status {status}): {message}")
        case ServerRefusal.NO_MODEL:
            return NotServed(f"the engine lacks the model: {message}", model=True)
        case ServerRefusal.NOT_SUPPORTED:
            text = f"the engine does not support this (status {status}): {message}"
            return NotServed(text, model=False)
        case ServerRefusal.TOO_LARGE:
            return errors.TooLarge(message)
        case ServerRefusal.UNPROCESSABLE:
            return errors.Unprocessable(message, field)
        case ServerRefusal.INVALID:
            return errors.InvalidRequest(message, field)
        case ServerRefusal.FAILED if in_stream:
            return errors.JobError(message)
        case ServerRefusal.FAILED:
            return errors.JobError(
                f"the engine answers with status {status}: {message}"
            )


def _detail(detail: Any) -> str:
    """Return the text of a message: FastAPI's may be a list with locations."""
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        where = detail[0].get("loc")
        location = ".".join(map(str, where)) + ": " if isinstance(where, list) else ""
        return f"{location}{detail[0].get('msg', 'no message')}"
    if detail is None or isinstance(detail, str):
        return detail or ""
    return str(detail)


def _seconds(header: str, default: int) -> int:
    if header.isascii() and header.isdigit() and len(header) < 10:
        return min(int(header), RETRY_AFTER_MAX)
    return default


RETRY_AFTER = 60.0  # seconds between retries of refused work
REFUSED_MAX = 1024  # more than the models of one server times the kinds of work


class RefusedWork:
    """Models, and kinds of work with them, that a server has refused."""

    def __init__(self) -> None:
        self._retry_at: dict[tuple[str, works.JobKind], float] = {}  # event loop time

    def add(self, name: str, kinds: Iterable[works.JobKind]) -> None:
        """Record a refusal."""
        retry_at = asyncio.get_running_loop().time() + RETRY_AFTER
        for kind in kinds:
            if len(self._retry_at) < REFUSED_MAX or (name, kind) in self._retry_at:
                self._retry_at[name, kind] = retry_at

    def remove(self, name: str, kind: works.JobKind) -> None:
        """Forget a refusal, because the work succeeded."""
        self._retry_at.pop((name, kind), None)

    def retain(self, names: Collection[str]) -> None:
        """Forget models that the server no longer lists."""
        for name, kind in list(self._retry_at):
            if name not in names:
                del self._retry_at[name, kind]

    def due(self) -> list[tuple[str, works.JobKind]]:
        """Return the refused work that is due for a retry."""
        now = asyncio.get_running_loop().time()
        return [each for each, retry_at in self._retry_at.items() if retry_at <= now]

    def supported(self, model: ServedModel) -> ServedModel | None:
        """Return the model without refused work; None if nothing is left."""
        refused = {kind for name, kind in self._retry_at if name == model.name}
        if not refused & model.kinds:
            return model
        supported = model.kinds - refused
        return replace(model, kinds=supported) if supported else None


SILENCE = base64.b64encode(
    b"RIFF\x64\x06\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x80\x3e\0\0\0\x7d\0\0\2\0\x10\0"
    b"data\x40\6\0\0" + bytes(1600)
).decode()
"""50 ms of silence: a WAV file with 16,000 samples a second, in base64."""


def minimal_job(name: str, kind: works.JobKind) -> works.Inference:
    """Return a minimal job of a kind."""
    match kind:
        case works.JobKind.CHAT:
            return works.Chat(name, ({"role": "user", "content": "a"},), max_tokens=1)
        case works.JobKind.COMPLETION:
            return works.Completion(name, "a", max_tokens=1)
        case works.JobKind.EMBEDDING:
            return works.Embedding(name, ("a",))
        case works.JobKind.RERANK:
            return works.Rerank(name, "a", ("a",))
        case works.JobKind.TRANSCRIPTION:
            return works.Transcription(name, SILENCE, "wav")
        case _:
            raise AssertionError(f"no model does a {kind.value} by itself")
