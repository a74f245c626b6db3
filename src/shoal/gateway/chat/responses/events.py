"""The events of a streamed response, numbered so that a stream can be resumed anywhere.

An event that brings text has as many numbers as the text has characters, and shows the
last; every other event has one.  So the number of an event says how much of the answer
came before it, however the text was cut into events: a resumed stream begins at exactly
the character after the last that arrived.

Source: OpenAI's API reference, "Streaming events".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.domain.errors import ShoalError
from shoal.domain.outcome import AnswerPiece, Outcome
from shoal.domain.work import JSON
from shoal.gateway.chat.answer_parts import (
    Part,
    PartBegun,
    PartEnded,
    PartEvent,
    PartGrown,
    PartKind,
    PartReader,
)
from shoal.gateway.chat.logprobs import LogprobQueue
from shoal.gateway.chat.responses import response_object
from shoal.gateway.http.errors import error_report
from shoal.gateway.http.responses import encode_event, encode_event_text, encode_json

NUMBERS_PER_START = 1 << 26
"""Numbers of the events of one answer: far more than an answer may have characters.

An answer that started over, because the coordinator restarted, has the next ones.  With
30 restarts they still fit into 32 bits, which some clients have for them.
"""


@dataclass(frozen=True, slots=True)
class _Events:
    """The types of the events about parts of one kind, and the field with the text."""

    delta: str
    done: str
    text_field: str
    added: str = ""  # the event around them, if there is one
    ended: str = ""
    index: str = ""  # the name of the part's index within its item


_CONTENT = "response.content_part.added", "response.content_part.done"

EVENTS: Mapping[PartKind, _Events] = {
    PartKind.TEXT: _Events(
        *("response.output_text.delta", "response.output_text.done", "text"),
        *_CONTENT,
        "content_index",
    ),
    PartKind.REFUSAL: _Events(
        *("response.refusal.delta", "response.refusal.done", "refusal"),
        *_CONTENT,
        "content_index",
    ),
    PartKind.REASONING: _Events(
        *("response.reasoning_text.delta", "response.reasoning_text.done", "text"),
        *_CONTENT,
        "content_index",
    ),
    PartKind.TOOL_CALL: _Events(
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "arguments",
    ),
}

SUMMARY_EVENTS = _Events(
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    "text",
    "response.reasoning_summary_part.added",
    "response.reasoning_summary_part.done",
    "summary_index",
)
"""The events about reasoning, for a client that asked for its summary."""


class ResponseEventEncoder:
    """Writes the events of one response, those ``after`` a number.

    ``starts`` is how often the answer has started over.
    """

    def __init__(
        self, draft: response_object.ResponseDraft, *, starts: int = 0, after: int = -1
    ) -> None:
        self._draft = draft
        self._next = starts * NUMBERS_PER_START
        self._after = after
        self._reader = PartReader(draft.call_prefix)
        self._items: list[response_object.OutputItem] = []
        self._logprobs = LogprobQueue()
        self._created = self._progressing = False
        self._events = EVENTS[PartKind.TEXT]  # of the open part
        self._before = b""  # a delta of the open part, up to its text

    def encode(self, pieces: Sequence[AnswerPiece]) -> bytes:
        """Write what came; without pieces, that the response was created."""
        begin = self._begin()
        if not pieces:
            return begin
        begin += self._progress()
        self._logprobs.read(pieces)
        return begin + self._parts(self._reader.read(pieces))

    def encode_end(self, outcome: Outcome) -> bytes:
        """Write the rest of the answer, and the whole response."""
        begin = self._begin() + self._progress()
        if not self._reader.parts:
            self._logprobs.read_outcome(outcome)
        reason = response_object.incomplete_reason(outcome)
        parts = self._parts(self._reader.end(outcome), complete=reason is None)
        status: response_object.ResponseStatus = (
            "completed" if reason is None else "incomplete"
        )
        response = self._draft.response(status, self._items, outcome=outcome)
        return begin + parts + self._response_event(status, response)

    def encode_error(self, error: ShoalError) -> bytes:
        """Write how the job ended that has no outcome."""
        begin = self._begin()
        # Not all that was written may be known: nothing may come after this event.
        self._next = max(self._next, self._after + 1)
        parts = self._reader.parts
        output = [
            *self._items,
            *(
                self._draft.item(index, parts[index], "incomplete")
                for index in range(len(self._items), len(parts))
            ),
        ]
        response = self._draft.failed(error, output)
        return begin + self._response_event("failed", response)

    def encode_interruption(self, error: ShoalError) -> bytes:
        """Write why the stream ends before the response does."""
        report = error_report(error)
        self._next = max(self._next, self._after + 1)
        return self._begin() + self._event(
            "error", code=report.code, message=report.message, param=report.param
        )

    def _begin(self) -> bytes:
        if self._created:
            return b""
        self._created = True
        if not self._draft.fields.background:
            created = self._response_event(
                "created", self._draft.response("in_progress")
            )
            return created + self._progress()
        response = self._draft.response("queued")
        created = self._response_event("created", response)
        return created + self._response_event("queued", response)

    def _progress(self) -> bytes:
        if self._progressing:
            return b""
        self._progressing = True
        return self._response_event("in_progress", self._draft.response("in_progress"))

    def _parts(self, events: Sequence[PartEvent], *, complete: bool = True) -> bytes:
        written = []
        for position, event in enumerate(events):
            match event:
                case PartBegun(index, part):
                    written.append(self._part_begun(index, part))
                case PartGrown(_, text):
                    written.append(self._delta(text))
                case PartEnded(index, part):
                    whole = complete or position < len(events) - 1
                    written.append(self._part_ended(index, part, whole=whole))
        return b"".join(written)

    def _part_begun(self, index: int, part: Part) -> bytes:
        kind = part.kind
        is_summary = kind is PartKind.REASONING and self._draft.fields.summary
        self._events = SUMMARY_EVENTS if is_summary else EVENTS[kind]
        place = self._place(index, kind)
        self._before = b'event: %b\ndata: {"type":"%b",%b,"delta":' % (
            self._events.delta.encode(),
            self._events.delta.encode(),
            encode_json(place)[1:-1],
        )
        item = self._draft.item(index, part, "in_progress")
        added = self._event(
            "response.output_item.added", output_index=index, item=_emptied(item)
        )
        if not self._events.added:
            return added
        return added + self._event(self._events.added, **place, part=_content(item))

    def _delta(self, text: str) -> bytes:
        first = self._next
        self._next += len(text)
        seen = self._after - first + 1  # characters that the client has
        logprobs = b""
        if self._events.delta == EVENTS[PartKind.TEXT].delta:
            entries = self._logprobs.take(text, max(seen, 0))
            encoded = encode_json(entries) if entries else b"[]"
            logprobs = b',"logprobs":' + encoded
        if seen >= len(text):
            return b""
        shown = encode_event_text(text[max(seen, 0) :])
        number = self._next - 1
        return b'%b%b%b,"sequence_number":%d}\n\n' % (
            *(self._before, shown, logprobs),
            number,
        )

    def _part_ended(self, index: int, part: Part, *, whole: bool) -> bytes:
        logprobs: Sequence[JSON] = ()
        if part.kind is PartKind.TEXT:
            logprobs = self._logprobs.end_part()
        item = self._draft.item(
            index, part, "completed" if whole else "incomplete", logprobs
        )
        self._items.append(item)
        place, events = self._place(index, part.kind), self._events
        fields: dict[str, Any] = {events.text_field: part.text}
        if part.kind is PartKind.TEXT:
            fields["logprobs"] = logprobs
        if part.kind is PartKind.TOOL_CALL:
            fields["name"] = part.name
        done = self._event(events.done, **place, **fields)
        if events.ended:
            done += self._event(events.ended, **place, part=_content(item))
        return done + self._event(
            "response.output_item.done", output_index=index, item=item
        )

    def _place(self, index: int, kind: PartKind) -> dict[str, Any]:
        place: dict[str, Any] = {
            "item_id": response_object.item_id(self._draft.job_id, index, kind),
            "output_index": index,
        }
        if self._events.index:
            place[self._events.index] = 0
        return place

    def _response_event(
        self, what: str, response: response_object.ResponseObject
    ) -> bytes:
        return self._event(f"response.{what}", response=response)

    def _event(self, type_: str, **fields: object) -> bytes:
        number = self._next
        self._next += 1
        if number <= self._after:
            return b""
        data = {"type": type_, **fields, "sequence_number": number}
        return encode_event(type_, data)


def _content(item: response_object.OutputItem) -> object:
    """Return the only part within an item."""
    match item:
        case response_object.OutputMessage():
            return item.content[0]
        case response_object.ReasoningItem():
            return [*item.summary, *item.content][0]
        case response_object.FunctionCallItem():
            return None


def _emptied(item: response_object.OutputItem) -> object:
    """Return an item without the part that is added to it next."""
    match item:
        case response_object.OutputMessage():
            return msgspec.structs.replace(item, content=[])
        case response_object.ReasoningItem():
            return msgspec.structs.replace(item, summary=[], content=[])
        case response_object.FunctionCallItem():
            return item
