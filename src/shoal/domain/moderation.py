"""A list of patterns that neither prompts nor answers may match.

The patterns are Python's regular expressions, ignoring case.  Some expressions take
exponential time on some texts; the operator is responsible for the list.
"""

import json
import re
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from shoal.domain import work as works
from shoal.domain.errors import ConfigError
from shoal.domain.outcome import AnswerPiece, Outcome

MESSAGES_CHECKED = 3  # the last messages of a conversation, which are checked
UNCHECKED_MAX = 50  # characters of an answer that may be unchecked
BLOCKED = "the answer matches the moderation list"
OVERLAP = 10  # characters checked twice, for matches across chunks

FILTERED = Outcome("", "content_filter")
"""Stands for an answer that matches."""


class Moderation:
    """A list of patterns."""

    def __init__(self, patterns: str) -> None:
        """Parse the list: one pattern a line; empty lines are ignored.

        Raises ConfigError that names an invalid line.
        """
        self._patterns = [
            _compiled(line, number)
            for number, line in enumerate(patterns.splitlines(), start=1)
            if line
        ]

    def blocks(self, texts: Sequence[str]) -> bool:
        """Return whether the last messages of a conversation match."""
        return any(self.matches(text) for text in texts[-MESSAGES_CHECKED:])

    def blocks_work(self, work: works.Work) -> bool:
        """Return whether what a job asks for matches: of a chat its last messages."""
        match work:
            case works.Chat():
                return self.blocks([works.message_text(each) for each in work.messages])
            case works.Task():
                return self.matches(json.dumps(work.payload, ensure_ascii=False))
            case works.Call() | works.CallStream():
                return self.matches(work.name)
            case _:
                return any(map(self.matches, works.texts_read(work)))

    def matches(self, text: str) -> bool:
        return any(pattern.search(text) for pattern in self._patterns)

    def blocks_outcome(self, outcome: Outcome) -> bool:
        """Return whether any choice of an answer matches."""
        return self.matches(outcome.text) or any(
            self.matches(_text_in(choice.fields)) for choice in outcome.choices
        )

    def filter_outcome(self, outcome: Outcome) -> Outcome:
        """Return the answer to show: without text if any choice of it matches."""
        if not self.blocks_outcome(outcome):
            return outcome
        return replace(FILTERED, usage=outcome.usage)

    def blocks_value(self, value: works.JSON) -> bool:
        """Return whether the joined texts of a value match."""
        return self.matches(_text_in(value))

    def moderate_answer(self) -> "AnswerModerator":
        """Return a moderator for one streamed answer."""
        return AnswerModerator(self)


class AnswerModerator:
    """Checks a streamed answer, each part once except for the overlap.

    Text is passed on unchecked until there is enough of it to check, so part of a match
    may have been shown when the match is found.
    """

    def __init__(self, moderation: Moderation) -> None:
        self.blocked = False
        self._moderation = moderation
        self._before = ""  # the end of the checked text
        self._fresh: list[str] = []
        self._size = 0

    def filter(self, pieces: Sequence[AnswerPiece]) -> Sequence[AnswerPiece]:
        """Return the pieces to pass on; ``refused`` is set if the answer must end."""
        for index, piece in enumerate(pieces):
            text = piece if isinstance(piece, str) else _text_in(piece.fields)
            self._fresh.append(text)
            self._size += len(text)
            if self._size > UNCHECKED_MAX and self._look():
                return pieces[:index]
        return pieces

    def blocks_end(self) -> bool:
        """Check the rest of a complete answer; return whether it matches."""
        return self._look()

    def _look(self) -> bool:
        window = self._before + "".join(self._fresh)
        self._before = window[-OVERLAP:]
        self._fresh = []
        self._size = 0
        self.blocked = self._moderation.matches(window)
        return self.blocked


def _text_in(value: works.JSON) -> str:
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
