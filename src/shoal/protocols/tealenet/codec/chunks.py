"""Answers encoded as chunks, and decoded from them.

Source: TealeNet's "Cluster Messages", "inferenceChunk"; the fields that Macs require;
OpenAI's API reference, "The chat completion chunk object".

The chunks of one answer differ only in their text.  As a fast path, ``find_template``
derives a ``ChunkTemplate`` from an answer's first chunk; of the chunks that match it,
only the text is parsed.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.domain.answer_assembly import assemble, disassemble
from shoal.domain.errors import PeerError
from shoal.domain.outcome import AnswerPiece, Delta, Usage
from shoal.domain.streamed_message import MessageReader
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
CHUNK_MAX = 4 << 20  # bytes of a message, the limit on a LAN
TEXT_STEP = 256 << 10  # characters in a chunk, of 6 bytes at most
CALL_ID_START = 6  # characters of a request's id in the ids of its calls
BUFFERED_MAX = 256 << 10  # characters of an answer that is sent as one chunk

FINISH_REASONS = frozenset({"stop", "length", "content_filter", "tool_calls"})


class ChunkWriter:
    """Encodes one answer as messages, in order.

    The constant part of the chunks is encoded once: a token costs the encoding of its
    text and one join.

    Args:
        created: Unix time, in seconds.
        usage: whether a last chunk reports the usage.
        streaming: if not, one chunk has the whole answer, as in the document, up to
            ``BUFFERED_MAX``; real peers always stream.
        flat: in the document's form, which Macs do not read.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        created: int,
        *,
        usage: bool = False,
        streaming: bool = True,
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
        # As in the document's example: strict clients of gateways require the field.
        self._after = b'},"finish_reason":null}' + self._tail
        self._usage = usage
        self._buffered: list[AnswerPiece] | None = None if streaming else []
        self._buffered_size = 0
        self._started_choices: set[int] = set()  # those whose role was sent
        self._ended_choices: set[int] = set()

    def write(self, pieces: Sequence[AnswerPiece]) -> list[bytes]:
        """Encode pieces; adjacent texts share a chunk.

        Raises PeerError if a message exceeds ``CHUNK_MAX``.
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
        buffered, self._buffered = self._buffered, None
        return self._chunks(buffered)

    def write_end(self, finish_reason: str, usage: Usage | None = None) -> list[bytes]:
        """Encode the finish reasons and the usage, before ``inferenceComplete``."""
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
        self, index: int, fields: Mapping[str, JSON], logprobs: JSON, reason: str | None
    ) -> bytes:
        """Encode a choice as in the document: its ``finish_reason`` may be null."""
        choice: dict[str, JSON] = {"index": index, "delta": {**fields}}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        encoded = encode_json(choice | {"finish_reason": reason})
        return b"".join((self._head, encoded, self._tail))

    def _whole(self, pieces: Sequence[AnswerPiece], finish_reason: str) -> list[bytes]:
        """Encode an answer as one chunk.  Raises PeerError beyond ``CHUNK_MAX``."""
        outcome = assemble(pieces, finish_reason)
        choices = []
        for piece in disassemble(outcome) or [""]:
            delta = Delta(0, {"content": piece}) if isinstance(piece, str) else piece
            fields: dict[str, Any] = {"role": "assistant", **delta.fields}
            fields = {
                name: value for name, value in fields.items() if value is not None
            }
            reason = _reason(delta.finish_reason or outcome.finish_reason)
            choices.append(ChunkChoice(delta.choice, fields, delta.logprobs, reason))
        return [_within_limit(self._head + encode_json(choices)[1:-1] + self._tail)]


class ChunkReader:
    """Decodes one answer.

    ``finish_reason`` and ``usage`` come from the chunks: a Mac's ``inferenceComplete``
    has neither, and a Rust peer's counts chunks instead of tokens.  ``ended`` says
    whether the chunks had either: usage is always requested, so that the answer of a
    real peer without both is truncated.  ``has_nulls``: a chunk had the finish reason
    null, as in the document.

    Args:
        request_id: of which ids are made for calls without one.
        several: whether the request was for several choices; each has its finish
            reason.
    """

    def __init__(self, request_id: str = "", *, several: bool = False) -> None:
        self.finish_reason = "stop"
        self.usage: Usage | None = None
        self.ended = False
        self.has_nulls = False
        self._several = several
        # A peer passes on what its engine sends.
        self._messages: dict[int, MessageReader] = {}
        self._call_ids = (
            f"{request_id[:CALL_ID_START]}{number:03}" for number in itertools.count()
        )

    def read(self, chunk: ChatCompletionChunk) -> list[AnswerPiece]:
        """Return the pieces of the answer in a chunk, without empty ones."""
        if (counts := chunk.usage) is not None:
            self.usage = Usage(counts.prompt_tokens, counts.completion_tokens)
            self.ended = True
        pieces: list[AnswerPiece] = []
        for choice in chunk.choices:
            piece = self._piece(choice)
            if piece is not None:
                pieces.append(piece)
        return pieces

    def _piece(self, choice: ChunkChoice) -> AnswerPiece | None:
        delta, logprobs = choice.delta or {}, choice.logprobs
        if choice.finish_reason is None:
            self.has_nulls = True
        reason = _reason(choice.finish_reason) if choice.finish_reason else None
        simple = logprobs is None and not self._several and choice.index == 0
        text = delta.get("content")
        if simple and text and len(delta) == 1 and not reason:
            return text if isinstance(text, str) else None
        message = self._messages.get(choice.index)
        if message is None:
            message = MessageReader(self._call_ids.__next__)
            self._messages[choice.index] = message
        try:
            fields = message.read(delta)
        except ValueError as error:
            raise PeerError(f"chunk: {error}") from error
        if reason:
            self.ended = True
            if message.has_calls and reason != "length":
                reason = "tool_calls" if reason == "stop" else reason
                fields = message.complete_calls(fields)
            if choice.index == 0:
                self.finish_reason = reason
        text = fields.get("content")
        if simple and isinstance(text, str) and len(fields) == 1:
            return text
        ending = reason if self._several else None
        if not fields and logprobs is None and ending is None:
            return None
        return Delta(choice.index, fields, logprobs, ending)


# Private parts, in the order in which they are called.


def _reason(reason: str) -> str:
    # Clients branch on the reason, and fail on unknown ones.
    return reason if reason in FINISH_REASONS else "stop"


def _counts(usage: Usage) -> bytes:
    prompt, completion = usage.prompt_tokens, usage.completion_tokens
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        prompt,
        completion,
        prompt + completion,
    )


def _within_limit(message: bytes) -> bytes:
    if len(message) > CHUNK_MAX:
        raise PeerError(
            f"a piece of the answer of {len(message)} bytes exceeds the limit of "
            f"{CHUNK_MAX}"
        )
    return message


TEMPLATE_KEY_SIZE = 76  # bytes of a chunk up to and including its request's id

_CONTENT_FIELD = b'"content":'
_PROBE = "?"  # appended to a text to change it


@dataclass(slots=True)
class ChunkTemplate:
    """The bytes before and after the text in the chunks of one answer.

    Not frozen, because its fields are read for each token.
    """

    before: bytes
    after: bytes

    @property
    def key(self) -> bytes:
        """The prefix of the chunks."""
        return self.before[:TEMPLATE_KEY_SIZE]

    def text(self, data: Data) -> str | None:
        """Return the text of a chunk; None if it does not match."""
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
    """Return the template of a chunk with this text; None if it has another form."""
    if not isinstance(data, bytes):
        return None
    before, field, rest = data.partition(_CONTENT_FIELD + encode_json(text))
    template = ChunkTemplate(before + _CONTENT_FIELD, rest)
    if not field or len(before) < TEMPLATE_KEY_SIZE:
        return None
    try:
        other = decode(template.before + encode_json(text + _PROBE) + template.after)
    except BadMessage:
        return None
    if not isinstance(other, InferenceChunk) or not other.chunk.choices:
        return None
    delta = other.chunk.choices[0].delta
    if delta is None or delta.get("content") != text + _PROBE:
        return None
    delta["content"] = text
    return template if other == message else None


_text_decoder = msgspec.json.Decoder(str)
