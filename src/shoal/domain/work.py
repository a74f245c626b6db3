"""What a user wants done: jobs, their limits, and what came of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from shoal.domain.ids import JobId

JSON: TypeAlias = (
    "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
)


class Kind(Enum):
    """What a job asks a worker to do."""

    CHAT = "chat"


class Feature(Enum):
    """Something a worker can do with a job beyond producing text."""

    CONTINUE = "continue"  # goes on from a given beginning of the answer
    OPTIONS = "options"  # obeys sampling options other than the temperature
    STOP = "stop"  # ends at the caller's stop strings


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be continued by a model.

    ``messages`` are in OpenAI's form, each with ``role`` and ``content``: every wire
    and engine translates from it.  ``options`` holds OpenAI's further sampling fields
    (``top_p``, ``stop``, ``seed`` and so on) under their own names.
    """

    model: str
    messages: tuple[Mapping[str, JSON], ...]
    max_tokens: int | None = None
    temperature: float | None = None
    options: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[Feature]:
        """What a worker must be able to do for the answer to be right.

        Other options only colour the answer; a worker that ignores them still answers.
        """
        return frozenset({Feature.STOP} if "stop" in self.options else ())


def text_of(message: Mapping[str, JSON]) -> str:
    """Return the text of a message in OpenAI's form; text parts are joined."""
    content = message.get("content")
    match content:
        case str():
            return content
        case [*parts]:
            texts = (p.get("text") for p in parts if isinstance(p, Mapping))
            return "".join(text for text in texts if isinstance(text, str))
        case _:
            return ""


class Limit(Enum):
    """The time limits of a job, by what they bound."""

    QUEUE = "waiting in the queue"
    FIRST_OUTPUT = "waiting for the first output"
    SILENCE = "waiting for more output"
    TOTAL = "running in all"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a job may wait and run, in seconds."""

    queue: float = 30.0
    first_output: float = 300.0
    silence: float = 120.0
    total: float = 3600.0


@dataclass(frozen=True, slots=True)
class Job:
    """What a user wants, as accepted."""

    id: JobId
    work: Chat
    limits: Limits = Limits()
    owner: str = ""  # the name of the key that asked

    @property
    def kind(self) -> Kind:
        return Kind.CHAT

    @property
    def model(self) -> str:
        return self.work.model


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job that was done."""

    text: str
    finish_reason: str = "stop"
    usage: Usage | None = None  # None where the wire cannot tell
