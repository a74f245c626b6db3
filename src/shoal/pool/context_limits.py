"""How long requests and answers are, and what workers say of that in tokens.

Many servers do not report a model's context before they refuse a request.  Counts of
tokens are believed as far as texts can hold them: a token has at least one byte, but
for special ones, a template's own instructions, and what pictures and sound become.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

from shoal.domain import work as works
from shoal.domain.job_kinds import NUMBER_KINDS
from shoal.domain.outcome import Outcome, Usage
from shoal.domain.server_refusals import stated_context

BYTES_PER_TOKEN_MAX = 8  # in UTF-8; only unusual texts have more in a token
LEARNED_MIN = 512  # bytes and tokens of a request that any model's context can hold
LENGTHS_MAX = 8  # refused lengths that are remembered of one context
MEDIA = frozenset({works.Feature.IMAGES, works.Feature.AUDIO})
MEDIA_PARTS = ("image_url", "input_audio")
PROMPT_MARGIN = 4096  # tokens of a template, or of an engine's own instructions
VALUE_MARGIN = 8  # tokens around each value of a request: quotes, roles, ends
MEDIA_TOKENS = 32_768  # of a picture or a recording, whose size says little
ANSWER_MARGIN = 1024  # tokens of an answer without text, as marks and cut stop strings
CHARACTERS_PER_TOKEN_MAX = 64  # on the average of an answer: runs of spaces are long
LIMIT_MARGIN = 64  # tokens beyond ``max_tokens``: engines count the last ones unlike

T = TypeVar("T")

ContextKey: TypeAlias = tuple[str, works.JobKind]
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


def length_of(work: works.Work) -> RequestLength:
    """Return the length of a request.

    It is unknown for pictures, sound and token ids, whose size says little.
    """
    match work:
        case works.Chat(messages=messages, max_tokens=wanted, options=options):
            if not MEDIA.isdisjoint(work.needs):
                return UNKNOWN_LENGTH
            return RequestLength(_bytes_in([messages, options]), wanted or 0)
        case works.Completion(prompt=str(prompt), max_tokens=wanted):
            return RequestLength(_bytes_in([prompt]), wanted or 0)
        case works.Embedding() | works.Rerank():
            return RequestLength(_bytes_in([work.text]), 0)
        case (
            works.Completion()
            | works.Transcription()
            | works.Task()
            | works.Call()
            | works.CallStream()
            | works.ModelOrder()
        ):
            return UNKNOWN_LENGTH


def _bytes_in(values: Sequence[object], margin: int = 0) -> int:
    """Count the bytes of all texts in JSON, and a margin for each value."""
    found = 0
    left = [*values]
    while left:
        found += margin
        match left.pop():
            case str() as text:
                found += len(text.encode("utf-8", "surrogatepass"))
            case {"type": str(kind)} if kind in MEDIA_PARTS:
                found += MEDIA_TOKENS
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
        """Return whether a request is at least as long as one that was refused."""
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


class Overcount(NamedTuple):
    """Why a count is not believed, and whether that speaks against the worker."""

    reason: str
    wrong: bool


def overcount(work: works.Work, outcome: Outcome) -> Overcount | None:
    """Return what is wrong with the reported usage of ``work``; None: it is believed.

    A worker that knows no ``max_tokens`` writes more, and one may have thoughts that it
    does not send: such counts are ignored, and are not a fault.
    """
    usage = outcome.usage
    if usage is None:
        return None
    if usage.prompt_tokens > PROMPT_MARGIN and usage.prompt_tokens > _most_read(work):
        counted = f"{usage.prompt_tokens} tokens read"
        return Overcount(f"{counted}, more than the request can hold", wrong=True)
    return _written_overcount(work, outcome, usage)


def text_max(work: works.Work) -> float:
    """Return the most characters that the answer to ``work`` may have.

    Only a worker that ignores ``max_tokens`` writes more: few tokens are so long.
    """
    if not isinstance(work, works.Chat | works.Completion) or work.max_tokens is None:
        return math.inf
    echoed = sum(map(len, works.texts_read(work)))
    written = CHARACTERS_PER_TOKEN_MAX * (work.max_tokens + ANSWER_MARGIN)
    return _answers(work) * (written + echoed)


def _written_overcount(
    work: works.Work, outcome: Outcome, usage: Usage
) -> Overcount | None:
    count, answers = usage.completion_tokens, _answers(work)
    limit = work.max_tokens if isinstance(work, works.Chat | works.Completion) else None
    allowed = math.inf if limit is None else limit * answers + LIMIT_MARGIN
    if count <= min(allowed, ANSWER_MARGIN):
        return None
    shown = _written(work, outcome)
    counted = f"{count} tokens written"
    if count > shown + ANSWER_MARGIN * answers:
        hidden = count <= allowed if limit is not None else usage.reasoning_tokens
        return Overcount(f"{counted}, more than the answer can hold", wrong=not hidden)
    if count > allowed:
        wrong = count > shown + LIMIT_MARGIN
        return Overcount(f"{counted}, more than the {limit} of max_tokens", wrong=wrong)
    return None


def _written(work: works.Work, outcome: Outcome) -> int:
    """Return the most tokens that an answer's texts can be, without any margin."""
    if work.kind in NUMBER_KINDS:
        return 0  # the answer is numbers
    return _bytes_in([each.fields for each in outcome.choices] or [outcome.text])


def _answers(work: works.Work) -> int:
    """Return how many texts an engine writes for a request."""
    if not isinstance(work, works.Chat | works.Completion):
        return 1
    most = 1
    for name in ("n", "best_of"):
        if isinstance(number := work.options.get(name), int):
            most = max(most, number)
    if isinstance(work, works.Completion) and isinstance(work.prompt, list | tuple):
        most *= max(1, sum(not isinstance(each, int) for each in work.prompt))
    return most


def _most_read(work: works.Work) -> int:
    """Return the most tokens that a request can be."""
    most = PROMPT_MARGIN + _bytes_in(works.values_of(work), VALUE_MARGIN)
    if isinstance(work, works.Rerank):  # each document is read with the query
        most += len(work.documents) * (_bytes_in([work.query]) + PROMPT_MARGIN)
    return most
