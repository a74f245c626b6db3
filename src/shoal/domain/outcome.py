"""The result of a job: pieces of an answer, the whole, and the usage."""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

import msgspec

from shoal.domain.work import JSON


class Usage(msgspec.Struct, frozen=True):
    """Prompt and completion tokens.

    ``cached_tokens`` are those of the prompt that the engine had read before, and
    ``reasoning_tokens`` those of the completion that are thoughts; None: unknown.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Both together, as quotas count them."""
        return self.prompt_tokens + self.completion_tokens

    def bounded(self, most: int) -> "Usage":
        """Return the usage with counts from 0 to ``most``, and parts within them.

        Workers may report anything.
        """
        read, written = self.prompt_tokens, self.completion_tokens
        if (
            0 <= read <= most
            and 0 <= written <= most
            and 0 <= (self.cached_tokens or 0) <= read
            and 0 <= (self.reasoning_tokens or 0) <= written
        ):
            return self
        read, written = max(0, min(read, most)), max(0, min(written, most))
        return Usage(
            read,
            written,
            _part(self.cached_tokens, read),
            _part(self.reasoning_tokens, written),
        )


def _part(count: int | None, whole: int) -> int | None:
    return None if count is None else max(0, min(count, whole))


STOP_REASON = "stop_reason"
"""The field of a piece, and of a choice, with the stop string that ended the text.

Only some engines report it.
"""


class Fault(Enum):
    """Why a job failed."""

    WORKER = "worker"
    ENGINE = "engine"  # it is short of memory, or broke: it may do the job later
    REQUEST = "request"  # the request is invalid for every worker
    CONTEXT = "context"  # the request exceeds the model's context
    SIZE = "size"  # the request is too large
    VALUES = "values"  # the request is well-formed, with unusable values

    __hash__ = object.__hash__  # members are singletons, hashed very often


ENGINE_FAULTS = frozenset({Fault.WORKER, Fault.ENGINE})
"""The faults at which another engine may do the job."""


class Delta(msgspec.Struct, frozen=True):
    """A piece of an answer that is more than text of its only choice.

    ``fields`` are those of a streamed message in OpenAI's form: ``content``,
    ``tool_calls`` with their ``index``, ``reasoning_content`` and so on; of an
    embedding, ``embedding`` with float32 values, little-endian, in base64.
    """

    choice: int = 0
    fields: Mapping[str, JSON] = {}
    logprobs: JSON = None
    finish_reason: str | None = None

    @property
    def written(self) -> int:
        """The characters of the texts in the fields."""
        return sum(len(each) for each in self.fields.values() if isinstance(each, str))

    @property
    def size(self) -> int:
        """Approximate size in characters, for limits: exact for texts in the fields."""
        known = self.written
        if not all(isinstance(value, str) for value in self.fields.values()):
            known += len(str(self.fields))
        return known if self.logprobs is None else known + len(str(self.logprobs))


AnswerPiece: TypeAlias = str | Delta


def plain_texts(pieces: Iterable[AnswerPiece]) -> list[str]:
    """Return pieces as peers get them that know only text: a refusal is text as well.

    Without a call for each text: an answer has thousands.
    """
    return [each if isinstance(each, str) else _plain_text(each) for each in pieces]


def _plain_text(piece: Delta) -> str:
    texts = (piece.fields.get(name) for name in ("content", "refusal"))
    return (
        "" if piece.choice else "".join(each for each in texts if isinstance(each, str))
    )


THOUGHTS = "reasoning_content"
"""The field of a delta with the model's thoughts."""


def begun_answer(text: str, thoughts: str) -> Sequence[AnswerPiece]:
    """Return the pieces of an answer that begins with these."""
    begun: list[AnswerPiece] = [Delta(0, {THOUGHTS: thoughts})] if thoughts else []
    return [*begun, text] if text else begun


class AnswerSpan(NamedTuple):
    """The length of a text in ``Choice.fields`` that came in one run.

    Of ``tool_calls``, they are of the arguments of the call with the index ``call``.
    """

    field: str
    call: int
    length: int


class Choice(msgspec.Struct, frozen=True, eq=False):
    """A complete choice of several, or one that is more than text.

    ``fields`` are those of a message in OpenAI's form; see ``Delta``.  ``order`` has
    the spans of their texts as they came; empty: reasoning, text, a refusal and calls
    in this order, each in one run.  It makes no difference between answers.
    """

    fields: Mapping[str, JSON] = {}
    finish_reason: str = "stop"
    logprobs: JSON = None
    order: tuple[AnswerSpan, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Choice) and (
            (self.fields, self.finish_reason, self.logprobs)
            == (other.fields, other.finish_reason, other.logprobs)
        )


class Outcome(msgspec.Struct, frozen=True):
    """The result of a completed job.

    ``text`` is the text of the first choice; ``choices`` is empty if the answer is only
    that.  ``output`` is the whole as JSON text, where the wire has a form for it; the
    worker's receipt is about it.  ``value`` is the return value of a function, in
    MessagePack, and ``blobs`` are as in ``Call``.
    """

    text: str
    finish_reason: str = "stop"
    usage: Usage | None = None  # None if the wire does not report it
    choices: tuple[Choice, ...] = ()
    output: str = ""
    value: bytes = b""
    blobs: tuple[bytes, ...] = ()
