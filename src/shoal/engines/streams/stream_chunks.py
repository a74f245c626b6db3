"""OpenAI's streamed chunk of a chat or a completion, as far as engines need it.

Source: OpenAI API reference, "The chat completion chunk object" and "The completion
object".  Undeclared fields are skipped, except those of a chat's delta, which are
passed on.

Of a chunk in which a server has something that should not be there, only what cannot be
understood is lost.  Reading it is slow: ``answers`` decodes the usual chunk strictly,
and turns to ``read_odd_chunks`` only if that fails.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from shoal.domain.answer_assembly import CHOICES_MAX
from shoal.domain.outcome import Usage
from shoal.engines.streams.json_values import count, decode_json, expressible, integer

TOKENS_MAX = 2**31 - 1

FINISH_REASONS = {
    **{name: name for name in ("stop", "length", "tool_calls", "content_filter")},
    **dict.fromkeys(("max_tokens", "max_length", "model_length"), "length"),
    **dict.fromkeys(("function_call", "tool_call", "tool_use"), "tool_calls"),
    **dict.fromkeys(("safety", "recitation", "blocked"), "content_filter"),
}
"""Finish reasons by the names that servers give them; any other means ``stop``."""

# Finish reasons of vLLM and SGLang for aborted answers.
ABORTED = frozenset({"abort", "error"})


DONE = frozenset({b"[DONE]", b'"[DONE]"', b"DONE"})


class StreamChoice(msgspec.Struct, frozen=True):
    """The part of a chunk for one choice: ``delta`` in a chat, else ``text``.

    A whole answer has a ``message``.  vLLM's ``stop_reason``, and SGLang's
    ``matched_stop``, is the stop string, or the number of a token.  OpenRouter may have
    the ``error`` here.
    """

    index: int | None = 0
    delta: dict[str, Any] | None = None
    text: str | None = None
    message: dict[str, Any] | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: Any = None
    matched_stop: Any = None
    error: Any = None


class TokenDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class StreamUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    # Some servers have the names of another API of OpenAI's.
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: TokenDetails | None = None
    completion_tokens_details: TokenDetails | None = None

    def read(self) -> int | None:
        """Return the tokens of the prompt; None if they are unknown or implausible."""
        read = _known(self.prompt_tokens, self.input_tokens)
        if read is None and self.total_tokens is not None:
            written = _known(self.completion_tokens, self.output_tokens)
            read = self.total_tokens - (written or 0)
        return _plausible(read)

    def usage(self) -> Usage | None:
        """Return the tokens; None if any are unknown or implausible."""
        read = self.read()
        written = _known(self.completion_tokens, self.output_tokens)
        if read is None:
            return None
        if written is None and self.total_tokens is not None:
            written = self.total_tokens - read
        if (written := _plausible(written)) is None:
            return None
        prompt, completion = self.prompt_tokens_details, self.completion_tokens_details
        return Usage(
            read,
            written,
            None if prompt is None else _plausible(prompt.cached_tokens),
            None if completion is None else _plausible(completion.reasoning_tokens),
        )


class StreamChunk(msgspec.Struct, frozen=True):
    """A piece of the answer, its usage, or an error."""

    choices: tuple[StreamChoice, ...] | None = ()
    usage: StreamUsage | None = None
    error: Any = None
    object: Any = None


class UsageTally:
    """Counts the tokens of an answer with ``choices`` to each of its ``prompts``."""

    def __init__(self, choices: int = 1, prompts: int = 1) -> None:
        self._choices = choices
        self._expected = choices * prompts
        self._counts: list[Usage] = []

    def add(self, tokens: StreamUsage) -> None:
        """Record the server's counts, if they are plausible."""
        usage = tokens.usage()
        if usage is not None and len(self._counts) < CHOICES_MAX:
            self._counts.append(usage)

    def usage(self) -> Usage | None:
        """Return the tokens of all choices, as far as reported."""
        if not self._counts:
            return None
        if len(self._counts) != self._expected or self._expected == 1:
            return self._counts[-1]
        # llama.cpp counts each choice separately, each including the prompt.
        read = sum(each.prompt_tokens for each in self._counts)
        written = sum(each.completion_tokens for each in self._counts)
        return Usage(read // self._choices, written)


def known_finish_reason(reason: str, *, calls: bool) -> str:
    """Return the finish reason as clients know it, of a choice with ``calls`` or not.

    Some servers say that an answer with calls has stopped.
    """
    known = FINISH_REASONS.get(reason.lower(), "stop")
    if calls and known == "stop":
        return "tool_calls"
    return "stop" if known == "tool_calls" and not calls else known


def _known(count: int | None, other: int | None) -> int | None:
    return other if count is None else count


def _plausible(count: int | None) -> int | None:
    return count if count is not None and 0 <= count <= TOKENS_MAX else None


def read_odd_chunks(event: bytes) -> Iterator[StreamChunk]:
    """Yield the chunks in an event: one, or several in a list.

    Texts may have halves of characters; see ``half_characters``.

    Raises ValueError if the event is not a JSON object, nor null or an empty text.
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
        expressible(value.get("error")),
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
