"""Reads what the error of a real node says about its model server.

Source: the Rust node reports every failure of its model server with the code
``internal_error``, and the server's status and body, if there was a response, in the
text.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.domain.outcome import Fault
from shoal.domain.server_refusals import ServerRefusal, classify_refusal

TEXT_MAX = 64 << 10  # characters of an error that are read
MESSAGE_MAX = 500  # characters of a server's message that are passed on

_STATUS = re.compile(r"(?<![\w.:/-])[45]\d\d(?![\w./-])")
# Addresses and paths of the node's machine.
_INTERNALS = re.compile(
    r"\b\w+://\S+|\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?|(?<!\w)/\w\S*/\S*"
)

_FAULTS: Mapping[ServerRefusal, Fault] = {
    ServerRefusal.BROKEN: Fault.ENGINE,
    ServerRefusal.CONTEXT: Fault.CONTEXT,
    ServerRefusal.FAILED: Fault.ENGINE,
    ServerRefusal.INVALID: Fault.REQUEST,
    ServerRefusal.TOO_LARGE: Fault.SIZE,
    ServerRefusal.UNPROCESSABLE: Fault.VALUES,
}
"""The refusals that end a job, at once or when repeated."""


@dataclass(frozen=True, slots=True)
class ServerFailure:
    """A failure of a model server.

    ``fault`` is None if the server refused the job, which another may do.  ``reason``
    is for clients: it has no address or path of the server.
    """

    fault: Fault | None
    reason: str


def read_server_failure(text: str) -> ServerFailure:
    """Read the text of an ``internal_error``; a text without a status is no response.

    The text is the peer's: anything is read as some failure.
    """
    text = text[:TEXT_MAX]
    head, brace, _ = text.partition("{")
    problem = _problem(text[len(head) :]) if brace else {}
    status = _status(_INTERNALS.sub("", head), problem)
    if status is None:
        return ServerFailure(None, "the node's model server failed")
    message = problem.get("message")
    message = message if isinstance(message, str) else ""
    codes = {str(problem.get("code")), str(problem.get("type"))}
    fault = _FAULTS.get(classify_refusal(status, message or head, codes))
    summary = f"the node's model server failed with status {status}"
    words = without_internals(message)[:MESSAGE_MAX]
    if fault is None or not words:
        return ServerFailure(fault, summary)
    return ServerFailure(
        fault, f"{summary}: {words}" if fault is Fault.ENGINE else words
    )


def without_internals(text: str) -> str:
    """Return a text without the addresses and paths of a peer's machine."""
    return _INTERNALS.sub("…", text)


def _problem(body: str) -> Mapping[str, Any]:
    """Return the error object at the beginning of a body in JSON; empty if none."""
    try:
        decoded, _ = json.JSONDecoder().raw_decode(body)
    except (ValueError, RecursionError):
        return {}
    match decoded:
        case {"error": str() as message}:
            return {"message": message}
        case {"error": dict() as problem}:
            return problem
        case {"detail": detail}:
            return {"message": detail}
        case dict():
            return decoded
        case _:
            return {}


def _status(head: str, problem: Mapping[str, Any]) -> int | None:
    """Return the status of the server's response; None if there was none."""
    if found := _STATUS.search(head):
        return int(found[0])
    code = problem.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else None
