"""Parts of a request that a server may refuse, and that it can be sent without.

Some servers refuse every field that they do not know, and some a value.  A request that
was refused for one of these parts is repeated without it, or with another in its place,
and the server gets no other for this model any more.  No part is left out without which
the answer would mean something else: then the client gets the server's error.

Source: errors of real servers, in their issue trackers.
"""

import re
from collections.abc import Collection, Mapping, Set

from shoal.domain.errors import ContextExceeded, InvalidRequest, JobError, ShoalError
from shoal.domain.options import OPTIONS
from shoal.engines.messages import LATE_SYSTEM, SYSTEM
from shoal.engines.server_errors import NotServed

STOPS_TAKEN = 4  # stop strings that servers with a limit take, as OpenAI's

OWN = frozenset({"stream_options", "encoding_format"})
"""Fields that are sent without having been asked for."""

STYLE = frozenset(
    option.name
    for option in OPTIONS
    if option.needs is None
    and option.name
    not in ("echo", "suffix", "best_of", "tool_choice", "parallel_tool_calls")
).union({"temperature", "reasoning"})
"""Options that only influence how a model answers, and its thoughts in a history."""

REPLACED = frozenset({"max_tokens", "n", "stop", "stream"})
"""The first has another name at some servers.  Choices and stop strings that the server
does not get are made here, and an answer that is not streamed is read as well."""

_UNKNOWN = re.compile(
    r"unknown|unrecogni[sz]ed|unexpected|unsupported|not support|\bextra\b|additional"
    r"|(only|is|are) supported|supports|not (yet )?implemented|not (permitted|allowed)"
    r"|invalid (field|parameter|argument)|cannot|can't",
    re.IGNORECASE,
)
_TOO_MANY = re.compile(r"up to|at most|maximum|too (many|long)|fewer", re.IGNORECASE)
_SYSTEM = re.compile(
    r"system (message|role|prompt)|roles?\b.{0,60}\balternat|conversation roles|jinja"
    r"|chat.?template|only .{0,20}user.{0,20}assistant",
    re.IGNORECASE | re.DOTALL,
)


def removable_fields(body: Mapping[str, object]) -> set[str]:
    """Return the fields of a request that ``without_refused`` can do without."""
    fields = body.keys() & (OWN | STYLE | REPLACED)
    if body.get("parallel_tool_calls") is True:  # the default
        fields.add("parallel_tool_calls")
    if body.get("tool_choice") == "auto":
        fields.add("tool_choice")
    prompt, stops = body.get("prompt"), body.get("stop")
    if "best_of" in body or not isinstance(prompt, str | None):
        fields.discard("n")
    count = len(stops) if isinstance(stops, list | tuple) else 0
    if count <= STOPS_TAKEN or not is_single_text(body):
        fields.discard("stop")
    return fields


def is_single_text(body: Mapping[str, object]) -> bool:
    """Return whether the answer is one text, which can be cut at a stop string."""
    several = "n" in body or not isinstance(body.get("prompt"), str | None)
    return not several and "logprobs" not in body


def without_refused(body: Mapping[str, object], refused: Set[str]) -> dict[str, object]:
    """Return the body of a request without what the server refuses."""
    if not refused:
        return {**body}
    removed = refused & removable_fields(body)
    fields = {name: value for name, value in body.items() if name not in removed}
    if "stream" in removed:
        fields.pop("stream_options", None)
    if "max_tokens" in removed:
        fields["max_completion_tokens"] = body["max_tokens"]
    stops = body.get("stop")
    if "stop" in removed and isinstance(stops, list | tuple):
        fields["stop"] = stops[:STOPS_TAKEN]
    return fields


def refused_part(error: ShoalError, parts: Collection[str]) -> str | None:
    """Return which of these parts of a request the server refused; None if none.

    They are fields, or what ``messages`` names.
    """
    if isinstance(error, ContextExceeded) or not (
        isinstance(error, InvalidRequest | JobError)
        or (isinstance(error, NotServed) and not error.model)
    ):
        return None
    message = str(error)
    field = error.field if isinstance(error, InvalidRequest) else None
    words: set[str] = set(re.findall(r"\w+", f"{message} {field or ''}"))
    if "reasoning_content" in words:
        words.add("reasoning")
    unknown = _UNKNOWN.search(message) is not None
    # The longest first: "stream_options" is also about a stream.
    for part in sorted(words.intersection(parts), key=len, reverse=True):
        too_many = part == "stop" and _TOO_MANY.search(message)
        if part in OWN or unknown or too_many:
            return part
    if _SYSTEM.search(message):
        return next((each for each in (LATE_SYSTEM, SYSTEM) if each in parts), None)
    return None
