"""Log probabilities as completions have them, from engines that write a chat's.

Source: OpenAI's API reference, "The completion object", "The chat completion object".
"""

from collections.abc import Mapping
from typing import Any


def as_completion(logprobs: Any, offset: int) -> Any:
    """Return a completion's log probabilities, made from a chat's if they are that.

    ``offset`` is how many characters of the choice's text came before.
    """
    entries = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        return logprobs
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [_likeliest(entry) for entry in entries],
        "text_offset": offsets,
    }


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, Mapping)
        and isinstance(entry.get("token"), str)
        and "logprob" in entry
    )


def _likeliest(entry: Mapping[str, Any]) -> dict[str, Any]:
    tops = entry.get("top_logprobs")
    tops = tops if isinstance(tops, list) else []
    return {top["token"]: top["logprob"] for top in tops if _is_entry(top)}
