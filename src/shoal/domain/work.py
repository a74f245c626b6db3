"""What a job asks for: inferences, tasks and function calls."""

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import ClassVar, TypeAlias

import msgspec
from msgspec import structs

from shoal.domain.options import Feature as Feature  # re-exported
from shoal.domain.options import needed_features

JSON: TypeAlias = (
    "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
)


class JobKind(Enum):
    """What a job asks a worker to do."""

    CHAT = "chat"
    COMPLETION = "completion"  # continues a plain text
    EMBEDDING = "embedding"
    RERANK = "rerank"  # scores documents by a query
    TRANSCRIPTION = "transcription"  # writes down speech
    TASK = "task"  # named, with any input and output
    CALL = "call"  # one call of a Python function
    CALL_STREAM = "lane"  # a slot held for many calls of one function
    MODEL = "model"  # load or unload a model

    __hash__ = object.__hash__  # members are singletons, hashed very often


INDIVISIBLE_FEATURES = frozenset(
    {Feature.TOOLS, Feature.SCHEMA, Feature.LOGPROBS, Feature.CHOICES, Feature.ECHO}
)
"""Features that shape the whole answer, so that no other worker can continue it."""


INSTRUCTIONS = ("system", "developer")
"""Roles of messages that instruct the model."""


class Chat(msgspec.Struct, frozen=True):
    """A conversation that a model continues.

    ``messages`` are in OpenAI's form, each with ``role`` and ``content``: every wire
    and engine translates from it.  ``options`` holds OpenAI's further fields
    (``top_p``, ``stop``, ``tools``, ``response_format`` and so on) under their own
    names.
    """

    kind: ClassVar[JobKind] = JobKind.CHAT

    model: str
    messages: tuple[Mapping[str, JSON], ...]
    max_tokens: int | None = None
    temperature: float | None = None
    options: Mapping[str, JSON] = {}

    @property
    def needs(self) -> frozenset[Feature]:
        """What a worker must be able to do for the answer to be right.

        Other options only colour the answer; a worker that ignores them still answers.
        """
        wanted = needed_features(self.options) if self.options else set()
        for message in self.messages:
            if "tool_calls" in message or "tool_call_id" in message:
                wanted.add(Feature.TOOLS)
            content = message.get("content")
            if not isinstance(content, str) and isinstance(content, Sequence):
                wanted.update(
                    _CONTENT_FEATURES[kind] for kind in _content_types(content)
                )
        return frozenset(wanted)

    def without_tools(self) -> "Chat":
        """Return the chat for a model without tools; calls in its history are text."""
        options = {
            name: value
            for name, value in self.options.items()
            if name not in ("tools", "tool_choice", "parallel_tool_calls")
        }
        messages = tuple(map(_without_calls, self.messages))
        return structs.replace(self, messages=messages, options=options)

    @property
    def text(self) -> str:
        """The text that the model reads."""
        return "\n".join(map(message_text, self.messages))

    @property
    def has_question(self) -> bool:
        """Whether it has more than instructions for the model."""
        return any(each.get("role") not in INSTRUCTIONS for each in self.messages)


class Completion(msgspec.Struct, frozen=True):
    """A text that a model continues, outside of any conversation.

    ``prompt`` is a text, or what else OpenAI allows: several texts, or tokens.
    """

    kind: ClassVar[JobKind] = JobKind.COMPLETION

    model: str
    prompt: JSON
    max_tokens: int | None = None
    temperature: float | None = None
    options: Mapping[str, JSON] = {}

    @property
    def needs(self) -> frozenset[Feature]:
        """What a worker must be able to do for the answer to be right."""
        wanted = needed_features(self.options) if self.options else set()
        if not isinstance(self.prompt, str) and isinstance(self.prompt, Sequence):
            wanted.add(Feature.CHOICES)  # tokens, or a text for each answer
        return frozenset(wanted)

    @property
    def text(self) -> str:
        """The text that the model reads."""
        return self.prompt if isinstance(self.prompt, str) else ""


class Embedding(msgspec.Struct, frozen=True):
    """Texts to be turned into vectors, one each."""

    kind: ClassVar[JobKind] = JobKind.EMBEDDING
    needs: ClassVar[frozenset[Feature]] = frozenset()

    model: str
    inputs: tuple[str, ...]
    options: Mapping[str, JSON] = {}

    @property
    def text(self) -> str:
        """The longest input: each is read for itself."""
        return max(self.inputs, key=len, default="")


class Rerank(msgspec.Struct, frozen=True):
    """Documents to be scored: how relevant each is to a query."""

    kind: ClassVar[JobKind] = JobKind.RERANK
    needs: ClassVar[frozenset[Feature]] = frozenset()

    model: str
    query: str
    documents: tuple[str, ...]
    options: Mapping[str, JSON] = {}

    @property
    def text(self) -> str:
        """The query with the longest document: each is read with the query."""
        return f"{self.query}\n{max(self.documents, key=len, default='')}"


class Transcription(msgspec.Struct, frozen=True):
    """Speech to be written down.

    ``audio`` is a file in base64, and ``format`` the end of its name, such as ``wav``.
    With the option ``timestamps``, the answer says when each part was said.
    """

    kind: ClassVar[JobKind] = JobKind.TRANSCRIPTION
    needs: ClassVar[frozenset[Feature]] = frozenset()

    model: str
    audio: str
    format: str
    options: Mapping[str, JSON] = {}

    @property
    def text(self) -> str:
        """The text that the model reads, beside what it hears."""
        prompt = self.options.get("prompt")
        return prompt if isinstance(prompt, str) else ""


InputWork: TypeAlias = Embedding | Rerank | Transcription
"""Work on given inputs, which a worker does as a whole or not at all."""

Inference: TypeAlias = Chat | Completion | InputWork
"""Work that runs on a model."""

ANY_MODEL = "*"
"""The model of a job that accepts any model."""

NAME_SHOWN_MAX_LENGTH = 64  # characters of a task's name, which may be anything

TASK_QUEUE = "*task"
"""Stands for the model of tasks, which wait in one queue."""


class Task(msgspec.Struct, frozen=True):
    """A named task with any JSON input.

    ``payload`` is as the client sent it, and may lack a ``name``.  The answer is the
    JSON text of the output.
    """

    kind: ClassVar[JobKind] = JobKind.TASK
    model: ClassVar[str] = TASK_QUEUE
    needs: ClassVar[frozenset[Feature]] = frozenset()

    name: str
    payload: JSON = None

    @property
    def text(self) -> str:
        """The text that a model reads, if a model runs the task."""
        fields = self.payload if isinstance(self.payload, _MAPPINGS) else {}
        given = fields.get("input")
        return given if isinstance(given, str) else ""


CALL_QUEUE = "*call"
"""Stands for the model of calls and call streams, which wait in one queue."""


class Call(msgspec.Struct, frozen=True):
    """A call of a Python function by its registered name.

    ``args`` and ``kwargs`` are values in MessagePack, an array and a map with texts as
    keys, as their caller encoded them (``docs/tasks.md``); ``blobs`` are the SHA-256
    digests of large values among them, which are sent separately.  ``timeout`` is how
    many seconds it may run; None: as long as the job may.  ``needs`` has
    ``Feature.VALUES`` if the values include types beyond MessagePack's own, and
    ``Feature.CODE`` if the first of ``args`` is the function itself: its name is then
    only for display.  ``python`` is the version of Python (``3.12``) that such code is
    for, because bytecode differs between versions; empty: not stated.  ``exact``: the
    caller is a Python program of this release, which gets and gives each value as it
    is; others get the contents of instances, and give them to be converted.
    """

    kind: ClassVar[JobKind] = JobKind.CALL
    model: ClassVar[str] = CALL_QUEUE
    text: ClassVar[str] = ""  # no model reads any

    name: str
    args: bytes
    kwargs: bytes
    timeout: float | None = None
    needs: frozenset[Feature] = frozenset()
    blobs: tuple[bytes, ...] = ()
    python: str = ""
    exact: bool = False


class CallStream(msgspec.Struct, frozen=True):
    """A worker's slot, held for many calls of one function.

    The calls are data: they go to the worker and return without being recorded by the
    pool or the store.  The other fields are those of each call.
    """

    kind: ClassVar[JobKind] = JobKind.CALL_STREAM
    model: ClassVar[str] = CALL_QUEUE
    text: ClassVar[str] = ""  # no model reads any

    name: str
    timeout: float | None = None
    needs: frozenset[Feature] = frozenset()
    python: str = ""
    exact: bool = False


NamedWork: TypeAlias = Task | Call | CallStream
"""Work that a worker is found for by a task's or function's name."""

MODEL_QUEUE = "*models"
"""Stands for the model of orders about models, which wait in one queue."""


class ModelAction(Enum):
    """What a machine does with a model.

    LEND: it starts a shard, which holds some layers of a model for another machine that
    runs it, until it is told to UNLOAD that.
    """

    LOAD = "load"
    UNLOAD = "unload"
    LEND = "lend"

    __hash__ = object.__hash__  # members are singletons, hashed often


class Shard(msgspec.Struct, frozen=True):
    """One machine's part of a model that is split over several.

    ``machine`` is the id of the worker that has its library, ``layers`` how many it
    holds, from the one with the number ``first``, and ``memory`` is in bytes.
    ``hosts`` and ``port`` are where it listens, and ``fingerprint`` is the SHA-256 of
    its port's certificate in hexadecimal; empty for the shard of the machine that runs
    the model.
    """

    machine: str
    layers: int
    memory: int
    hosts: tuple[str, ...] = ()
    port: int = 0
    fingerprint: str = ""
    first: int = 0


_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_REVISION = re.compile(r"[0-9a-f]{40}")
_GGUF_FILE = re.compile(r"(?:\w[\w.+@=-]*/){0,8}\w[\w.+@=-]*\.gguf", re.ASCII)
HUB_NAME_MAX = 256  # characters of a repository's name, or of a file's


class HubModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model in a repository of the Hugging Face hub.

    ``file`` is the GGUF file, or the first of its parts, and ``revision`` the hash of
    the commit.  ``size`` is in bytes, of all parts.
    """

    repository: str
    file: str
    revision: str
    size: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether it may be true: no name in it leaves the repository."""
        texts = (_REPOSITORY, self.repository), (_GGUF_FILE, self.file)
        return (
            all(
                len(text) <= HUB_NAME_MAX and rule.fullmatch(text)
                for rule, text in texts
            )
            and _REVISION.fullmatch(self.revision) is not None
            and self.size >= 0
        )


class ModelOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """An order to one machine to load a model of its library, or to unload it.

    ``machine`` is the id of the worker that has the library (``Offer.library``): only
    that carries it out.  ``context`` is in tokens, for each of the ``slots``; 0: as the
    machine chooses.  ``room_for`` is the model that an unload makes room for; empty:
    none.  The answer is empty: the machine then offers the model, or no longer does.

    ``group`` names the machines that run a model together, which is split into
    ``shards``, in the order of its layers; empty: one machine runs it.  ``runner`` is
    the public key of the machine that runs the model, in hexadecimal: a shard admits
    only that.  ``batch`` is how many tokens of a prompt it reads at a time.
    ``has_copies``: a shard gets its layers from other machines than the runner, which
    have the model's files too; ``digest`` is the address of these, empty: unknown.

    ``hub`` is where a machine without the file gets it, if no machine of the pool sends
    it; None: nowhere.
    """

    kind: ClassVar[JobKind] = JobKind.MODEL
    model: ClassVar[str] = MODEL_QUEUE
    needs: ClassVar[frozenset[Feature]] = frozenset()
    text: ClassVar[str] = ""  # no model reads any

    action: ModelAction
    name: str
    machine: str
    context: int = 0
    slots: int = 0
    room_for: str = ""
    group: str = ""
    shards: tuple[Shard, ...] = ()
    runner: str = ""
    batch: int = 0
    has_copies: bool = False
    digest: str = ""
    hub: HubModel | None = None

    @property
    def own_memory(self) -> int:
        """The bytes of the part that its machine holds; 0: it is not split."""
        own = self.machine
        return sum(each.memory for each in self.shards if each.machine == own)

    @property
    def own_layers(self) -> range:
        """The layers that its machine holds for others."""
        for each in self.shards[:-1]:
            if each.machine == self.machine:
                return range(each.first, each.first + each.layers)
        return range(0)


Work: TypeAlias = Inference | NamedWork | ModelOrder

JsonWork: TypeAlias = Inference | Task | ModelOrder
"""Work that is all JSON, as most wires carry it."""


def describe_target(work: Work) -> str:
    """Describe the model, task or function that the work requires, for messages."""
    if isinstance(work, ModelOrder):
        return f"an order to {work.action.value} {work.name} on {work.machine}"
    if isinstance(work, NamedWork):
        name = work.name[:NAME_SHOWN_MAX_LENGTH]
        what = "task" if isinstance(work, Task) else "function"
        return f"the {what} {name!r}" if name else f"a {what} without a name"
    return "any model" if work.model in (ANY_MODEL, "") else work.model


_MAPPINGS = (dict, Mapping)  # nearly all are of the first, which is known sooner

_CONTENT_FEATURES: Mapping[str, Feature] = {
    "image_url": Feature.IMAGES,
    "input_audio": Feature.AUDIO,
}


def _content_types(parts: Sequence[JSON]) -> set[str]:
    kinds = (part.get("type") for part in parts if isinstance(part, _MAPPINGS))
    return {
        kind for kind in kinds if isinstance(kind, str) and kind in _CONTENT_FEATURES
    }


def is_repeatable(work: "Work") -> bool:
    """Return whether another worker may give the very same answer.

    Models sample their texts, unless the temperature is 0 or the request has a seed.
    """
    if not isinstance(work, Chat | Completion):
        return True
    return work.temperature == 0 or work.options.get("seed") is not None


def _without_calls(message: Mapping[str, JSON]) -> Mapping[str, JSON]:
    if message.get("role") == "tool":
        return {"role": "user", "content": message.get("content")}
    if not isinstance(calls := message.get("tool_calls"), Sequence):
        return message
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    texts = [message_text(message)]
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            texts.append(f"{function.get('name')}({function.get('arguments')})")
    return {**kept, "content": "\n".join(filter(None, texts))}


def message_text(message: Mapping[str, JSON]) -> str:
    """Return the text of a message in OpenAI's form; text parts are joined."""
    content = message.get("content")
    match content:
        case str():
            return content
        case [*parts]:
            texts = [p.get("text") for p in parts if isinstance(p, _MAPPINGS)]
            return "".join([text for text in texts if isinstance(text, str)])
        case _:
            return ""


def texts_read(work: Work) -> Sequence[str]:
    """Return all texts that a model reads; most of them are read for themselves."""
    match work:
        case Completion(prompt=prompt, options=options):
            given = [prompt] if isinstance(prompt, str) else prompt
            listed = given if isinstance(given, Sequence) else ()
            texts = (*listed, options.get("suffix"))
            return [text for text in texts if isinstance(text, str)]
        case Embedding(inputs=inputs):
            return inputs
        case Rerank(query=query, documents=documents):
            return [f"{query}\n{each}" for each in documents]
        case _:
            return (work.text,)


def values_of(work: Work) -> list[JSON]:
    """Return the JSON that work consists of, beside its model.

    Arguments of calls are no JSON.
    """
    match work:
        case Chat(messages=messages, options=options):
            return [messages, options]
        case Completion(prompt=prompt, options=options):
            return [prompt, options]
        case Embedding(inputs=inputs, options=options):
            return [inputs, options]
        case Rerank(query=query, documents=documents, options=options):
            return [query, documents, options]
        case Transcription(audio=audio, options=options):
            return [audio, options]
        case Task(payload=payload):
            return [payload]
        case Call() | CallStream() | ModelOrder():
            return []
