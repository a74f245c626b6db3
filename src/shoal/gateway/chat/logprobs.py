"""Log probabilities as OpenAI's clients parse them, from what engines send.

Strict clients fail at an entry without a number or without ``top_logprobs``, and JSON
has no infinite numbers: what cannot be shown is left out.

Source: OpenAI's API reference, "The chat completion object" and "The completion
object"; most engines write a completion's in the form of a chat.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from shoal.domain.work import JSON

IMPOSSIBLE = -9999.0  # stands for minus infinity, as with OpenAI

Entry = Mapping[str, JSON]


def chat_logprobs(logprobs: JSON) -> Mapping[str, JSON] | None:
    """Return the log probabilities of a choice of a chat; None if there are none."""
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
