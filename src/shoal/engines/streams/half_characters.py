"""Joins characters that a server has cut between two pieces of a text.

A server that cuts its text anywhere sends half of a character in one piece, as half of
a surrogate pair (``\\ud83d``) or as the first bytes of its UTF-8, and the other half in
the next.
"""

import re
from codecs import getincrementaldecoder
from collections.abc import Mapping
from typing import Any, TypeAlias

from shoal.domain.answer_assembly import TEXTS, TOOL_CALLS
from shoal.domain.outcome import AnswerPiece, Delta
from shoal.domain.work import JSON
from shoal.engines.streams.json_values import (
    HALF,
    REPLACEMENT,
    expressible,
    without_halves,
)

TextKey: TypeAlias = tuple[int, str, int]
"""A choice, the field with the text, and the index of a tool call, else 0."""

_LAST_HALF = re.compile("[\ud800-\udbff]$")
_LAST_BYTES = re.compile("[\udc80-\udcff]{1,3}$")


class HalfCharacters:
    """Keeps halves at the ends of the texts of one answer, ``pending`` the others."""

    def __init__(self) -> None:
        self.pending: dict[TextKey, str] = {}

    def join(self, key: TextKey, text: str) -> str:
        """Return a piece with what was left of the one before; it may be empty.

        Halves without another become U+FFFD.
        """
        text = self.pending.pop(key, "") + text
        if HALF.search(text) is None:
            return text
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        rest = ""
        if last := _LAST_HALF.search(text):
            rest = last[0]
        elif last := _LAST_BYTES.search(text):
            decoder = getincrementaldecoder("utf-8")("replace")
            decoder.decode(last[0].encode("utf-8", "surrogateescape"))
            rest = decoder.getstate()[0].decode("utf-8", "surrogateescape")
        if rest:
            self.pending[key] = rest
            text = text[: -len(rest)]
        return without_halves(text)

    def join_fields(
        self, choice: int, fields: Mapping[str, JSON]
    ) -> Mapping[str, JSON]:
        """Return the fields of a piece with whole characters, as ``Delta`` has them."""
        found: dict[str, JSON] = {}
        for name, value in fields.items():
            if name == TOOL_CALLS and isinstance(value, list):
                found[name] = [self._join_call(choice, call) for call in value]
            elif name not in TEXTS or not isinstance(value, str):
                found[name] = expressible(value)
            elif text := self.join((choice, name, 0), value):
                found[name] = text
        return found

    def drain(self) -> list[AnswerPiece]:
        """Return a piece with U+FFFD for each half that is left, and forget them."""
        keys = [*self.pending]
        self.pending.clear()
        return [_replacement(*key) for key in keys]

    def _join_call(self, choice: int, call: Any) -> JSON:
        """Join the arguments in a piece of a call, as ``MessageReader`` returns it."""
        function = call["function"]
        key = choice, TOOL_CALLS, call["index"]
        arguments = self.join(key, function["arguments"])
        function = {**expressible(function), "arguments": arguments}
        return {**expressible(call), "function": function}


def _replacement(choice: int, name: str, index: int) -> AnswerPiece:
    if name == TOOL_CALLS:
        call: JSON = {"index": index, "function": {"arguments": REPLACEMENT}}
        return Delta(choice, {name: [call]})
    if (choice, name) == (0, "content"):
        return REPLACEMENT
    return Delta(choice, {name: REPLACEMENT})
