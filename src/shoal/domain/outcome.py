"""What comes of a job: pieces of an answer, the whole, and what it took."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from shoal.domain.work import JSON


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int


class Fault(Enum):
    """Whose fault it is that a job failed."""

    WORKER = "worker"
    REQUEST = "request"  # no worker would do it as it is
    CONTEXT = "context"  # it is longer than the model can read


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer that is more than text of its only choice.

    ``fields`` are those of a streamed message in OpenAI's form: ``content``,
    ``tool_calls`` with their ``index``, ``reasoning_content`` and so on; of an
    embedding, ``embedding`` with float32 values, little-endian, in base64.
    """

    choice: int = 0
    fields: Mapping[str, JSON] = field(default_factory=dict)
    logprobs: JSON = None
    finish_reason: str | None = None

    @property
    def size(self) -> int:
        """Characters, about, for limits: exact for the texts among the fields."""
        texts = [value for value in self.fields.values() if isinstance(value, str)]
        known = sum(map(len, texts))
        if len(texts) < len(self.fields):
            known += len(str(self.fields))
        return known if self.logprobs is None else known + len(str(self.logprobs))


AnswerPiece: TypeAlias = str | Delta


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer of several, or one that is more than text.

    ``fields`` are those of a message in OpenAI's form; see ``Delta``.
    """

    fields: Mapping[str, JSON] = field(default_factory=dict)
    finish_reason: str = "stop"
    logprobs: JSON = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job that was done.

    ``text`` is the text of the first choice; ``choices`` is empty if there is no more
    to the answer.  ``output`` is the whole as JSON text, where the wire has a form for
    it: what the worker's receipt is about.  ``value`` is what a function returned, in
    MessagePack, and ``blobs`` are as in ``Call``.
    """

    text: str
    finish_reason: str = "stop"
    usage: Usage | None = None  # None where the wire cannot tell
    choices: tuple[Choice, ...] = ()
    output: str = ""
    value: bytes = b""
    blobs: tuple[bytes, ...] = ()
