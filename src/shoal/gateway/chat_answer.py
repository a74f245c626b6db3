"""OpenAI's chat answers: a completion in one piece, or chunks as server-sent events.

Source: OpenAI's API reference, "The chat completion object" and "The chat completion
chunk object".
"""

from collections.abc import Iterable

import msgspec

from shoal.domain.ids import JobId
from shoal.domain.work import Chat, Outcome, Usage, text_of
from shoal.gateway.text import encode_text

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"

REASONS = frozenset({"stop", "length", "content_filter"})

PREFIX = "chatcmpl-"


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Message(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message
    finish_reason: str
    index: int = 0
    logprobs: None = None


class _Completion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: tuple[_Choice]
    usage: _Usage
    object: str = "chat.completion"


def completion(job_id: JobId, chat: Chat, outcome: Outcome, created: int) -> bytes:
    """Write an answer in one piece; ``created`` is in Unix seconds."""
    choice = _Choice(_Message(outcome.text), _reason(outcome))
    usage = _usage(chat, outcome)
    return msgspec.json.encode(
        _Completion(PREFIX + job_id, created, chat.model, (choice,), usage)
    )


class Chunks:
    """Writes one streamed answer.

    All that is the same in every chunk is written once: a token costs the encoding of
    its text and one join.
    """

    def __init__(
        self, job_id: JobId, chat: Chat, created: int, *, include_usage: bool
    ) -> None:
        self._chat = chat
        self._include_usage = include_usage
        self._head = (
            b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,'
            % (encode_text(PREFIX + job_id), created, encode_text(chat.model))
        )
        # With usage asked for, OpenAI says in every chunk that it is not there yet.
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._before = self._head + b'"choices":[{"index":0,"delta":{"content":'
        self._after = b'},"logprobs":null,"finish_reason":null}]' + self._tail
        self._opening = (
            self._head
            + b'"choices":[{"index":0,"delta":{"role":"assistant","content":"",'
            + b'"refusal":null},"logprobs":null,"finish_reason":null}]'
            + self._tail
        )

    def pieces(self, texts: Iterable[str]) -> bytes:
        """Write a chunk for each text; before the first goes the one with the role."""
        before, after = self._before, self._after
        chunks = [before + _event_text(text) + after for text in texts]
        return self._opened() + b"".join(chunks)

    def end(self, outcome: Outcome) -> bytes:
        """Write the reason for the end, the usage if it was asked for, and [DONE]."""
        ending = (
            self._head
            + b'"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":'
            + encode_text(_reason(outcome))
            + b"}]"
            + self._tail
        )
        usage = b""
        if self._include_usage:
            counts = msgspec.json.encode(_usage(self._chat, outcome))
            usage = self._head + b'"choices":[],"usage":' + counts + b"}\n\n"
        return self._opened() + ending + usage + DONE

    def _opened(self) -> bytes:
        opening, self._opening = self._opening, b""
        return opening


def estimated_usage(chat: Chat, text: str) -> Usage:
    """Guess the tokens where a wire tells none: one for every four bytes of UTF-8.

    About right for English, some way off elsewhere; it is the same for everybody.
    """
    asked = sum(_size(text_of(message)) for message in chat.messages)
    return Usage(-(-asked // 4), -(-_size(text) // 4))


def _usage(chat: Chat, outcome: Outcome) -> _Usage:
    usage = outcome.usage or estimated_usage(chat, outcome.text)
    total = usage.prompt_tokens + usage.completion_tokens
    return _Usage(usage.prompt_tokens, usage.completion_tokens, total)


def _reason(outcome: Outcome) -> str:
    # Clients choose by this word, and break on one they do not know.
    return outcome.finish_reason if outcome.finish_reason in REASONS else "stop"


def _event_text(text: str) -> bytes:
    encoded = encode_text(text)
    if not text.isascii():
        # Clients in Python that split lines with str.splitlines break here too.
        for char, escape in _LINE_ENDS:
            encoded = encoded.replace(char, escape)
    return encoded


_LINE_ENDS = tuple(
    (char.encode(), b"\\u%04x" % ord(char)) for char in ("\x85", "\u2028", "\u2029")
)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
