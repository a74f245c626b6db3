"""The log probabilities of an answer's tokens, given to the texts that they are about.

A worker sends them with its pieces, whose texts may be joined or cut on the way.  A
token belongs to the text in which its last character is.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from shoal.domain.outcome import AnswerPiece, Delta, Outcome
from shoal.domain.work import JSON
from shoal.gateway.chat.logprobs import token_entry


class LogprobQueue:
    """The tokens of an answer whose text was not written yet."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, JSON]] = deque()  # with the end of each token
        self._end = 0  # of the last token, in characters of the answer
        self._written = 0  # characters
        self._of_part: list[JSON] = []

    def read(self, pieces: Iterable[AnswerPiece]) -> None:
        """Add the tokens of pieces."""
        for piece in pieces:
            if isinstance(piece, Delta) and piece.choice == 0:
                self._add(piece.logprobs)

    def read_outcome(self, outcome: Outcome) -> None:
        """Add all tokens of an answer."""
        if outcome.choices:
            self._add(outcome.choices[0].logprobs)

    def take(self, text: str, seen: int = 0) -> Sequence[JSON]:
        """Return the tokens of the next text, without its first ``seen`` characters."""
        shown_from = self._written + seen
        self._written += len(text)
        taken: list[JSON] = []
        while self._waiting and self._waiting[0][0] <= self._written:
            end, token = self._waiting.popleft()
            self._of_part.append(token)
            if end > shown_from:
                taken.append(token)
        return taken

    def end_part(self) -> Sequence[JSON]:
        """Return all tokens of the part that ends.

        Also those that are still waiting: the text of a token that is a part of a
        character is not what it adds to the answer.
        """
        tokens = [*self._of_part, *(token for _, token in self._waiting)]
        self._of_part = []
        self._waiting.clear()
        return tokens

    def _add(self, logprobs: JSON) -> None:
        content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
        if not isinstance(content, Sequence) or isinstance(content, str):
            return
        for token in content:
            if isinstance(token, Mapping):
                text = token.get("token")
                self._end += len(text) if isinstance(text, str) else 0
                if (entry := token_entry(token)) is not None:
                    self._waiting.append((self._end, entry))
