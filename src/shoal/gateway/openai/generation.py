"""What the answers to chats and completions share: usage, and the stream's frame.

Source: OpenAI's API reference, "Create chat completion" and "Create completion".
"""

import msgspec

from shoal.domain.credentials import usage_of
from shoal.domain.errors import ShoalError
from shoal.domain.outcome import Delta, Outcome
from shoal.domain.work import Chat, Completion
from shoal.gateway.generation.options import matched_stop
from shoal.gateway.http.errors import error_body
from shoal.gateway.http.responses import encode_event_text, encode_json, encode_text

FINISH_REASONS = frozenset({"stop", "length", "content_filter"})

DONE = b"data: [DONE]\n\n"


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class CompletionUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens; the details are absent where the engine does not tell them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class ChunkFrame:
    """The parts that all chunks of one streamed answer have in common.

    They are encoded once: a token costs the encoding of its text and one join.
    """

    def __init__(
        self,
        work: Chat | Completion,
        answer_id: str,
        kind: str,
        created: int,
        *,
        include_usage: bool,
    ) -> None:
        """``kind`` is the value of ``object``; ``created`` is in Unix seconds."""
        self._work = work
        self._include_usage = include_usage
        self._fields = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,' % (
            *(encode_text(answer_id), encode_text(kind), created),
            encode_text(work.model),
        )
        self.head = self._fields + b'"choices":[{'
        # If the client asked for usage, OpenAI sends a null in every other chunk.
        self.tail = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        """Encode a chunk; ``choice`` is the JSON of its choice, without braces."""
        return self.head + choice + self.tail

    def end(self, outcome: Outcome) -> bytes:
        """Encode the usage, if the client asked for it, and [DONE]."""
        if not self._include_usage:
            return DONE
        usage = msgspec.json.encode(completion_usage(self._work, outcome))
        return self._fields + b'"choices":[],"usage":' + usage + b"}\n\n" + DONE


class StopReasons:
    """The stop strings that ended the choices of one streamed answer."""

    def __init__(self, work: Chat | Completion) -> None:
        self._work = work
        self._found: dict[int, str] = {}

    def read(self, delta: Delta) -> None:
        """Note what a piece tells."""
        if (found := matched_stop(self._work, delta.fields)) is not None:
            self._found[delta.choice] = found

    def encode(self, index: int, reason: str | None) -> bytes:
        """Encode the end of a chunk with a choice's finish reason; None: not yet."""
        if reason is None or index not in self._found:
            return encode_json(reason)
        return b'%b,"stop_reason":%b' % (
            encode_json(reason),
            encode_event_text(self._found[index]),
        )


def encode_stream_error(error: ShoalError) -> bytes:
    """Encode the event that ends a stream: no [DONE] follows, as it is not whole."""
    return b"data: " + error_body(error) + b"\n\n"


def completion_usage(work: Chat | Completion, outcome: Outcome) -> CompletionUsage:
    """Return the usage in OpenAI's form."""
    usage = usage_of(work, outcome)
    cached, reasoning = usage.cached_tokens, usage.reasoning_tokens
    return CompletionUsage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.tokens,
        None if cached is None else PromptTokensDetails(cached),
        None if reasoning is None else CompletionTokensDetails(reasoning),
    )
