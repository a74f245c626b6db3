"""GrandSage's messages: frames of text, stops, and tasks.

A task is a chat as one JSON text, which the server encodes and the node decodes.

Source: the WebSocket protocol document between API server and node, exchanges recorded
with real servers and nodes, and what real nodes survive; see
``docs/protocols/grandsage.md``.  All functions are pure.
"""

import json
import math
import re
import struct
import sys
from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from shoal.domain.errors import PeerError, Unsupported
from shoal.domain.vocabulary import RunJob
from shoal.domain.work import JSON, Chat, message_text
from shoal.protocols.seam.document_fields import Undocumented
from shoal.protocols.seam.json_text import well_formed

TASK_ID = struct.Struct(">I")  # the document says Int32BE; real peers decode unsigned
FRAME_MAX = 1 << 20  # bytes; every binary frame is smaller
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

KNOWN_ROLES = ("assistant", "system")  # any other is the user's

TaskId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-_MAX, le=_MAX)]


# Binary frames, node to server.


def encode_text(task_id: int, text: str) -> list[bytes]:
    """Encode generated text as frames smaller than ``FRAME_MAX`` bytes.

    Empty text yields no frame: an id alone means that the task is finished.
    """
    head = TASK_ID.pack(task_id)
    data = well_formed(text).encode()
    if len(head) + len(data) < FRAME_MAX:
        return [head + data] if data else []
    step = FRAME_MAX // 4 - len(head)  # a character takes four bytes at most
    pieces = (text[at : at + step] for at in range(0, len(text), step))
    return [head + well_formed(piece).encode() for piece in pieces]


def encode_end(task_id: int) -> bytes:
    """Encode the end of a task: its id alone."""
    return TASK_ID.pack(task_id)


def decode_frame(data: bytes) -> tuple[str, bytes]:
    """Decode the next bytes of a task; return the text and an incomplete character.

    Invalid bytes become U+FFFD; a byte order mark is kept.  The caller prepends the
    returned bytes, at most three, to the next piece.
    """
    text, used = utf_8_decode(data, "replace", False)
    return text, data[used:]


# Text frames, server to node.


def encode_stop(task_id: int) -> str:
    """Encode a stop of a task; the document omits this message."""
    return f'{{"id":{task_id},"stop":true}}'


def encode_task(
    task_id: int, job: RunJob, *, created_at: int, max_new_tokens: int, context: int = 0
) -> str:
    """Encode a task, with its fields in the original server's order.

    Args:
        created_at: seconds since the epoch.
        max_new_tokens: highest token limit, and that of jobs without one.
        context: of the node's model, in tokens, which limits the answer instead; 0:
            unknown.

    Raises Unsupported for what a node cannot do.
    """
    chat = job.work
    if not isinstance(chat, Chat) or job.continues:
        raise Unsupported("a node can only chat, from the start")
    system, messages = _plain_conversation(chat.messages)
    return _dump(
        {
            "state": 0,
            "id": task_id,
            "resp": "",
            "modLastCheckedPos": 0,
            "system": system,
            "messages": messages,
            "max_new_tokens": _new_tokens(chat, max_new_tokens, context),
            "temperature": _temperature(chat.temperature),
            "created_at": created_at,
            # The original sends the user's record to every node.  No node reads it.
            "user": {"token": "-", "name": "-"},
        }
    )


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


class _Task(msgspec.Struct, frozen=True):
    # The example in the document has strings as messages.
    messages: list[str | _Message]
    system: str | None = ""
    max_new_tokens: int | _Finite | None = None
    temperature: _Finite | None = None


_heads = msgspec.json.Decoder(TaskHead)
_tasks = msgspec.json.Decoder(_Task)


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
        raise PeerError(f"no task: {_validation_error(error)}") from error
    return head, text


def decode_work(text: str, model: str) -> Chat:
    """Return the work of a task.

    The system message and the limits are optional.  A token limit below 1 means 1, as
    in one of the real nodes.  ``system`` is the first message.

    Raises PeerError if a field has the wrong type.
    """
    try:
        task = _tasks.decode(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(_validation_error(error)) from error
    messages = [
        _Message(content=each) if isinstance(each, str) else each
        for each in task.messages
    ]
    conversation = [
        {
            "role": each.role if each.role in KNOWN_ROLES else "user",
            "content": each.content or "",
        }
        for each in messages
    ]
    if task.system:
        conversation.insert(0, {"role": "system", "content": task.system})
    limit = _token_limit(task.max_new_tokens)
    return Chat(model, tuple(conversation), limit, task.temperature)


# Private parts, in the order in which they are called.


def _validation_error(error: Exception) -> str:
    """Describe the error in a JSON text without quoting from it."""
    if isinstance(error, msgspec.ValidationError):
        return str(error)
    return "nested too deeply" if isinstance(error, RecursionError) else "not JSON"


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
