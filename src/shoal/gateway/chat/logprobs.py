"""Log probabilities as OpenAI's clients parse them, from what engines send.

Strict clients fail at an entry without a number or without ``top_logprobs``, and JSON
has no infinite numbers: what cannot be shown is left out.

Source: OpenAI's API reference, "The chat completion object" and "The completion
object"; most engines write a completion's in the form of a chat.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from shoal.domain.outcome import AnswerPiece, Delta, Outcome
from shoal.domain.work import JSON

IMPOSSIBLE = -9999.0  # stands for minus infinity, as with OpenAI

Entry = Mapping[str, JSON]


def chat_logprobs(logprobs: JSON) -> Mapping[str, JSON] | None:
    """Return the log probabilities of a choice of a chat; None if there are none."""
    if not isinstance(logprobs, Mapping):
        return None
    found = {name: token_logprobs(logprobs, name) for name in ("content", "refusal")}
    if not any(found.values()):
        return None
    return {name: [*entries] or None for name, entries in found.items()}


def token_logprobs(logprobs: JSON, name: str = "content") -> Sequence[Entry]:
    """Return the entries of the tokens of a choice's text."""
    given = logprobs.get(name) if isinstance(logprobs, Mapping) else None
    return _entries(given, token_entry)


def token_entry(given: Entry) -> Entry | None:
    """Return the entry of a token; None if it has no text or no number."""
    entry = _entry(given)
    if entry is None:
        return None
    return {**entry, "top_logprobs": [*_entries(given.get("top_logprobs"), _entry)]}


def completion_logprobs(logprobs: JSON, offset: int) -> Mapping[str, JSON] | None:
    """Return the log probabilities of a completion's choice; None if there are none.

    ``offset`` is how many characters of the choice's text came before.
    """
    if not isinstance(logprobs, Mapping):
        return None
    if not (entries := token_logprobs(logprobs)):
        return _parallel_lists(logprobs)
    tokens = [str(entry["token"]) for entry in entries]
    offsets: list[JSON] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": [*tokens],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [_by_token(entry["top_logprobs"]) for entry in entries],
        "text_offset": offsets,
    }


def _entries(given: JSON, read: Callable[[Entry], Entry | None]) -> Sequence[Entry]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        return ()
    found = (read(each) for each in given if isinstance(each, Mapping))
    return [entry for entry in found if entry is not None]


def _entry(given: Entry) -> Entry | None:
    token, logprob = given.get("token"), _number(given.get("logprob"))
    if not isinstance(token, str) or logprob is None:
        return None
    data = given.get("bytes")
    if not isinstance(data, list) or not all(isinstance(each, int) for each in data):
        data = [*token.encode("utf-8", "replace")]
    return {"token": token, "logprob": logprob, "bytes": data}


def _number(value: JSON) -> float | None:
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        return None
    if math.isnan(number) or number == math.inf:
        return None
    return max(number, IMPOSSIBLE)


def _by_token(tops: JSON) -> Mapping[str, JSON]:
    """Return the log probabilities of the entries ``tops``, by their tokens."""
    return {str(each["token"]): each["logprob"] for each in _entries(tops, _entry)}


def _parallel_lists(given: Entry) -> Mapping[str, JSON] | None:
    """Return a completion's log probabilities in their own form, if they have it.

    That of the first token is null if the answer begins with the prompt.
    """
    tokens, logprobs = given.get("tokens"), given.get("token_logprobs")
    if not (isinstance(tokens, list) and isinstance(logprobs, list)):
        return None
    if len(tokens) != len(logprobs) or not all(isinstance(t, str) for t in tokens):
        return None
    found: dict[str, JSON] = {
        "tokens": tokens,
        "token_logprobs": [_number(each) for each in logprobs],
    }
    tops, offsets = given.get("top_logprobs"), given.get("text_offset")
    if isinstance(tops, list) and len(tops) == len(tokens):
        found["top_logprobs"] = [_numbers(each) for each in tops]
    if isinstance(offsets, list) and all(isinstance(each, int) for each in offsets):
        found["text_offset"] = offsets
    return found


def _numbers(given: JSON) -> Mapping[str, JSON]:
    if not isinstance(given, Mapping):
        return {}
    found = {token: _number(value) for token, value in given.items()}
    return {token: value for token, value in found.items() if value is not None}


class LogprobQueue:
    """The tokens of an answer whose text was not written yet.

    A worker sends them with its pieces, whose texts may be joined or cut on the way.  A
    token belongs to the text in which its last character is.
    """

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
