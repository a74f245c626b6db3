"""Tasks: a chat as one JSON text, which the server encodes and the node decodes.

Source: the WebSocket protocol document, what real servers send, and what real nodes
survive; ``docs/protocols/grandsage.md`` has the details.
"""

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.vocabulary import RunJob
from shoal.domain.work import (
    JSON,
    Chat,
    Completion,
    Embedding,
    Inference,
    JobKind,
    Rerank,
    Task,
    Transcription,
    message_text,
)
from shoal.protocols.grandsage.codec import TaskId, validation_error, well_formed
from shoal.protocols.seam.document_fields import Undocumented
from shoal.protocols.seam.input_work import input_prompt, input_work, inputs_of
from shoal.protocols.seam.session import without_calls

# Limits for real nodes: a token limit below 1 crashes them, as does a temperature that
# is negative or nearly zero, and they accept only plain numbers.
TEMPERATURE = 0.7  # default where the client sets none: nodes require one
TEMPERATURE_MIN = 0.01  # lower values become 0: every node decodes greedily
TEMPERATURE_MAX = 2.0
NEW_TOKENS_MAX = 2**31 - 1
ENGINE_TOKENS_MAX = 2**63 - 1
RESERVED_TOKENS = 50  # of its context, which a real node keeps free
BYTES_PER_TOKEN = 3  # estimated low: a task with too little room is dropped
MESSAGE_TOKENS = 8  # of what surrounds a message in a prompt, estimated high
ANSWER_SHARE = 4  # an answer has a quarter of the context, however long the prompt

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_MAX = sys.float_info.max

Messages: TypeAlias = tuple[Mapping[str, JSON], ...]
_Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-_MAX, le=_MAX)]


def encode_task(
    task_id: int,
    job: RunJob,
    *,
    created_at: int,
    max_new_tokens: int,
    context: int = 0,
    extended: bool,
) -> str:
    """Encode a task, with its fields in the original server's order.

    Args:
        created_at: seconds since the epoch.
        max_new_tokens: highest token limit, and that of jobs without one.
        context: of the node's model, in tokens, which limits the answer instead; 0:
            unknown.
        extended: whether to add the extension field ``shoal``.
    """
    work = without_calls(job.work)
    if isinstance(work, Task):
        raise Unsupported("a node cannot run tasks")
    plain = _plain_fields(work, max_new_tokens, context)
    task: dict[str, JSON] = {
        "state": 0,
        "id": task_id,
        "resp": "",
        "modLastCheckedPos": 0,
        **plain,
        "created_at": created_at,
        # The original sends the user's record to every node.  No node reads it.
        "user": {"token": "-", "name": "-"},
    }
    if extended:
        try:
            return _dump(task | {"shoal": _extension_fields(job, work, plain)})
        except (ValueError, RecursionError):
            # Nested too deeply, or not a number: send the plain fields alone.
            pass
    return _dump(task)


class TaskHead(msgspec.Struct, frozen=True):
    """The fields common to all texts of a server."""

    id: TaskId
    state: Any = 0
    stop: Annotated[
        Any, Undocumented("an original server sends it: the task is stopped")
    ] = msgspec.UNSET

    @property
    def stops(self) -> bool:
        """Whether this is a stop: the key decides, so ``"stop": false`` stops too."""
        return self.stop is not msgspec.UNSET

    @property
    def pending(self) -> bool:
        """Whether the task is pending."""
        return self.state == 0 and not isinstance(self.state, bool)


class _Message(msgspec.Struct, frozen=True):
    role: str = "user"
    content: str | None = ""


class _TaskExtension(msgspec.Struct, frozen=True):
    """Extension field of a task: what the plain fields cannot express."""

    kind: JobKind = JobKind.CHAT
    prompt: Any = ""
    inputs: list[str] = []
    max_tokens: int | None = None
    temperature: _Finite | None = None
    continues: str = ""
    thoughts: str = ""
    options: dict[str, Any] = {}
    messages: list[dict[str, Any]] | None = None


class _Task(msgspec.Struct, frozen=True):
    # The example in the document has strings as messages.
    messages: list[str | _Message]
    system: str | None = ""
    max_new_tokens: int | _Finite | None = None
    temperature: _Finite | None = None


class _ExtendedTask(_Task, frozen=True):
    shoal: Annotated[
        _TaskExtension | None, Undocumented("what the other fields cannot express")
    ] = None


_heads = msgspec.json.Decoder(TaskHead)
_tasks = msgspec.json.Decoder(_Task)
_extended_tasks = msgspec.json.Decoder(_ExtendedTask)


def decode_text(data: bytes | str) -> tuple[TaskHead, str]:
    """Decode the head of a server's text; return it and the well-formed text.

    JSON may be in a binary frame: real nodes accept that.

    Raises PeerError if it is not a JSON object with a valid id.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        if _ESCAPED_SURROGATE.search(text):
            # The original server passes on escaped lone surrogates.
            text = _dump(json.loads(text))
        head: TaskHead = _heads.decode(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"no task: {validation_error(error)}") from error
    return head, text


def decode_work(text: str, model: str, *, extended: bool) -> tuple[Inference, str, str]:
    """Return the work of a task, and the text and thoughts that its answer has.

    The system message and the limits are optional.  A token limit below 1 means 1, as
    in one of the real nodes.

    Raises PeerError if a field has the wrong type.
    """
    extension: _TaskExtension | None = None
    task: _Task
    try:
        if extended:
            task = extended_task = _extended_tasks.decode(text)
            extension = extended_task.shoal
        else:
            task = _tasks.decode(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(validation_error(error)) from error
    if extension is None:
        limit = _token_limit(task.max_new_tokens)
        return Chat(model, _messages(task), limit, task.temperature), "", ""
    limit = _token_limit(extension.max_tokens)
    match extension.kind:
        case JobKind.CHAT:
            converted = extension.messages
            messages = _messages(task) if converted is None else tuple(converted)
            chat = Chat(
                model, messages, limit, extension.temperature, extension.options
            )
            return chat, extension.continues, extension.thoughts
        case JobKind.COMPLETION:
            completion = Completion(
                model, extension.prompt, limit, extension.temperature, extension.options
            )
            return completion, extension.continues, ""
        case JobKind.EMBEDDING | JobKind.RERANK | JobKind.TRANSCRIPTION as kind:
            fields = extension.prompt, extension.inputs, extension.options
            return input_work(kind, model, *fields), "", ""
        case JobKind.TASK | JobKind.CALL | JobKind.CALL_STREAM:
            raise PeerError(f"shoal.kind: a node cannot run {extension.kind.value}")


def to_messages(system: str, messages: Iterable[Mapping[str, JSON]]) -> Messages:
    """Convert the plain fields of a task to messages in OpenAI's format."""
    known = ("assistant", "system")
    converted: list[Mapping[str, JSON]] = [
        {
            "role": message["role"] if message["role"] in known else "user",
            "content": message["content"],
        }
        for message in messages
    ]
    if system:
        converted.insert(0, {"role": "system", "content": system})
    return tuple(converted)


# Private parts, in the order in which they are called.


def _plain_fields(
    work: Inference, max_new_tokens: int, context: int
) -> dict[str, JSON]:
    """Return the fields for every node; only chats are expressed in them."""
    if not isinstance(work, Chat):
        return {"system": "", "messages": [], "max_new_tokens": 1, "temperature": 0}
    system, messages = _plain_conversation(work.messages)
    return {
        "system": system,
        "messages": messages,
        "max_new_tokens": _new_tokens(work, max_new_tokens, context),
        "temperature": _temperature(work.temperature),
    }


def _extension_fields(
    job: RunJob, work: Inference, plain: Mapping[str, Any]
) -> dict[str, JSON]:
    """Return the extension field: what the plain fields cannot express."""
    extension: dict[str, JSON] = {}
    match work:
        case Chat(max_tokens=limit, temperature=temperature):
            extension |= {"max_tokens": limit, "temperature": temperature}
            converted = to_messages(plain["system"], plain["messages"])
            if converted != tuple(work.messages):
                extension["messages"] = work.messages
        case Completion(prompt=prompt, max_tokens=limit, temperature=temperature):
            extension |= {"kind": work.kind.value, "prompt": prompt}
            extension |= {"max_tokens": limit, "temperature": temperature}
        case Embedding() | Rerank() | Transcription():
            extension |= {"kind": work.kind.value, "inputs": inputs_of(work)}
            if prompt := input_prompt(work):
                extension["prompt"] = prompt
    if work.options:
        extension["options"] = work.options
    if job.continues:
        extension["continues"] = job.continues
    if job.thoughts:
        extension["thoughts"] = job.thoughts
    return extension


def _messages(task: "_Task") -> Messages:
    return to_messages(
        task.system or "",
        [
            {"role": "user", "content": message}
            if isinstance(message, str)
            else {"role": message.role, "content": message.content or ""}
            for message in task.messages
        ],
    )


def _plain_conversation(
    messages: Sequence[Mapping[str, JSON]],
) -> tuple[str, list[dict[str, JSON]]]:
    """Split messages into the system text and the other messages, as text."""
    system: list[str] = []
    rest: list[dict[str, JSON]] = []
    for message in messages:
        role = message.get("role")
        if role in ("system", "developer") and not rest:
            system.append(message_text(message))
        else:
            known_role = role if isinstance(role, str) and role else "user"
            rest.append({"role": known_role, "content": message_text(message)})
    return "\n\n".join(system), rest


def _token_limit(limit: float | None) -> int | None:
    # Original servers pass on any number, but engines accept at most 64 bits.
    return None if limit is None else min(max(1, int(limit)), ENGINE_TOKENS_MAX)


def _new_tokens(chat: Chat, max_new_tokens: int, context: int) -> int:
    """Return a token limit with which a real node does not drop the task.

    A node subtracts it from its context; it drops the oldest messages for lack of room,
    but the whole task if the system text does not fit.
    """
    limit = max_new_tokens
    if context:
        texts = [message_text(message) for message in chat.messages]
        size = sum(len(text.encode(errors="replace")) for text in texts)
        prompt = size // BYTES_PER_TOKEN + MESSAGE_TOKENS * len(texts)
        room = context - RESERVED_TOKENS - prompt
        limit = max(room, context // ANSWER_SHARE)
    wanted = max_new_tokens if chat.max_tokens is None else chat.max_tokens
    return max(1, min(wanted, limit, NEW_TOKENS_MAX))


def _temperature(value: float | None) -> float:
    """Return a temperature that is safe for all nodes and prints as in JavaScript."""
    if value is None or math.isnan(value):
        return TEMPERATURE
    if value < TEMPERATURE_MIN:
        return 0
    limited = min(value, TEMPERATURE_MAX)
    return int(limited) if limited == int(limited) else float(limited)


# The default is for mappings other than dict.
_encode = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=dict
).encode


def _dump(value: JSON) -> str:
    return well_formed(_encode(value))
