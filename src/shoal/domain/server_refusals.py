"""Why a model server did not do a job, from its status and its message.

Source: responses of real servers.  The wordings of llama-server, vLLM, SGLang and LM
Studio are from their sources or issue trackers.
"""

import re
from collections.abc import Set
from enum import Enum


class ServerRefusal(Enum):
    """Why a model server did not do a job."""

    BROKEN = "broken"  # it may do the job once it has recovered
    BUSY = "busy"  # another server may do the job, or this one later
    CONTEXT = "context"  # the request exceeds the model's context
    FAILED = "failed"
    INVALID = "invalid"  # the request is at fault
    KEY = "key"  # the server refuses the key of its owner
    NO_MODEL = "no model"
    NOT_SUPPORTED = "not supported"  # the kind of work
    TOO_LARGE = "too large"  # the request
    UNPROCESSABLE = "unprocessable"  # well-formed, with unusable values


# Of a paid service, 402 is an empty account: no request is at fault, nor the key.
# The others: timeout, rate limit, no capacity, still loading, a proxy without its
# server.
BUSY = frozenset({402, 408, 425, 429, 502, 503, 504, 529})
FORBIDDEN = frozenset({401, 403})
NOT_FOUND = frozenset({404, 405, 501})
AT_FAULT = {
    400: ServerRefusal.INVALID,
    413: ServerRefusal.TOO_LARGE,
    422: ServerRefusal.UNPROCESSABLE,
}
"""Statuses of requests that are at fault."""

CONTEXT_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})

# llama-server: "request (N tokens) exceeds the available context size (M tokens)", of
# embeddings "too large to process"; vLLM: "This model's maximum context length is N
# tokens. However, you requested …", "longer than the maximum model length"; SGLang:
# "longer than the model's context length"; Ollama: "the input length exceeds the
# context length"; LM Studio: "Trying to keep the first N tokens when context the
# overflows", "Context size has been exceeded".
_CONTEXT = re.compile(
    r"exceed\w* (the |max(imum)? |available |model'?s? )*context"
    r"|context (size|length|window) (has been |is |was )?exceeded"
    r"|maximum context length|maximum model length|model'?s context length"
    r"|context length is only|context the overflows|greater than the context length"
    r"|too large to process",
    re.IGNORECASE,
)
# The number in most of these: "context size (4096 tokens)", "context length is 4096",
# "model length of 4096", "context length of only 4096 tokens".
_STATED_CONTEXT = re.compile(
    r"(?:context (?:size|length|window)|model length)"
    r"\W*(?:(?:is|of|only)\W+)*(\d{1,9})\b",
    re.IGNORECASE,
)
_NO_MODEL = re.compile(
    r"model\b.{0,200}(not found|does not exist|not exist|is not loaded)"
    r"|no models? (is |are )?loaded|invalid model identifier",
    re.IGNORECASE | re.DOTALL,
)
# Status 500 for a job that may succeed on another worker, or later.
_TEMPORARY = re.compile(
    r"loading model|model is loading|server (is )?busy|shutting down", re.IGNORECASE
)
_BROKEN = re.compile(
    r"requires more system memory|out of memory|failed to load model|model has crashed"
    r"|runner process (has terminated|no longer running)|engine ?core"
    r"|engine.{0,20}dead",
    re.IGNORECASE,
)
# llama-server answers with status 500 for an invalid message.
_INVALID = re.compile(
    r"failed to parse (messages|tools)|(image|audio|video) input is not supported",
    re.IGNORECASE,
)


def classify_refusal(status: int, message: str, codes: Set[str]) -> ServerRefusal:
    """Return why a server answered with an error.

    ``message`` is its text, and ``codes`` are the names that it gives the error.
    """
    if status in FORBIDDEN:
        return ServerRefusal.KEY
    exceeds_context = not codes.isdisjoint(CONTEXT_CODES) or _CONTEXT.search(message)
    if exceeds_context and status not in BUSY:
        return ServerRefusal.CONTEXT
    if status in BUSY or (status >= 500 and _TEMPORARY.search(message)):
        return ServerRefusal.BUSY
    if status >= 500 and _BROKEN.search(message):
        return ServerRefusal.BROKEN
    if "model_not_found" in codes or (
        (status in AT_FAULT or status == 404) and _NO_MODEL.search(message)
    ):
        return ServerRefusal.NO_MODEL
    if status in NOT_FOUND:
        return ServerRefusal.NOT_SUPPORTED
    if status == 500 and _INVALID.search(message):
        return ServerRefusal.INVALID
    return AT_FAULT.get(status, ServerRefusal.FAILED)


def stated_context(message: str) -> int | None:
    """Return the context, in tokens, that a refusal for length states, if it does."""
    found = _STATED_CONTEXT.search(message)
    return int(found[1]) or None if found is not None else None
