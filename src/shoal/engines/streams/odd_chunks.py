"""Reads chunks of an answer in which a server has something that should not be there.

Only what cannot be understood is lost, not the chunk.  It is slow: ``answers`` decodes
the usual chunk strictly, and turns to this one only if that fails.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from shoal.engines.streams.json_values import count, decode_json, expressible, integer
from shoal.engines.streams.stream_chunks import (
    StreamChoice,
    StreamChunk,
    StreamUsage,
    TokenDetails,
)

DONE = frozenset({b"[DONE]", b'"[DONE]"', b"DONE"})


def read_odd_chunks(event: bytes) -> Iterator[StreamChunk]:
    """Yield the chunks in an event: one, or several in a list.

    Texts may have halves of characters; see ``half_characters``.

    Raises ValueError if the event is no JSON object, nor null or an empty text.
    """
    if not event.strip():
        return
    found = decode_json(event)
    values = found if isinstance(found, list) else [found]
    for value in values:
        if isinstance(value, dict):
            yield _chunk(value)
        elif value is not None:
            raise ValueError(f"a {type(value).__name__}, expected an object")


def read_usage(value: Any) -> StreamUsage | None:
    """Return the counts in a value that should have them."""
    if not isinstance(value, dict):
        return None
    counts = {
        name: count(value.get(name))
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    return StreamUsage(
        **counts,
        input_tokens=count(value.get("input_tokens")),
        output_tokens=count(value.get("output_tokens")),
        prompt_tokens_details=_details(value.get("prompt_tokens_details")),
        completion_tokens_details=_details(value.get("completion_tokens_details")),
    )


def _chunk(value: Mapping[str, Any]) -> StreamChunk:
    choices = value.get("choices")
    if isinstance(choices, dict):
        choices = [choices]
    elif not isinstance(choices, list):
        choices = []
    return StreamChunk(
        tuple(_choice(each) for each in choices if isinstance(each, dict)),
        read_usage(value.get("usage")),
        value.get("error"),
        value.get("object"),
    )


def _choice(value: Mapping[str, Any]) -> StreamChoice:
    reason = value.get("finish_reason")
    return StreamChoice(
        integer(value.get("index")),
        _message(value.get("delta")),
        None,
        _message(value.get("message")) or _message(value.get("text")),
        expressible(value.get("logprobs")),
        reason if isinstance(reason, str) else "stop" if reason else None,
        expressible(value.get("stop_reason")),
        expressible(value.get("matched_stop")),
    )


def _message(value: Any) -> dict[str, Any] | None:
    """Return the fields of a message, of which some servers send the content alone."""
    if value is None or isinstance(value, dict):
        return value
    return {"content": value}


def _details(value: Any) -> TokenDetails | None:
    if not isinstance(value, dict):
        return None
    return TokenDetails(
        count(value.get("cached_tokens")), count(value.get("reasoning_tokens"))
    )
