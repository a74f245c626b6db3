"""Assembles tool calls from the pieces of a stream.

Source: OpenAI's API reference, "The chat completion chunk object": the pieces of a call
have its index, and the first has its id and its name.  Real servers leave out or repeat
each of them: an id may come with each piece and may be another each time, an index may
be missing, or 0 for all calls, and arguments may be JSON in place of its text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.domain.work import JSON

CALLS_MAX = 1024  # tool calls in one answer

_MAPPINGS = (dict, Mapping)  # nearly all are of the first, which is known sooner

_MARKS = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


@dataclass(slots=True, eq=False)
class CallDraft:
    """A tool call of which more may come; ``slot`` orders the calls of an answer."""

    slot: int
    id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)  # of the arguments
    _scanned: int = 0  # texts that were scanned
    _rest: str = ""  # half of an escape at the end of them
    _depth: int = 0
    _in_string: bool = False
    _begun: bool = False

    @property
    def arguments(self) -> str:
        """The arguments so far, as JSON text."""
        return "".join(self.texts)

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are a complete object or list, judged by brackets.

        Each character is scanned once, however often this is asked.
        """
        for text in self.texts[self._scanned :]:
            self._scan(self._rest + text)
        self._scanned = len(self.texts)
        return self._begun and self._depth <= 0

    @property
    def message(self) -> Mapping[str, JSON]:
        """The call as a whole message has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    def _scan(self, text: str) -> None:
        end = 0
        for mark in _MARKS.finditer(text):
            end = mark.end()
            match mark[0]:
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[" if not self._in_string:
                    self._begun = True
                    self._depth += 1
                case "}" | "]" if not self._in_string:
                    self._depth -= 1
        self._rest = "\\" if text.endswith("\\") and end < len(text) else ""


class CallAssembler:
    """Assembles the tool calls of one choice.

    Calls beyond ``CALLS_MAX`` are left out; ``overflowed`` says so.
    """

    def __init__(self) -> None:
        self.overflowed = False
        self._drafts: dict[int, CallDraft] = {}
        self._by_index: dict[int, CallDraft] = {}
        self._by_id: dict[str, CallDraft] = {}
        self._last: CallDraft | None = None

    def __len__(self) -> int:
        return len(self._drafts)

    @property
    def drafts(self) -> list[CallDraft]:
        """The calls in their order: by index, as far as they have different ones."""
        return [self._drafts[slot] for slot in sorted(self._drafts)]

    def add(self, pieces: Sequence[JSON]) -> list[tuple[CallDraft, str]]:
        """Add the pieces of a chunk; return their calls, with the added arguments."""
        added: list[tuple[CallDraft, str]] = []
        for piece in pieces:
            if not isinstance(piece, _MAPPINGS):
                continue
            function = piece.get("function")
            if not isinstance(function, _MAPPINGS):
                function = piece  # some servers do not nest it
            index = piece.get("index")
            draft = self._by_index.get(index) if type(index) is int else None
            arguments, call_id = function.get("arguments"), piece.get("id")
            name = function.get("name")
            if draft is not None and not (call_id or name) and type(arguments) is str:
                draft.texts.append(arguments)  # the hot path, once per token
                added.append((draft, arguments))
                continue
            index, call_id, name = _index(index), _text(call_id), _text(name)
            text = arguments_text(arguments)
            if not (call_id or name or text):
                continue
            draft = self._find(index, call_id, name, text)
            if draft is None:
                self.overflowed = True
                continue
            if name and text and draft.is_whole:
                text = ""  # the same call once more
            draft.id = draft.id or call_id
            draft.name = draft.name or name
            if text:
                draft.texts.append(text)
            if call_id:
                self._by_id.setdefault(call_id, draft)
            if index is not None:
                self._by_index[index] = draft
            self._last = draft
            added.append((draft, text))
        return added

    def _find(
        self, index: int | None, call_id: str, name: str, text: str
    ) -> CallDraft | None:
        """Return the call that a piece belongs to; None if there are too many."""
        draft = None if index is None else self._by_index.get(index)
        named = self._by_id.get(call_id)
        if draft is not None:
            if named is not None and draft.id != call_id:
                draft = named  # one index for all calls
        elif named is not None:
            if index is None or not name:
                draft = named
        elif (index is None and not call_id) or (not name and (text or not call_id)):
            # Nothing says whose it is, or a new id with each piece does.
            draft = None if self.overflowed else self._last
        if draft is None or _begins_another(draft, call_id, name, text):
            return self._begin(index)
        return draft

    def _begin(self, index: int | None) -> CallDraft | None:
        if len(self._drafts) >= CALLS_MAX:
            return None
        slot = index
        if slot is None or slot in self._drafts:
            slot = max(self._drafts, default=-1) + 1
        draft = self._drafts[slot] = CallDraft(slot)
        return draft


def _begins_another(draft: CallDraft, call_id: str, name: str, text: str) -> bool:
    """Return whether a piece that seems to belong to a call begins another one.

    Only a piece with a name can.  Some servers repeat the name with each piece, some
    send a new id with each, and some repeat whole calls at the end.
    """
    if not (name and draft.name):
        return False
    if call_id and draft.id:
        if call_id != draft.id:
            return True
        return bool(text) and draft.is_whole and text != draft.arguments
    return name != draft.name or (bool(text) and draft.is_whole)


def arguments_text(arguments: JSON) -> str:
    """Return the arguments of a call, or a part of them, as JSON text."""
    if isinstance(arguments, str):
        return arguments
    return "" if arguments is None else json_text(arguments)


def json_text(value: JSON) -> str:
    """Return the JSON text of a value that a server has parsed."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _index(value: JSON) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: JSON) -> str:
    return value if isinstance(value, str) else ""
