"""The parts of an answer in their order: text, reasoning, refusals and tool calls.

For dialects that number and type them.  A worker's pieces may interleave tool calls;
here one part is open at a time, and those that come meanwhile are held back.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import msgspec

from shoal.domain.answer_assembly import replay
from shoal.domain.outcome import AnswerPiece, Outcome
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


PARSED_AGAIN = 16  # when so large a part of the arguments has been added


@dataclass(slots=True)
class _Draft:
    """A part of which more may come; ``new`` are texts that were not passed on."""

    kind: PartKind
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    begun: bool = False
    size: int = 0  # characters of the texts
    parse_from: int = 0  # characters, below which they are not parsed again

    def add(self, text: str) -> None:
        """Append to its text."""
        self.texts.append(text)
        self.new.append(text)
        self.size += len(text)

    def part(self) -> Part:
        return Part(self.kind, "".join(self.texts), self.call_id, self.name)

    @property
    def may_end(self) -> bool:
        """Whether the next part can begin: arguments may yet grow until they parse."""
        if self.kind is not PartKind.TOOL_CALL:
            return True
        # A worker may send megabytes that never parse, with each piece once more.
        if not self.texts or self.size < self.parse_from:
            return False
        if not self.texts[-1].rstrip().endswith("}"):
            return False
        self.parse_from = self.size + self.size // PARSED_AGAIN
        return call_arguments("".join(self.texts)) is not None


class PartReader:
    """Reads the parts of the first choice of an answer from its pieces.

    Tool calls without an id get one that begins with ``call_prefix``.
    """

    def __init__(self, call_prefix: str) -> None:
        self._call_prefix = call_prefix
        self._drafts: deque[_Draft] = deque()  # the open part, and those held back
        self._calls: dict[int, _Draft] = {}
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
            for position, call in enumerate(calls):
                if isinstance(call, Mapping):
                    self._read_call(call, position)

    def _read_call(self, call: Mapping[str, JSON], position: int) -> None:
        number = call.get("index")
        if not isinstance(number, int):
            number = position
        draft = self._calls.get(number)
        if draft is None:
            draft = self._calls[number] = _Draft(PartKind.TOOL_CALL)
            self._drafts.append(draft)
        function = call.get("function")
        if not isinstance(function, Mapping):
            function = {}
        if not draft.begun:
            draft.call_id = draft.call_id or _text(call.get("id"))
            draft.name = draft.name or _text(function.get("name"))
        if text := _text(function.get("arguments")):
            draft.add(text)

    def _grow(self, kind: PartKind, text: str) -> None:
        if not text:
            return
        if not self._drafts or self._drafts[-1].kind is not kind:
            self._drafts.append(_Draft(kind))
        self._drafts[-1].add(text)

    def _advance(self, *, last: bool = False) -> Iterator[PartEvent]:
        while self._drafts:
            draft, index = self._drafts[0], len(self._ended)
            if not draft.begun:
                if draft.kind is PartKind.TOOL_CALL:
                    if not (draft.name or last):
                        return
                    draft.call_id = draft.call_id or f"{self._call_prefix}{index}"
                draft.begun = True
                yield PartBegun(index, Part(draft.kind, "", draft.call_id, draft.name))
            if draft.new:
                yield PartGrown(index, "".join(draft.new))
                draft.new.clear()
            if not last and (len(self._drafts) == 1 or not draft.may_end):
                return
            self._drafts.popleft()
            self._ended.append(draft.part())
            yield PartEnded(index, self._ended[-1])


def call_arguments(text: str) -> dict[str, JSON] | None:
    """Return the arguments of a tool call; None if the text is no object, or not yet.

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


def _text(value: JSON) -> str:
    return value if isinstance(value, str) else ""
