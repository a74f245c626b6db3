"""Decodes a server's streamed answers.

Source: OpenAI API reference, "Streaming".
"""

import secrets
import string
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from shoal.domain.errors import EngineFailed, JobError, LimitExceeded, Unavailable
from shoal.domain.json_limits import NESTING_MAX, is_too_deep
from shoal.domain.outcome import STOP_REASON, AnswerPiece, Delta
from shoal.domain.streamed_message import REASONING, MessageReader
from shoal.domain.work import JSON
from shoal.engines import server_errors
from shoal.engines.engine import Finished
from shoal.engines.streams.json_values import HalfCharacters
from shoal.engines.streams.sse import ErrorEvent, EventReader
from shoal.engines.streams.stream_chunks import (
    ABORTED,
    DONE,
    StreamChoice,
    StreamChunk,
    UsageTally,
    known_finish_reason,
    read_odd_chunks,
)

TRUNCATED = "the server's answer ended in the middle"

BODY_MAX = 16 << 20  # bytes of an answer that is not streamed

BLANK = b"\xef\xbb\xbf \t\r\n"  # what may precede an answer: a byte order mark, blanks

ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # characters; Mistral's templates refuse ids of any other length

TOKEN_FIELDS = ("content", *REASONING[:2])
"""The fields of a delta with a token, in the forms of most servers."""

THOUGHTS = (0, REASONING[0])
"""What the thoughts of the only choice are texts of."""

DONE_EVENT = b"[DONE]"

# llama-server sends null while it reads one of several prompts.
_decode_all = msgspec.json.Decoder(list[StreamChunk | None]).decode


class StopStrings:
    """Looks for ``stops`` in the text of an answer; ``found`` is the one that ended it.

    Text that may be the beginning of one is held back.  One may begin in the
    ``beginning`` of the answer, which was passed on before.
    """

    def __init__(self, stops: Sequence[str], beginning: str = "") -> None:
        self.found = ""
        self._stops = stops
        self._held = beginning[self._beginning_of_stop(beginning) :]
        self._passed_on = len(self._held)  # characters of what is held

    def passed(self, pieces: Sequence[AnswerPiece]) -> list[AnswerPiece]:
        """Return what of these pieces, and of what was held back, is in the answer."""
        passed: list[AnswerPiece] = []
        for piece in pieces:
            if self.found:
                break
            if isinstance(piece, str):
                passed += self._passed_text(self._held + piece)
            else:
                passed += [*self.rest(), piece]
        return passed

    def rest(self) -> list[AnswerPiece]:
        """Return what was held back, and is not a stop string."""
        held, self._held = self._held[self._passed_on :], ""
        self._passed_on = 0
        return [held] if held else []

    def _passed_text(self, text: str) -> list[AnswerPiece]:
        found = [(text.find(stop), -len(stop), stop) for stop in self._stops]
        at, _, self.found = min(
            (each for each in found if each[0] >= 0), default=(len(text), 0, "")
        )
        if not self.found:
            at = self._beginning_of_stop(text)
        self._held = "" if self.found else text[at:]
        new = text[self._passed_on : at]
        self._passed_on = max(self._passed_on - at, 0)
        passed: list[AnswerPiece] = [new] if new else []
        return [*passed, Delta(0, {STOP_REASON: self.found})] if self.found else passed

    def _beginning_of_stop(self, text: str) -> int:
        """Return where a stop string may begin at the end of a text; else its end."""
        longest = max(map(len, self._stops), default=0)
        for at in range(max(0, len(text) - longest + 1), len(text)):
            if any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)


def new_call_id() -> str:
    """Return an id for a call that came without one."""
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))


class AnswerReader:
    """Decodes one answer; ``done`` once it is complete.

    The answer ends at the strings of ``stop_at``, for servers that do not.

    Args:
        choices: for each of the ``prompts``.
        secret: text removed from the server's error messages.
    """

    def __init__(self, choices: int = 1, prompts: int = 1, secret: str = "") -> None:
        self.done = False
        self._choices = choices * prompts
        self._prompts = prompts
        self._tally = UsageTally(choices, prompts)
        self._secret = secret
        self._body: bytearray | None = bytearray()  # None: it is a stream
        self._events = EventReader()
        self._batch = PieceBatch()
        self._stops: StopStrings | None = None
        self._halves = HalfCharacters()
        self._messages: dict[int, MessageReader] = {}  # of the choices that began
        self._only: int | None = None  # the index of the only choice
        self._plain = False  # whether a text of the choice 0 is a piece as it is
        self._begun = False  # whether there was any piece
        self._by_message = False  # whether pieces are a ``message``
        self._reasons: dict[int, str] = {}  # why choices ended
        # Choices that ended for the reason "", by which some servers mean null.
        self._blank: set[int] = set()
        self._blank_is_null = False

    def stop_at(self, stops: Sequence[str]) -> None:
        """End the answer at the first of these strings in its text."""
        self._stops = StopStrings(stops) if stops else None

    def feed(self, data: bytes) -> list[AnswerPiece]:
        """Decode received bytes; return the complete pieces, joined where possible.

        A server that does not stream sends a JSON object, whose pieces come at the
        ``end``.

        Raises JobError if the format is invalid, and the result of ``stream_error`` if
        the server reports an error.
        """
        if self._body is not None:
            if not self._body:
                data = data.lstrip(BLANK)
            if self._body or data.startswith((b"{", b"[")):
                self._body += data
                if len(self._body) > BODY_MAX:
                    raise JobError(f"the server sent more than {BODY_MAX} bytes")
                return []
            if not data:
                return []
            self._body = None
        try:
            self._read(self._events.feed(data))
        except LimitExceeded as error:
            raise JobError(f"the server sent too much: {error}") from error
        pieces = self._batch.take()
        return pieces if self._stops is None else self._stopped(self._stops, pieces)

    def end(self) -> list[AnswerPiece]:
        """Return the last pieces, when no more data comes."""
        if self._body:
            self._read([bytes(self._body)])
            self.done = True
        elif not self.done:
            with suppress(JobError):  # the stream was cut in an event
                self._read(self._events.flush())
        pieces = self._batch.take()
        if self._halves.pending:
            pieces += self._halves.drain()
        if self._stops is None:
            return pieces
        return [*self._stopped(self._stops, pieces), *self._stops.rest()]

    @property
    def missing(self) -> list[int]:
        """The choices that the server left out, once the answer is ``finished``."""
        return [each for each in range(self._choices) if each not in self._messages]

    def finished(self) -> Finished:
        """Return how the answer ended.

        Raises ServerLost if the stream broke off, EngineFailed if it did before there
        was anything, as the job may be the cause, and JobError if there is no answer,
        or no answer to one of several prompts.
        """
        begun = self._messages.keys()
        ended = self._reasons.keys() | (set() if self._blank_is_null else self._blank)
        missing = self.missing if self._prompts > 1 else []
        if not self.done and (missing or not begun or not begun <= ended):
            raise (
                server_errors.ServerLost(TRUNCATED)
                if begun
                else EngineFailed(TRUNCATED)
            )
        if not begun:
            raise JobError("the server sent an empty answer")
        if missing:
            of_all = f"{len(missing)} of {self._choices}"
            raise JobError(f"the server left out {of_all} choices")
        if any(each.nameless_arguments for each in self._messages.values()):
            raise JobError("the server sent a tool call without a name")
        reason = self._reasons.get(0, "stop")
        calls = 0 in begun and self._messages[0].has_calls
        return Finished(known_finish_reason(reason, calls=calls), self._tally.usage())

    def _stopped(
        self, stops: StopStrings, pieces: Sequence[AnswerPiece]
    ) -> list[AnswerPiece]:
        passed = stops.passed(pieces)
        if stops.found:
            self.done = True
            self._reasons[0] = "stop"
        return passed

    def _read(self, events: list[bytes]) -> None:
        """Add the pieces of some events, which are decoded together if they can be."""
        if self.done or not events:
            return
        ends = events[-1] == DONE_EVENT
        events = events[:-1] if ends else events
        try:
            chunks = _decode_all(b"[%b]" % b",".join(events))
        except server_errors.DECODE_ERRORS:
            chunks = []
        try:
            if len(chunks) == len(events):
                self._read_chunks(chunks, events)
            elif len(events) == 1:
                self._read_odd(events[0])
            else:
                for event in events:
                    self._read([event])
        except RecursionError as error:
            raise JobError("the server sent a chunk nested too deeply") from error
        self.done = self.done or ends
        self._begun = self._begun or bool(self._batch)

    def _read_chunks(
        self, chunks: Sequence[StreamChunk | None], events: Sequence[bytes]
    ) -> None:
        batch = self._batch
        for chunk, event in zip(chunks, events, strict=True):
            if chunk is None:
                continue
            choices = chunk.choices
            if self._plain and choices and len(choices) == 1 and not chunk.error:
                # The hot path, once per token: a text or a thought, and nothing else.
                choice = choices[0]
                delta, name, text = choice.delta, "content", choice.text
                if delta is not None:
                    size = len(delta)
                    text = None
                    if size == 1 or (size == 2 and "role" in delta):
                        for name in TOKEN_FIELDS:
                            if (text := delta.get(name)) is not None:
                                break
                if (
                    text
                    and type(text) is str
                    and choice.index == 0
                    and choice.finish_reason is None
                    and choice.logprobs is None
                    and chunk.usage is None
                ):
                    texts_of = None if name == "content" else THOUGHTS
                    if texts_of != batch.texts_of:
                        batch.begin(texts_of)
                    batch.texts.append(text)
                    continue
            self._read_chunk(chunk, event)

    def _read_odd(self, event: bytes) -> None:
        if event.strip().upper() in DONE:
            self.done = True
            return
        if isinstance(event, ErrorEvent):
            raise server_errors.stream_error(event, self._secret)
        try:
            chunks = list(read_odd_chunks(event))
        except ValueError as error:
            if len(lines := event.splitlines()) > 1:
                # There was no empty line between the events.
                for line in lines:
                    self._read([line])
                return
            raise JobError(f"the server sent no chunk of an answer: {error}") from error
        for chunk in chunks:
            self._read_chunk(chunk, event, odd=True)

    def _read_chunk(self, chunk: StreamChunk, event: bytes, odd: bool = False) -> None:
        """Read a chunk; an ``odd`` one has halves of characters."""
        if (
            chunk.error
            or isinstance(event, ErrorEvent)
            or not (
                chunk.choices or chunk.usage or not server_errors.describes_error(event)
            )
        ):
            raise server_errors.stream_error(event, self._secret)
        for position, choice in enumerate(chunk.choices or ()):
            if choice.error:
                event = msgspec.json.encode({"error": choice.error})
                raise server_errors.stream_error(event, self._secret)
            index = position if choice.index is None else choice.index
            if self._choices == 1:
                if self._only is None:
                    self._only = index
                index = 0 if index == self._only else -1
            if choice.logprobs is not None and _is_too_deep(event, choice.logprobs):
                choice = msgspec.structs.replace(choice, logprobs=None)
            if 0 <= index < self._choices:  # others were not asked for
                self._read_choice(index, choice, odd)
        self._plain = self._only == 0 and not self._halves.pending
        if chunk.usage is not None:
            self._tally.add(chunk.usage)

    def _read_choice(self, index: int, choice: StreamChoice, odd: bool) -> None:
        batch = self._batch
        message = self._messages.get(index)
        if message is None:
            message = self._messages[index] = MessageReader(new_call_id)
        delta = choice.delta
        if not delta:
            delta = {} if choice.text is None else {"content": choice.text}
            # Some servers repeat the whole message at the end of the stream.
            if choice.message and (self._by_message or not (self._begun or batch)):
                delta = choice.message
                self._by_message = True
        try:
            fields = message.read(delta)
        except ValueError as error:
            raise JobError(f"the server sent {error}") from error
        if odd or self._halves.pending:
            fields = self._halves.join_fields(index, fields)
        several = self._choices > 1
        reason: str | None = None
        if choice.finish_reason is not None:
            reason = self._read_reason(index, choice.finish_reason)
            for stop in (choice.stop_reason, choice.matched_stop):
                if isinstance(stop, str):
                    fields = {**fields, STOP_REASON: stop}
        if reason is not None and (several or message.has_calls):
            reason = known_finish_reason(reason, calls=message.has_calls)
            if reason != "length":
                fields = message.complete_calls(fields)
        reason = reason if several else None
        if not (fields or choice.logprobs is not None or reason):
            return
        text = fields.get("content")
        plain = len(fields) == 1 and choice.logprobs is None and not several
        if plain and isinstance(text, str):
            batch.add(text)
        else:
            batch.add(Delta(index, fields, choice.logprobs, reason))

    def _read_reason(self, index: int, reason: str) -> str | None:
        """Record why a choice ended; return the reason, None if it may not have."""
        if not reason:
            self._blank_is_null = self._blank_is_null or index in self._blank
            self._blank.add(index)
            return None
        if reason.lower() in ABORTED:
            raise Unavailable("the server aborted the answer")
        self._reasons[index] = reason
        return reason


def _is_too_deep(event: bytes, value: JSON) -> bool:
    brackets = event.count(b"[") + event.count(b"{")
    return brackets > NESTING_MAX and is_too_deep(value)


class PieceBatch:
    """Pieces in order; adjacent pieces of the same text are joined.

    The cost of forwarding depends on the number of pieces far more than on their size.
    ``texts`` are those that will be joined next, and ``texts_of`` the choice and the
    field that they are of; None: the text of the only choice.
    """

    def __init__(self) -> None:
        self._pieces: list[AnswerPiece] = []
        self.texts: list[str] = []
        self.texts_of: tuple[int, str] | None = None

    def __bool__(self) -> bool:
        return bool(self._pieces or self.texts)

    def add(self, piece: AnswerPiece) -> None:
        if isinstance(piece, str):
            texts_of, text = None, piece
        elif (
            len(piece.fields) == 1
            and piece.logprobs is None
            and piece.finish_reason is None
            and isinstance(one := next(iter(piece.fields.values())), str)
        ):
            texts_of, text = (piece.choice, next(iter(piece.fields))), one
        else:
            self.begin(None)
            self._pieces.append(piece)
            return
        if self.texts_of != texts_of:
            self.begin(texts_of)
        self.texts.append(text)

    def begin(self, texts_of: tuple[int, str] | None) -> None:
        """Join the texts so far; others follow."""
        if self.texts:
            text = "".join(self.texts)
            self.texts.clear()
            of = self.texts_of
            self._pieces.append(text if of is None else Delta(of[0], {of[1]: text}))
        self.texts_of = texts_of

    def take(self) -> list[AnswerPiece]:
        """Return the pieces, and start over."""
        self.begin(None)
        pieces, self._pieces = self._pieces, []
        return pieces
