"""The parts of an answer in their order: text, reasoning, refusals and tool calls.

For dialects that number and type them.  A worker's pieces may interleave tool calls;
here one part is open at a time, and those that come meanwhile are held back.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

import msgspec

from shoal.domain.answer_assembly import replay
from shoal.domain.outcome import AnswerPiece, Outcome
from shoal.domain.tool_calls import CallAssembler, CallDraft
from shoal.domain.work import JSON
from shoal.gateway.http.responses import well_formed


class PartKind(Enum):
    """What a part of an answer is."""

    REASONING = "reasoning_content"
    TEXT = "content"
    REFUSAL = "refusal"
    TOOL_CALL = "tool_calls"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer; the text of a tool call is its arguments, as JSON text."""

    kind: PartKind
    text: str
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class PartBegun:
    """A part begins; its text is empty."""

    index: int
    part: Part


@dataclass(frozen=True, slots=True)
class PartGrown:
    """Text is appended to the open part."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class PartEnded:
    """The open part is whole."""

    index: int
    part: Part


PartEvent: TypeAlias = PartBegun | PartGrown | PartEnded


@dataclass(slots=True)
class _PartDraft:
    """A part of which more may come; ``new`` are texts that were not passed on."""

    kind: PartKind
    call: CallDraft | None = None
    call_id: str = ""
    texts: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    begun: bool = False

    def add(self, text: str) -> None:
        """Append to its text."""
        self.texts.append(text)
        self.new.append(text)

    def part(self) -> Part:
        name = self.call.name if self.call is not None else ""
        return Part(self.kind, "".join(self.texts), self.call_id, name)


class PartReader:
    """Reads the parts of the first choice of an answer from its pieces.

    Tool calls without an id get one that begins with ``call_prefix``.
    """

    def __init__(self, call_prefix: str) -> None:
        self._call_prefix = call_prefix
        self._drafts: deque[_PartDraft] = deque()  # the open part, and those held back
        self._calls = CallAssembler()
        self._called: dict[int, _PartDraft] = {}  # by the slots of their calls
        self._ended: list[Part] = []

    @property
    def parts(self) -> list[Part]:
        """All parts so far, also the open one and those held back."""
        return [*self._ended, *(draft.part() for draft in self._drafts)]

    def read(self, pieces: Iterable[AnswerPiece]) -> list[PartEvent]:
        """Return what follows from further pieces."""
        for piece in pieces:
            if isinstance(piece, str):
                self._grow(PartKind.TEXT, piece)
            elif piece.choice == 0:
                self._read_fields(piece.fields)
        return list(self._advance())

    def end(self, outcome: Outcome) -> list[PartEvent]:
        """Return what follows from the end of the answer: all parts end.

        ``outcome`` provides the parts if no piece came before.
        """
        events: list[PartEvent] = []
        if not self._ended and not self._drafts:
            events += self.read(replay(outcome))
        return [*events, *self._advance(last=True)]

    def _read_fields(self, fields: Mapping[str, JSON]) -> None:
        for kind in (PartKind.REASONING, PartKind.TEXT, PartKind.REFUSAL):
            if isinstance(text := fields.get(kind.value), str):
                self._grow(kind, text)
        calls = fields.get(PartKind.TOOL_CALL.value)
        if isinstance(calls, Sequence) and not isinstance(calls, str):
            for call, arguments in self._calls.add(calls):
                draft = self._called.get(call.slot)
                if draft is None:
                    draft = _PartDraft(PartKind.TOOL_CALL, call)
                    self._called[call.slot] = draft
                    self._drafts.append(draft)
                if arguments:
                    draft.add(arguments)

    def _grow(self, kind: PartKind, text: str) -> None:
        if not text:
            return
        if not self._drafts or self._drafts[-1].kind is not kind:
            self._drafts.append(_PartDraft(kind))
        self._drafts[-1].add(text)

    def _advance(self, *, last: bool = False) -> Iterator[PartEvent]:
        while self._drafts:
            draft, index = self._drafts[0], len(self._ended)
            if not draft.begun:
                if (call := draft.call) is not None:
                    if not (call.name or last):
                        return
                    draft.call_id = call.id or f"{self._call_prefix}{index}"
                draft.begun = True
                yield PartBegun(index, replace(draft.part(), text=""))
            if draft.new:
                yield PartGrown(index, "".join(draft.new))
                draft.new.clear()
            # Another part may begin once the arguments of this one are whole.
            may_end = draft.call is None or draft.call.is_whole
            if not last and (len(self._drafts) == 1 or not may_end):
                return
            self._drafts.popleft()
            self._ended.append(draft.part())
            yield PartEnded(index, self._ended[-1])


def call_arguments(text: str) -> dict[str, JSON] | None:
    """Return the arguments of a tool call; None if the text is not an object (yet).

    Without text there are none.  Lone surrogates become U+FFFD.
    """
    if not text.strip():
        return {}
    try:
        arguments = msgspec.json.decode(well_formed(text))
    except (msgspec.DecodeError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def parts_of(outcome: Outcome, call_prefix: str) -> list[Part]:
    """Return the parts of a whole answer; see ``PartReader``."""
    reader = PartReader(call_prefix)
    reader.end(outcome)
    return reader.parts
