"""Answers as chunks, and back.

Source: TealeNet's "Cluster Messages", "inferenceChunk"; what Macs demand of a chunk;
OpenAI's API reference, "The chat completion chunk object".

The chunks of one answer differ in nothing but their text.  As a fast path, a
``ChunkTemplate`` is learnt from an answer's first chunk; of chunks that match it only
the text is parsed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.domain.answer_assembly import assemble, disassemble
from shoal.domain.errors import PeerError
from shoal.domain.outcome import AnswerPiece, Delta, Usage
from shoal.domain.work import JSON
from shoal.protocols.seam.session import Data
from shoal.protocols.tealenet.codec.envelope import BadMessage, decode
from shoal.protocols.tealenet.codec.messages import (
    ChatCompletionChunk,
    ChunkChoice,
    InferenceChunk,
)
from shoal.protocols.tealenet.codec.scalars import encode_json

PREFIX = "chatcmpl-"
CHUNK_MAX = 4 << 20  # bytes of a message; no peer of ours takes more on a LAN
TEXT_STEP = 256 << 10  # characters in a chunk: each has 6 bytes at most
BUFFERED_MAX = 256 << 10  # characters of an answer that was asked for in one chunk

FINISH_REASONS = frozenset({"stop", "length", "content_filter", "tool_calls"})


class ChunkWriter:
    """Writes one answer: returns messages, in order.

    All that is the same in every chunk is written once: a token costs the encoding of
    its text and one join.

    Args:
        created: Unix time, in seconds.
        usage: whether the last chunk is to tell it.
        streaming: otherwise one chunk has it all, as the document says, unless it is
            longer than ``BUFFERED_MAX``; real peers stream all the same.
        exact: for peers of ours, who get the pieces as they are, and how the answer
            ended in ``inferenceComplete``.
        flat: as the document has it, which no Mac reads.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        created: int,
        *,
        usage: bool = False,
        streaming: bool = True,
        exact: bool = False,
        flat: bool = False,
    ) -> None:
        layer, end = (b"", b"}}") if flat else (b'{"_0":', b"}}}")
        self._head = (
            b'{"inferenceChunk":%b{"requestID":%b,"chunk":{"id":%b,'
            b'"object":"chat.completion.chunk","created":%d,"model":%b,"choices":['
            % (
                layer,
                encode_json(request_id),
                encode_json(PREFIX + request_id),
                created,
                encode_json(model),
            )
        )
        self._end = b"}" + end
        self._tail = b"]" + self._end
        self._before = self._head + b'{"index":0,"delta":{"content":'
        self._after = b"}}" + self._tail
        self._usage = usage
        self._exact = exact
        self._buffered: list[AnswerPiece] | None = None if streaming or exact else []
        self._buffered_size = 0
        self._started_choices: set[int] = (
            {0} if exact else set()
        )  # choices that have a role
        self._ended_choices: set[int] = set()

    def write(self, pieces: Sequence[AnswerPiece]) -> list[bytes]:
        """Write pieces, with neighbouring texts in one chunk.

        Raises PeerError if a piece makes a message larger than ``CHUNK_MAX``.
        """
        if self._buffered is None:
            if len(pieces) == 1 and isinstance(text := pieces[0], str):
                return self._texts(text)
            return self._chunks(pieces)
        self._buffered += pieces
        self._buffered_size += sum(
            len(piece) if isinstance(piece, str) else piece.size for piece in pieces
        )
        if self._buffered_size <= BUFFERED_MAX:
            return []
        held, self._buffered = self._buffered, None
        return self._chunks(held)

    def write_end(self, finish_reason: str, usage: Usage | None = None) -> list[bytes]:
        """Write what comes before ``inferenceComplete``: reasons for the end, usage."""
        if self._exact:
            return []
        if self._buffered is not None:
            messages = self._whole(self._buffered, finish_reason)
        else:
            messages = [] if self._started_choices else [self._role(0)]
            messages += [
                self._choice(index, {}, None, _reason(finish_reason))
                for index in sorted(self._started_choices - self._ended_choices)
            ]
        if self._usage and usage is not None:
            messages.append(self._head + b'],"usage":' + _counts(usage) + self._end)
        return messages

    def _chunks(self, pieces: Sequence[AnswerPiece]) -> list[bytes]:
        messages: list[bytes] = []
        texts: list[str] = []
        for piece in pieces:
            if isinstance(piece, str):
                texts.append(piece)
                continue
            messages += self._texts("".join(texts))
            texts.clear()
            messages += self._delta(piece)
        return messages + self._texts("".join(texts))

    def _texts(self, text: str) -> list[bytes]:
        if not text:
            return []
        before, after = self._before, self._after
        if 0 in self._started_choices and len(text) <= TEXT_STEP:
            return [b"".join((before, encode_json(text), after))]
        messages = [] if 0 in self._started_choices else [self._role(0)]
        for at in range(0, len(text), TEXT_STEP):
            part = encode_json(text[at : at + TEXT_STEP])
            messages.append(b"".join((before, part, after)))
        return messages

    def _delta(self, delta: Delta) -> list[bytes]:
        index, reason = delta.choice, delta.finish_reason
        if self._exact:
            message = self._choice(index, delta.fields, delta.logprobs, reason, ours=1)
            return [_within_limit(message)]
        messages = [] if index in self._started_choices else [self._role(index)]
        if reason is not None:
            self._ended_choices.add(index)
            reason = _reason(reason)
        fields = {
            name: value
            for name, value in delta.fields.items()
            if name != "role" and value is not None
        }
        messages.append(
            _within_limit(self._choice(index, fields, delta.logprobs, reason))
        )
        return messages

    def _role(self, index: int) -> bytes:
        self._started_choices.add(index)
        return self._choice(index, {"role": "assistant", "content": ""}, None, None)

    def _choice(
        self,
        index: int,
        fields: Mapping[str, JSON],
        logprobs: JSON,
        reason: str | None,
        ours: int | None = None,
    ) -> bytes:
        choice = ChunkChoice(index, {**fields}, logprobs, reason, ours)
        return b"".join((self._head, encode_json(choice), self._tail))

    def _whole(self, pieces: Sequence[AnswerPiece], finish_reason: str) -> list[bytes]:
        """Write an answer in one chunk, as far as it fits in one."""
        outcome = assemble(pieces, finish_reason)
        choices = []
        for piece in disassemble(outcome) or [""]:
            delta = Delta(0, {"content": piece}) if isinstance(piece, str) else piece
            fields: dict[str, Any] = {"role": "assistant", **delta.fields}
            told = {name: value for name, value in fields.items() if value is not None}
            reason = _reason(delta.finish_reason or outcome.finish_reason)
            choices.append(ChunkChoice(delta.choice, told, delta.logprobs, reason))
        return [_within_limit(self._head + encode_json(choices)[1:-1] + self._tail)]


class ChunkReader:
    """Reads one answer.

    ``finish_reason`` and ``usage`` are what the chunks said; a Mac says neither, and
    what a Rust peer counts in ``inferenceComplete`` are chunks, no tokens.

    Args:
        several: whether more than one answer was asked for; then each says how it ends.
        exact: as in ``ChunkWriter``; how the answer ended is not among the chunks.
    """

    def __init__(self, *, several: bool = False, exact: bool = False) -> None:
        self.finish_reason = "stop"
        self.usage: Usage | None = None
        self._several = several and not exact
        self._exact = exact

    def read(self, chunk: ChatCompletionChunk) -> list[AnswerPiece]:
        """Return the pieces of the answer in a chunk, never empty ones."""
        if (counts := chunk.usage) is not None:
            self.usage = Usage(counts.prompt_tokens, counts.completion_tokens)
        pieces: list[AnswerPiece] = []
        for choice in chunk.choices:
            piece = self._piece(choice)
            if piece is not None:
                pieces.append(piece)
        return pieces

    def _piece(self, choice: ChunkChoice) -> AnswerPiece | None:
        delta, logprobs = choice.delta or {}, choice.logprobs
        if self._exact and choice.shoal is not None:
            return Delta(choice.index, delta, logprobs, choice.finish_reason)
        reason = choice.finish_reason and _reason(choice.finish_reason)
        if reason and choice.index == 0:
            self.finish_reason = reason
        simple = logprobs is None and not self._several and choice.index == 0
        text = delta.get("content")
        if simple and text and len(delta) == 1:
            return text if isinstance(text, str) else None
        fields = {
            name: value
            for name, value in delta.items()
            if name != "role" and value is not None and value != "" and value != []
        }
        if (
            simple
            and isinstance(text, str)
            and len(fields) == 1
            and "content" in fields
        ):
            return text
        told = reason if self._several else None
        if not fields and logprobs is None and told is None:
            return None
        return Delta(choice.index, fields, logprobs, told)


# Private parts, in the order in which they are called.


def _reason(reason: str) -> str:
    # Clients choose by this word, and break on one they do not know.
    return reason if reason in FINISH_REASONS else "stop"


def _counts(usage: Usage) -> bytes:
    read, made = usage.prompt_tokens, usage.completion_tokens
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        read,
        made,
        read + made,
    )


def _within_limit(message: bytes) -> bytes:
    if len(message) > CHUNK_MAX:
        raise PeerError(
            f"a piece of the answer of {len(message)} bytes exceeds the limit of "
            f"{CHUNK_MAX}"
        )
    return message


TEMPLATE_KEY_SIZE = (
    76  # bytes of a chunk by which to look: up to its request's id, of 36
)

_CONTENT_FIELD = b'"content":'
_PROBE = "?"  # what makes another text of one


@dataclass(slots=True)
class ChunkTemplate:
    """What stands before and after the text in the chunks of one answer.

    Not frozen, for its fields are read for each token.
    """

    before: bytes
    after: bytes

    @property
    def key(self) -> bytes:
        """What such chunks begin with."""
        return self.before[:TEMPLATE_KEY_SIZE]

    def text(self, data: Data) -> str | None:
        """Return the text of a chunk; None if it is not like the others."""
        before, after = self.before, self.after
        if (
            not isinstance(data, bytes)
            or not data.startswith(before)
            or not data.endswith(after)
        ):
            return None
        try:
            return _text_decoder.decode(data[len(before) : -len(after)])
        except ValueError:
            return None


def find_template(
    data: Data, message: InferenceChunk, text: str
) -> ChunkTemplate | None:
    """Return what the chunks after ``data``, of which ``text`` was read, may share.

    None, if it is of a form that none of ours writes.
    """
    if not isinstance(data, bytes):
        return None
    before, field, rest = data.partition(_CONTENT_FIELD + encode_json(text))
    found = ChunkTemplate(before + _CONTENT_FIELD, rest)
    if not field or len(before) < TEMPLATE_KEY_SIZE:
        return None
    try:
        other = decode(found.before + encode_json(text + _PROBE) + found.after)
    except BadMessage:
        return None
    if not isinstance(other, InferenceChunk) or not other.chunk.choices:
        return None
    delta = other.chunk.choices[0].delta
    if delta is None or delta.get("content") != text + _PROBE:
        return None
    delta["content"] = text
    return found if other == message else None


_text_decoder = msgspec.json.Decoder(str)
