"""Reads JSON values that are not quite what JSON, or their field, allows.

Servers written in Python send NaN and Infinity, counts as floats, and texts that were
cut in the middle of a character: half of it is in one piece, as half of a surrogate
pair (``\\ud83d``) or as the first bytes of its UTF-8, and the other half in the next.
"""

import json
import math
import re
from codecs import getincrementaldecoder
from collections.abc import Mapping
from typing import Any, TypeAlias

from shoal.domain.answer_assembly import TEXTS, TOOL_CALLS
from shoal.domain.outcome import AnswerPiece, Delta
from shoal.domain.work import JSON

REPLACEMENT = "\ufffd"

HALF = re.compile("[\ud800-\udfff]")
"""A lone surrogate: half of a pair, or (U+DC80 to U+DCFF) a byte that is not UTF-8,
as Python's ``surrogateescape`` decodes it."""

IMPOSSIBLE = -9999.0  # a log probability of minus infinity, as with OpenAI

TextKey: TypeAlias = tuple[int, str, int]
"""A choice, the field with the text, and the index of a tool call, else 0."""

_LAST_HALF = re.compile("[\ud800-\udbff]$")
_LAST_BYTES = re.compile("[\udc80-\udcff]{1,3}$")
_BYTES = re.compile("[\udc80-\udcff]+")


def decode_json(data: bytes) -> Any:
    """Decode JSON; its texts may have halves of characters, and numbers be infinite.

    Raises ValueError.
    """
    try:
        text = data.decode("utf-8", "surrogateescape")
        return json.loads(text, strict=False, parse_int=_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def expressible(value: Any) -> Any:
    """Return a JSON value without infinite numbers and halves of characters."""
    if isinstance(value, float) and not math.isfinite(value):
        return IMPOSSIBLE if value == -math.inf else None
    if isinstance(value, str):
        return without_halves(value)
    if isinstance(value, list):
        return [expressible(each) for each in value]
    if isinstance(value, dict):
        return {without_halves(name): expressible(each) for name, each in value.items()}
    return value


def without_halves(text: str) -> str:
    """Return a text in which halves of characters that follow each other are joined.

    Others become U+FFFD.
    """
    if HALF.search(text) is None:
        return text
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return HALF.sub(REPLACEMENT, _BYTES.sub(_decoded, text))


def integer(value: Any) -> int | None:
    """Return an integer, also one that is written as another number or as a text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number.is_integer() else None


def count(value: Any) -> int | None:
    """Return a count; a fraction, as of an average, is rounded."""
    if isinstance(value, float) and math.isfinite(value):
        return round(value)
    return integer(value)


def _decoded(found: re.Match[str]) -> str:
    return found[0].encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _integer(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:  # more digits than Python takes
        return math.inf


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
