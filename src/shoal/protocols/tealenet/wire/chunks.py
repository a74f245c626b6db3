"""Answers as chunks, and back.

Source: TealeNet's "Cluster Messages", "inferenceChunk"; what Macs demand of a chunk;
OpenAI's API reference, "The chat completion chunk object".
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.domain.assembly import assemble, disassemble
from shoal.domain.errors import PeerError
from shoal.domain.outcome import Delta, Piece, Usage
from shoal.domain.work import JSON
from shoal.protocols.tealenet.wire.payloads import Chunk, ChunkChoice
from shoal.protocols.tealenet.wire.scalars import written

PREFIX = "chatcmpl-"
CHUNK_MAX = 4 << 20  # bytes of a message; no peer of ours takes more on a LAN
TEXT_STEP = 256 << 10  # characters in a chunk: each has 6 bytes at most
HELD_MAX = 256 << 10  # characters of an answer that was asked for in one chunk

REASONS = frozenset({"stop", "length", "content_filter", "tool_calls"})


class ChunkWriter:
    """Writes one answer: returns messages, in order.

    All that is the same in every chunk is written once: a token costs the encoding of
    its text and one join.

    Args:
        created: Unix time, in seconds.
        usage: whether the last chunk is to tell it.
        streaming: otherwise one chunk has it all, as the document says, unless it is
            longer than ``HELD_MAX``; real peers stream all the same.
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
                written(request_id),
                written(PREFIX + request_id),
                created,
                written(model),
            )
        )
        self._end = b"}" + end
        self._tail = b"]" + self._end
        self._before = self._head + b'{"index":0,"delta":{"content":'
        self._after = b"}}" + self._tail
        self._usage = usage
        self._exact = exact
        self._held: list[Piece] | None = None if streaming or exact else []
        self._held_size = 0
        self._opened: set[int] = {0} if exact else set()  # choices that have a role
        self._ended: set[int] = set()

    def pieces(self, pieces: Sequence[Piece]) -> list[bytes]:
        """Write pieces, with neighbouring texts in one chunk.

        Raises PeerError if a piece makes a message larger than ``CHUNK_MAX``.
        """
        if self._held is None:
            if len(pieces) == 1 and isinstance(text := pieces[0], str):
                return self._texts(text)
            return self._written(pieces)
        self._held += pieces
        self._held_size += sum(
            len(piece) if isinstance(piece, str) else piece.size for piece in pieces
        )
        if self._held_size <= HELD_MAX:
            return []
        held, self._held = self._held, None
        return self._written(held)

    def end(self, finish_reason: str, usage: Usage | None = None) -> list[bytes]:
        """Write what comes before ``inferenceComplete``: reasons for the end, usage."""
        if self._exact:
            return []
        if self._held is not None:
            messages = self._whole(self._held, finish_reason)
        else:
            messages = [] if self._opened else [self._role(0)]
            messages += [
                self._choice(index, {}, None, _reason(finish_reason))
                for index in sorted(self._opened - self._ended)
            ]
        if self._usage and usage is not None:
            messages.append(self._head + b'],"usage":' + _counts(usage) + self._end)
        return messages

    def _written(self, pieces: Sequence[Piece]) -> list[bytes]:
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
        if 0 in self._opened and len(text) <= TEXT_STEP:
            return [b"".join((before, written(text), after))]
        messages = [] if 0 in self._opened else [self._role(0)]
        for at in range(0, len(text), TEXT_STEP):
            part = written(text[at : at + TEXT_STEP])
            messages.append(b"".join((before, part, after)))
        return messages

    def _delta(self, delta: Delta) -> list[bytes]:
        index, reason = delta.choice, delta.finish_reason
        if self._exact:
            message = self._choice(index, delta.fields, delta.logprobs, reason, ours=1)
            return [_checked(message)]
        messages = [] if index in self._opened else [self._role(index)]
        if reason is not None:
            self._ended.add(index)
            reason = _reason(reason)
        fields = {
            name: value
            for name, value in delta.fields.items()
            if name != "role" and value is not None
        }
        messages.append(_checked(self._choice(index, fields, delta.logprobs, reason)))
        return messages

    def _role(self, index: int) -> bytes:
        self._opened.add(index)
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
        return b"".join((self._head, written(choice), self._tail))

    def _whole(self, pieces: Sequence[Piece], finish_reason: str) -> list[bytes]:
        """Write an answer in one chunk, as far as it fits in one."""
        outcome = assemble(pieces, finish_reason)
        choices = []
        for piece in disassemble(outcome) or [""]:
            delta = Delta(0, {"content": piece}) if isinstance(piece, str) else piece
            fields: dict[str, Any] = {"role": "assistant", **delta.fields}
            told = {name: value for name, value in fields.items() if value is not None}
            reason = _reason(delta.finish_reason or outcome.finish_reason)
            choices.append(ChunkChoice(delta.choice, told, delta.logprobs, reason))
        return [_checked(self._head + written(choices)[1:-1] + self._tail)]


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

    def read(self, chunk: Chunk) -> list[Piece]:
        """Return the pieces of the answer in a chunk, never empty ones."""
        if (counts := chunk.usage) is not None:
            self.usage = Usage(counts.prompt_tokens, counts.completion_tokens)
        pieces: list[Piece] = []
        for choice in chunk.choices:
            piece = self._piece(choice)
            if piece is not None:
                pieces.append(piece)
        return pieces

    def _piece(self, choice: ChunkChoice) -> Piece | None:
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
    return reason if reason in REASONS else "stop"


def _counts(usage: Usage) -> bytes:
    read, made = usage.prompt_tokens, usage.completion_tokens
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        read,
        made,
        read + made,
    )


def _checked(message: bytes) -> bytes:
    if len(message) > CHUNK_MAX:
        raise PeerError(
            f"a piece of the answer of {len(message)} bytes exceeds the limit of "
            f"{CHUNK_MAX}"
        )
    return message
