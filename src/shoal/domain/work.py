"""What a user wants done: jobs, their limits and their terms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from shoal.domain.ids import JobId, WorkerId
from shoal.domain.options import Feature as Feature  # re-exported
from shoal.domain.options import needed_features

JSON: TypeAlias = (
    "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
)


class JobKind(Enum):
    """What a job asks a worker to do."""

    CHAT = "chat"
    COMPLETION = "completion"  # going on from a text as it is
    EMBEDDING = "embedding"
    TASK = "task"  # something with a name, whatever it takes and gives
    CALL = "call"  # a Python function, by its name
    CALL_STREAM = "lane"  # a place to call a function again and again

    __hash__ = object.__hash__  # each is one object, and asked for all the time


class Policy(Enum):
    """Which workers a job should rather go to, and what it costs."""

    FAST = "fast"
    CHEAP = "cheap"

    __hash__ = object.__hash__  # each is one object, and asked for all the time


class Privacy(Enum):
    """Who may see what a job is about."""

    PUBLIC = "public"
    PRIVATE = "private"  # only workers that the asker trusts and that proved their key

    __hash__ = object.__hash__  # each is one object, and asked for all the time


INDIVISIBLE_FEATURES = frozenset(
    {Feature.TOOLS, Feature.SCHEMA, Feature.LOGPROBS, Feature.CHOICES}
)
"""What an answer is the outcome of as a whole, so that no other can go on with it."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be continued by a model.

    ``messages`` are in OpenAI's form, each with ``role`` and ``content``: every wire
    and engine translates from it.  ``options`` holds OpenAI's further fields
    (``top_p``, ``stop``, ``tools``, ``response_format`` and so on) under their own
    names.
    """

    model: str
    messages: tuple[Mapping[str, JSON], ...]
    max_tokens: int | None = None
    temperature: float | None = None
    options: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def kind(self) -> JobKind:
        return JobKind.CHAT

    @property
    def needs(self) -> frozenset[Feature]:
        """What a worker must be able to do for the answer to be right.

        Other options only colour the answer; a worker that ignores them still answers.
        """
        wanted = needed_features(self.options)
        for message in self.messages:
            if "tool_calls" in message or message.get("role") == "tool":
                wanted.add(Feature.TOOLS)
            content = message.get("content")
            if isinstance(content, Sequence) and not isinstance(content, str):
                wanted.update(
                    _CONTENT_FEATURES[kind] for kind in _content_types(content)
                )
        return frozenset(wanted)

    @property
    def text(self) -> str:
        """All that the model is to read."""
        return "\n".join(message_text(message) for message in self.messages)


@dataclass(frozen=True, slots=True)
class Completion:
    """A text to be gone on with, without the form of a conversation.

    ``prompt`` is a text, or whatever else OpenAI allows: several texts, tokens.
    """

    model: str
    prompt: JSON
    max_tokens: int | None = None
    temperature: float | None = None
    options: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def kind(self) -> JobKind:
        return JobKind.COMPLETION

    @property
    def needs(self) -> frozenset[Feature]:
        """What a worker must be able to do for the answer to be right."""
        wanted = needed_features(self.options)
        if isinstance(self.prompt, Sequence) and not isinstance(self.prompt, str):
            wanted.add(Feature.CHOICES)  # tokens, or a text for each answer
        return frozenset(wanted)

    @property
    def text(self) -> str:
        """All that the model is to read."""
        return self.prompt if isinstance(self.prompt, str) else ""


@dataclass(frozen=True, slots=True)
class Embedding:
    """Texts to be turned into vectors, one each."""

    model: str
    inputs: tuple[str, ...]
    options: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def kind(self) -> JobKind:
        return JobKind.EMBEDDING

    @property
    def needs(self) -> frozenset[Feature]:
        """What a worker must be able to do for the answer to be right."""
        return frozenset()

    @property
    def text(self) -> str:
        """The longest input: each is read for itself."""
        return max(self.inputs, key=len, default="")


Inference: TypeAlias = Chat | Completion | Embedding
"""What a model does."""

ANY_MODEL = "*"
"""The model of a job for which any will do."""

NAME_SHOWN_MAX_LENGTH = 64  # characters of a task's name, which may be anything

TASK_QUEUE = "*task"
"""What stands for a model where there is none: tasks wait in one queue."""


@dataclass(frozen=True, slots=True)
class Task:
    """Something to be done that has a name, with whatever it takes.

    ``payload`` is as the asker wrote it, and need not even have a ``name``.  The answer
    is the JSON text of what came of it.
    """

    name: str
    payload: JSON = None

    @property
    def kind(self) -> JobKind:
        return JobKind.TASK

    @property
    def model(self) -> str:
        return TASK_QUEUE

    @property
    def needs(self) -> frozenset[Feature]:
        """What a worker must be able to do for the answer to be right."""
        return frozenset()

    @property
    def text(self) -> str:
        """All that a model is to read, if a model does the task."""
        given = self.payload.get("input") if isinstance(self.payload, Mapping) else None
        return given if isinstance(given, str) else ""


CALL_QUEUE = "*call"
"""What stands for a model where Python functions are called."""


@dataclass(frozen=True, slots=True)
class Call:
    """A Python function to be called, by the name that it is registered under.

    ``args`` and ``kwargs`` are values in MessagePack, an array and a map with texts as
    keys, as their caller wrote them (``docs/tasks.md``); ``blobs`` are the SHA-256
    digests of what is large among them and travels apart.  ``timeout`` is for how many
    seconds it may run; None: as long as the job may.  ``needs`` has ``Feature.VALUES``
    if there is more in the values than MessagePack itself has, and ``Feature.CODE`` if
    the function itself is the first of ``args``: then its name is for people alone.
    """

    name: str
    args: bytes
    kwargs: bytes
    timeout: float | None = None
    needs: frozenset[Feature] = frozenset()
    blobs: tuple[bytes, ...] = ()

    @property
    def kind(self) -> JobKind:
        return JobKind.CALL

    @property
    def model(self) -> str:
        return CALL_QUEUE

    @property
    def text(self) -> str:
        """All that a model is to read: nothing."""
        return ""


@dataclass(frozen=True, slots=True)
class CallStream:
    """A slot of a worker, held in order to call one function again and again.

    The calls themselves are data: they go to the worker and come back without the pool
    or the store hearing of them.  ``timeout`` and ``needs`` are those of each call.
    """

    name: str
    timeout: float | None = None
    needs: frozenset[Feature] = frozenset()

    @property
    def kind(self) -> JobKind:
        return JobKind.CALL_STREAM

    @property
    def model(self) -> str:
        return CALL_QUEUE

    @property
    def text(self) -> str:
        """All that a model is to read: nothing."""
        return ""


NamedWork: TypeAlias = Task | Call | CallStream
"""What is looked for in a worker by a name that is not a model's."""

Work: TypeAlias = Inference | NamedWork

JsonWork: TypeAlias = Inference | Task
"""Work that is all JSON, as most wires carry it."""


def describe_target(work: Work) -> str:
    """Say what is looked for in a worker: a model or a task, in words for people."""
    if isinstance(work, NamedWork):
        name = work.name[:NAME_SHOWN_MAX_LENGTH]
        what = "task" if isinstance(work, Task) else "function"
        return f"the {what} {name!r}" if name else f"a {what} without a name"
    return "any model" if work.model == ANY_MODEL else work.model


_CONTENT_FEATURES: Mapping[str, Feature] = {
    "image_url": Feature.IMAGES,
    "input_audio": Feature.AUDIO,
}


def _content_types(parts: Sequence[JSON]) -> set[str]:
    kinds = {part.get("type") for part in parts if isinstance(part, Mapping)}
    return {
        kind for kind in kinds if isinstance(kind, str) and kind in _CONTENT_FEATURES
    }


def message_text(message: Mapping[str, JSON]) -> str:
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


class TimeLimit(Enum):
    """The time limits of a job, by what they bound."""

    QUEUE = "waiting in the queue"
    FIRST_OUTPUT = "waiting for the first output"
    SILENCE = "waiting for more output"
    TOTAL = "running in all"

    __hash__ = object.__hash__  # each is one object, and asked for all the time


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long a job may wait and run, in seconds."""

    queue: float = 30.0
    first_output: float = 300.0
    silence: float = 120.0
    total: float = 3600.0


class Priority(Enum):
    """Who goes first when not all can: a higher one always does."""

    LOW = 0
    NORMAL = 1
    HIGH = 2

    __hash__ = object.__hash__  # each is one object, and asked for all the time


PRIORITIES: Mapping[str, Priority] = {each.name.lower(): each for each in Priority}
"""Priorities by the names that clients give them."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where to tell that a job has ended; ``secret`` signs what is told."""

    url: str
    secret: str


@dataclass(frozen=True, slots=True)
class JobTerms:
    """On what terms a job is done.

    ``user`` is for whom the owner asks: a sub-account of the owner's.  A job that is
    not ``kept`` is known to nobody after a restart, and has no receipt.  ``form`` is
    the JSON text of the work as its asker put it, for wires that carry work in that
    form.
    """

    policy: Policy = Policy.FAST
    privacy: Privacy = Privacy.PUBLIC
    user: str = ""
    price: int = 0  # micro-dollars
    payment_ref: str = ""  # what the payment is known by elsewhere
    form: str = ""
    webhook: Webhook | None = None
    avoid: frozenset[WorkerId] = frozenset()  # workers that are not to have it
    detached: bool = False  # whether it goes on when nobody waits for it
    near: bool = False  # whether no other pool may have it: it came from one
    kept: bool = True  # whether it is stored


DEFAULT_TERMS = JobTerms()
"""The terms of whoever says nothing about them."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a user wants, as accepted.

    ``session`` names what jobs have in common that a worker may still remember, such as
    a conversation.  ``idempotency_key`` is the owner's own name for the job: it goes on
    when the owner leaves, and asking again under the same name finds it.
    """

    id: JobId
    work: Work
    limits: TimeLimits = TimeLimits()
    owner: str = ""  # the name of the key that asked
    priority: Priority = Priority.NORMAL
    session: str = ""
    idempotency_key: str = ""
    terms: JobTerms = DEFAULT_TERMS

    @property
    def kind(self) -> JobKind:
        return self.work.kind

    @property
    def continues_unattended(self) -> bool:
        """Whether it is done also if nobody waits for it."""
        return self.terms.detached or bool(self.idempotency_key)

    @property
    def model(self) -> str:
        return self.work.model
