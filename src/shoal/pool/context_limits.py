"""How long requests are, and what workers' refusals for length say of their contexts.

Many servers do not tell the context of a model before they refuse a request.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

from shoal.domain.server_refusals import stated_context
from shoal.domain.work import (
    Chat,
    Completion,
    Embedding,
    Feature,
    JobKind,
    Rerank,
    Work,
)

BYTES_PER_TOKEN_MAX = 8  # in UTF-8; only unusual texts have more in a token
LEARNED_MIN = 512  # bytes and tokens of a request that any model's context can hold
LENGTHS_MAX = 8  # refused lengths that are remembered of one context
MEDIA = frozenset({Feature.IMAGES, Feature.AUDIO})

T = TypeVar("T")

ContextKey: TypeAlias = tuple[str, JobKind]
"""A model and a kind of work: servers limit embeddings more than chats."""


class RequestLength(NamedTuple):
    """The bytes that a model reads, and the tokens that it may write; 0: unknown."""

    size: int
    answer: int

    def reaches(self, other: "RequestLength") -> bool:
        """Return whether it takes at least as much of a context as another.

        More tokens to write do not make up for fewer to read: many servers count these
        alone.
        """
        less = max(0, other.answer - self.answer)
        return self.size >= other.size + BYTES_PER_TOKEN_MAX * less


UNKNOWN_LENGTH = RequestLength(0, 0)


def length_of(work: Work) -> RequestLength:
    """Return the length of a request.

    It is unknown for pictures, sound and token ids, whose size says little.
    """
    match work:
        case Chat(messages=messages, max_tokens=wanted, options=options):
            if not MEDIA.isdisjoint(work.needs):
                return UNKNOWN_LENGTH
            return RequestLength(_bytes_in([messages, options]), wanted or 0)
        case Completion(prompt=str(prompt), max_tokens=wanted):
            return RequestLength(_bytes_in([prompt]), wanted or 0)
        case Embedding() | Rerank():
            return RequestLength(_bytes_in([work.text]), 0)
        case _:
            return UNKNOWN_LENGTH


def _bytes_in(values: Sequence[object]) -> int:
    """Count the bytes of all texts in JSON."""
    found = 0
    left = [*values]
    while left:
        match left.pop():
            case str() as text:
                found += len(text.encode("utf-8", "surrogatepass"))
            case Mapping() as fields:
                left += fields
                left += fields.values()
            case Sequence() as items:
                left += items
            case _:
                found += 1
    return found


@dataclass(slots=True)
class KnownContexts:
    """What a worker's refusals say of its contexts."""

    stated: dict[ContextKey, int] = field(default_factory=dict)
    """Tokens, in the worker's words."""

    refused: defaultdict[ContextKey, list[RequestLength]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """The shortest lengths that it refused."""

    @property
    def models(self) -> set[str]:
        """The models at which it refused a length."""
        return {model for model, _ in self.refused}

    def learn(self, key: ContextKey, length: RequestLength, reason: str) -> None:
        """Note that a request was too long; ``reason`` may state the context.

        A refusal of a short request says nothing of the context: the server is full, as
        one whose slots share their memory.
        """
        if (context := stated_context(reason)) is not None:
            self.stated[key] = context
        if length.size and length.size + length.answer >= LEARNED_MIN:
            add_shortest(self.refused[key], length, RequestLength.reaches)

    def exclude(self, key: ContextKey, length: RequestLength) -> bool:
        """Return whether a request is no shorter than one that was refused."""
        return any(map(length.reaches, self.refused.get(key, ())))


def least_known(*contexts: int | None) -> int:
    """Return the least of contexts in tokens, of which 0 and None are unknown."""
    return min(filter(None, contexts), default=0)


def add_shortest(kept: list[T], new: T, reaches: Callable[[T, T], bool]) -> None:
    """Add to a few things of which only the shortest matter: those that reach no other.

    Of too many, the oldest is dropped.
    """
    if any(reaches(new, each) for each in kept):
        return
    kept[:] = [each for each in kept if not reaches(each, new)]
    kept.append(new)
    del kept[:-LENGTHS_MAX]
