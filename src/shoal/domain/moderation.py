"""A list of patterns that neither questions nor answers may match.

The patterns are Python's regular expressions, ignoring case.  Some expressions take
exponential time on some texts; they are the operator's own, and so is their choice.
"""

import re
from collections.abc import Mapping, Sequence

from shoal.domain.errors import ConfigError
from shoal.domain.outcome import AnswerPiece, Outcome
from shoal.domain.work import JSON

MESSAGES_CHECKED = 3  # the last ones of a conversation, which are looked at
UNCHECKED_MAX = 50  # characters of an answer that may wait to be looked at
BLOCKED = "the answer matches the moderation list"
OVERLAP = 10  # characters looked at again, for words that are cut in two


class Moderation:
    """The list."""

    def __init__(self, patterns: str) -> None:
        """Take the text of the list: one pattern a line, empty lines ignored.

        Raises ConfigError naming the line that is no regular expression.
        """
        self._patterns = [
            _compiled(line, number)
            for number, line in enumerate(patterns.splitlines(), start=1)
            if line
        ]

    def blocks(self, texts: Sequence[str]) -> bool:
        """Say whether the last messages of a conversation match."""
        return any(self.matches(text) for text in texts[-MESSAGES_CHECKED:])

    def matches(self, text: str) -> bool:
        return any(pattern.search(text) for pattern in self._patterns)

    def blocks_outcome(self, outcome: Outcome) -> bool:
        """Say whether any choice of an answer matches."""
        return self.matches(outcome.text) or any(
            self.matches(_text_in(choice.fields)) for choice in outcome.choices
        )

    def blocks_value(self, value: JSON) -> bool:
        """Say whether the texts in a value match, all together."""
        return self.matches(_text_in(value))

    def moderate_answer(self) -> "AnswerModerator":
        """Begin to look at an answer."""
        return AnswerModerator(self)


class AnswerModerator:
    """Looks at an answer as it comes, each part once but for the overlap.

    Text goes out before it is looked at, until there is enough of it to look at: a
    match shorter than that may have been shown when it is found.
    """

    def __init__(self, moderation: Moderation) -> None:
        self.blocked = False
        self._moderation = moderation
        self._before = ""  # the end of what was looked at
        self._fresh: list[str] = []
        self._size = 0

    def filter(self, pieces: Sequence[AnswerPiece]) -> Sequence[AnswerPiece]:
        """Return the pieces that may be shown; ``refused`` says if that is the end."""
        for index, piece in enumerate(pieces):
            text = piece if isinstance(piece, str) else _text_in(piece.fields)
            self._fresh.append(text)
            self._size += len(text)
            if self._size > UNCHECKED_MAX and self._look():
                return pieces[:index]
        return pieces

    def blocks_end(self) -> bool:
        """Look at what is left when the answer is whole; say whether it matches."""
        return self._look()

    def _look(self) -> bool:
        window = self._before + "".join(self._fresh)
        self._before = window[-OVERLAP:]
        self._fresh = []
        self._size = 0
        self.blocked = self._moderation.matches(window)
        return self.blocked


def _text_in(value: JSON) -> str:
    """Return all the text in a value, in order."""
    match value:
        case str():
            return value
        case Mapping():
            return "".join(map(_text_in, value.values()))
        case Sequence():
            return "".join(map(_text_in, value))
        case _:
            return ""


def _compiled(line: str, number: int) -> re.Pattern[str]:
    try:
        return re.compile(line, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"moderation list, line {number}: {error}") from error
