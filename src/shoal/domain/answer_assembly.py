"""Assembles the pieces of an answer.

Source: OpenAI's API reference, "The chat completion chunk object".
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from shoal.domain.outcome import (
    THOUGHTS,
    AnswerPiece,
    AnswerSpan,
    Choice,
    Delta,
    Outcome,
    Usage,
)
from shoal.domain.tool_calls import CALLS_MAX, CallAssembler
from shoal.domain.work import JSON

CHOICES_MAX = 2048  # choices of one answer; embeddings have one for each input
TEXTS = ("reasoning_content", "content", "refusal")
TOOL_CALLS = "tool_calls"
IN_ORDER = (*TEXTS, TOOL_CALLS)
"""The fields with the parts of an answer, in their usual order."""


def assemble(
    pieces: Iterable[AnswerPiece],
    finish_reason: str = "stop",
    usage: Usage | None = None,
) -> Outcome:
    """Assemble an answer.

    ``finish_reason`` applies to choices without one of their own.  Anything beyond
    ``CHOICES_MAX`` and ``CALLS_MAX`` is left out.
    """
    texts: list[str] = []
    drafts: dict[int, _ChoiceDraft] = {}
    for piece in pieces:
        if isinstance(piece, str) and not drafts:
            texts.append(piece)
            continue
        if not drafts:
            drafts[0] = _ChoiceDraft.of_text(texts)
        delta = Delta(0, {"content": piece}) if isinstance(piece, str) else piece
        if 0 <= delta.choice < CHOICES_MAX:
            drafts.setdefault(delta.choice, _ChoiceDraft()).add(delta)
    if not drafts:
        return Outcome("".join(texts), finish_reason, usage)
    if not drafts[0].used and len(drafts) > 1:
        del drafts[0]
    choices = tuple(drafts[index].whole(finish_reason) for index in sorted(drafts))
    content = choices[0].fields.get("content")
    text = content if isinstance(content, str) else ""
    return Outcome(text, choices[0].finish_reason, usage, choices)


def is_thought(piece: AnswerPiece) -> bool:
    """Return whether a piece is reasoning of the only choice, and nothing else."""
    return (
        isinstance(piece, Delta)
        and piece.fields.keys() == {THOUGHTS}
        and not (piece.choice or piece.logprobs or piece.finish_reason)
    )


def size_of(pieces: Iterable[AnswerPiece]) -> int:
    """Return the number of characters of pieces, about as people count.

    However texts and thoughts are divided, it is the same; and it is 0 for none only.
    """
    return sum(map(_size, pieces))


def _size(piece: AnswerPiece) -> int:
    return len(piece) if isinstance(piece, str) else piece.size or 1


def pieces_from(
    pieces: Sequence[AnswerPiece], place: int
) -> Sequence[AnswerPiece] | None:
    """Return what follows the first ``place`` characters of pieces.

    None: that is in the middle of a piece that is more than text.
    """
    for index, piece in enumerate(pieces):
        if not place:
            return pieces[index:]
        size = _size(piece)
        if size <= place:
            place -= size
        elif isinstance(piece, str):
            return [piece[place:], *pieces[index + 1 :]]
        elif is_thought(piece):
            rest = Delta(0, {THOUGHTS: _thought_in(piece)[place:]})
            return [rest, *pieces[index + 1 :]]
        else:
            return None
    return [] if not place else None


def pieces_after(
    pieces: Iterable[AnswerPiece], begun: Iterable[AnswerPiece]
) -> list[AnswerPiece] | None:
    """Return the part of an answer after ``begun``; None if it begins otherwise.

    Texts and thoughts need not be divided alike.
    """
    whole, parts = _joined(pieces), _joined(begun)
    for index, part in enumerate(parts):
        found = whole[index] if index < len(whole) else None
        if found == part:
            continue
        rest = None if found is None else _rest_of(found, part)
        if rest is None or index + 1 < len(parts):
            return None
        return [rest, *whole[index + 1 :]]
    return whole[len(parts) :]


def _joined(pieces: Iterable[AnswerPiece]) -> list[AnswerPiece]:
    """Join adjacent texts, and adjacent thoughts."""
    joined: list[AnswerPiece] = []
    for kind, group in groupby(pieces, _kind_of):
        match kind:
            case "text":
                joined.append("".join(map(str, group)))
            case "thought":
                thoughts = "".join(map(_thought_in, group))
                joined.append(Delta(0, {THOUGHTS: thoughts}))
            case _:
                joined += group
    return [each for each in joined if each != ""]


def _kind_of(piece: AnswerPiece) -> str:
    if isinstance(piece, str):
        return "text"
    return "thought" if is_thought(piece) else ""


def _thought_in(piece: AnswerPiece) -> str:
    return str(piece.fields[THOUGHTS]) if isinstance(piece, Delta) else ""


def _rest_of(piece: AnswerPiece, begun: AnswerPiece) -> AnswerPiece | None:
    """Return the rest of a text, or of thoughts; None if it begins otherwise."""
    if isinstance(piece, str) and isinstance(begun, str):
        return piece[len(begun) :] if piece.startswith(begun) else None
    if is_thought(piece) and is_thought(begun):
        thoughts, first = _thought_in(piece), _thought_in(begun)
        if thoughts.startswith(first):
            return Delta(0, {THOUGHTS: thoughts[len(first) :]})
    return None


def describe_invalid_fields(fields: Mapping[str, JSON]) -> str | None:
    """Return what is wrong with the fields of a piece, or None.

    Only text and tool calls, which are joined, are checked; other fields may have any
    value.
    """
    content = fields.get("content")
    if not (content is None or isinstance(content, str)):
        return f"a {type(content).__name__} for text"
    calls = fields.get("tool_calls")
    if calls is None:
        return None
    if not isinstance(calls, list):
        return f"a {type(calls).__name__} for tool calls"
    for call in calls:
        if not isinstance(call, Mapping):
            return f"a {type(call).__name__} for a tool call"
        index = call.get("index")
        if index is not None and not (
            isinstance(index, int) and 0 <= index < CALLS_MAX
        ):
            return f"a tool call with the index {str(index)[:40]}"
    return None


def disassemble(outcome: Outcome) -> list[AnswerPiece]:
    """Return pieces that assemble to this answer: one for each choice."""
    if not outcome.choices:
        return [outcome.text] if outcome.text else []
    return [
        Delta(index, _streamed(choice.fields), choice.logprobs, choice.finish_reason)
        for index, choice in enumerate(outcome.choices)
    ]


def replay(outcome: Outcome) -> list[AnswerPiece]:
    """Return pieces that assemble to this answer, in the order in which they came."""
    if not outcome.choices:
        return disassemble(outcome)
    choices = enumerate(outcome.choices)
    return [piece for index, choice in choices for piece in _replayed(index, choice)]


@dataclass(slots=True)
class _ChoiceDraft:
    """A partial choice."""

    content: list[str] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    others: dict[str, JSON] = field(default_factory=dict)
    calls: CallAssembler = field(default_factory=CallAssembler)
    logprobs: dict[str, JSON] | None = None
    finish_reason: str | None = None
    spans: list[AnswerSpan] = field(default_factory=list)

    @classmethod
    def of_text(cls, texts: list[str]) -> "_ChoiceDraft":
        """Return the draft of a choice that was only text until now."""
        draft = cls(texts)
        draft._add_span("content", sum(map(len, texts)))
        return draft

    @property
    def used(self) -> bool:
        return bool(self.content or self.texts or self.others or self.calls) or (
            self.finish_reason is not None
        )

    def add(self, delta: Delta) -> None:
        for name in TEXTS:  # the calls follow them
            if isinstance(text := delta.fields.get(name), str):
                self._add_span(name, len(text))
        for name, value in delta.fields.items():
            if name == "tool_calls" and isinstance(value, Sequence):
                self._add_calls(value)
            elif name == "content" and isinstance(value, str):
                self.content.append(value)
            elif name == "role" or value is None:
                continue
            elif isinstance(value, str):
                self.texts.setdefault(name, []).append(value)
            else:
                self.others[name] = value
        if isinstance(delta.logprobs, Mapping):
            self._add_logprobs(delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason

    def whole(self, finish_reason: str) -> Choice:
        fields: dict[str, JSON] = {"content": "".join(self.content) or None}
        fields |= {name: "".join(texts) for name, texts in self.texts.items()}
        fields |= self.others
        if self.calls:
            fields["tool_calls"] = [call.message for call in self.calls.drafts]
        reason = self.finish_reason or finish_reason
        return Choice(fields, reason, self.logprobs, self._order())

    def _add_calls(self, calls: Sequence[JSON]) -> None:
        for call, arguments in self.calls.add(calls):
            self._add_span(TOOL_CALLS, len(arguments), call.slot)

    def _add_span(self, name: str, length: int, call: int = 0) -> None:
        if not (length or name == TOOL_CALLS):
            return
        if self.spans and self.spans[-1][:2] == (name, call):
            length += self.spans.pop().length
        self.spans.append(AnswerSpan(name, call, length))

    def _order(self) -> tuple[AnswerSpan, ...]:
        """Return the spans if they matter, with the calls numbered as in the fields."""
        places = [(IN_ORDER.index(span.field), span.call) for span in self.spans]
        if places == sorted(set(places)):
            return ()
        drafts = enumerate(self.calls.drafts)
        positions = {call.slot: number for number, call in drafts}
        return tuple(
            span._replace(call=positions.get(span.call, 0)) for span in self.spans
        )

    def _add_logprobs(self, logprobs: Mapping[str, JSON]) -> None:
        """Join the lists of a chat's logprobs, or of a completion's."""
        known = self.logprobs = {} if self.logprobs is None else self.logprobs
        for name, value in logprobs.items():
            before = known.get(name)
            if isinstance(before, list) and isinstance(value, list):
                before.extend(value)
            elif before is None:
                known[name] = [*value] if isinstance(value, list) else value


def _replayed(index: int, choice: Choice) -> Iterator[Delta]:
    """Return the pieces of a choice: one, or one for each of its spans."""
    fields = _streamed(choice.fields)
    if not choice.order:
        yield Delta(index, fields, choice.logprobs, choice.finish_reason)
        return
    names = {span.field for span in choice.order}
    others = {name: value for name, value in fields.items() if name not in names}
    yield Delta(index, others, choice.logprobs)
    ends: dict[tuple[str, int], int] = {}
    for name, call, length in choice.order:
        is_head = (name, call) not in ends
        begin = ends.get((name, call), 0)
        end = ends[name, call] = begin + length
        value = fields.get(name)
        if isinstance(value, str):
            yield Delta(index, {name: value[begin:end]})
        elif isinstance(value, Sequence) and call < len(value):
            piece = _slice_of_call(value[call], begin, end, is_head=is_head)
            yield Delta(index, {name: [piece]})
    yield Delta(index, finish_reason=choice.finish_reason)


def _slice_of_call(call: JSON, begin: int, end: int, *, is_head: bool) -> JSON:
    """Return a part of a call's arguments, with all else if it is the head."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(call, Mapping) and isinstance(function, Mapping)):
        return call
    arguments = _text(function.get("arguments"))[begin:end]
    if not is_head:
        return {"index": call.get("index"), "function": {"arguments": arguments}}
    return {**call, "function": {**function, "arguments": arguments}}


def _streamed(fields: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Add the index that tool calls have only in a stream."""
    calls = fields.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return fields
    indexed: list[JSON] = [
        {"index": index, **call}
        for index, call in enumerate(calls)
        if isinstance(call, Mapping)
    ]
    return {**fields, "tool_calls": indexed}


def _text(value: JSON) -> str:
    return value if isinstance(value, str) else ""
