"""Messages of a chat as engines and their templates take them.

Source: the chat templates of models, which servers fill in.  Many raise an error at a
second system message, and some at one that is not the first, or at a tool's message
that answers no call.
"""

from collections.abc import Iterator, Mapping, Sequence, Set

from shoal.domain.streamed_message import NO_ARGUMENTS, REASONING
from shoal.domain.work import INSTRUCTIONS, JSON, message_text

ROLES = ("system", "user", "assistant", "tool")

SYSTEM = "system messages"
LATE_SYSTEM = "later system messages"
"""What a server may refuse; see ``engine_messages``."""

REASONING_NAMES = REASONING[:2]
"""The names under which engines read the thoughts in a history: llama-server, SGLang
and others read the first, vLLM and Ollama the second, and none minds the other."""

EMPTY_ANSWERS = [{"role": "assistant", "content": each} for each in ("", None)]
"""After these at the end, some servers go on in the template."""

Message = Mapping[str, JSON]


def engine_messages(
    messages: Sequence[Message], refused: Set[str] = frozenset()
) -> list[Message]:
    """Return the messages as an engine takes them that has ``refused`` some.

    Those at the beginning that instruct the model become one.  A later one stays where
    it is; if the engine refuses it, it becomes part of the user's next turn.
    """
    known = list(_with_known_roles(messages))
    if known and known[-1] in EMPTY_ANSWERS:
        del known[-1]
    count = next(
        (at for at, each in enumerate(known) if each.get("role") != "system"),
        len(known),
    )
    first, rest = known[:count], known[count:]
    if len(first) > 1:
        first = [{"role": "system", "content": _joined(first)}]
    if SYSTEM in refused:
        rest, first = first + rest, []
    if not refused.isdisjoint((SYSTEM, LATE_SYSTEM)):
        rest = _in_turns_of_the_user(rest)
    named = "reasoning" not in refused
    return [_with_reasoning(each, named=named) for each in (*first, *rest)]


def refusable_parts(messages: Sequence[Message]) -> set[str]:
    """Return what an engine may refuse of what ``engine_messages`` returned."""
    systems = [at for at, each in enumerate(messages) if each.get("role") == "system"]
    parts = set()
    if systems:
        parts.add(LATE_SYSTEM if systems[-1] else SYSTEM)
    if any(REASONING_NAMES[0] in each for each in messages):
        parts.add("reasoning")
    return parts


def _with_known_roles(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages with roles that engines know.

    Some wires pass on any role.  An engine may refuse those, and a tool's message that
    answers no call: they become the user's, as at the wires' own nodes.
    """
    calls: set[str] = set()
    for message in messages:
        role = message.get("role")
        if role in INSTRUCTIONS:
            yield {**message, "role": "system"}
        elif role == "tool" and str(message.get("tool_call_id")) not in calls:
            yield {"role": "user", "content": message.get("content")}
        elif role in ROLES or role is None:  # without one, the engine refuses it
            made = message.get("tool_calls")
            if not isinstance(made, list | tuple):
                yield message
                continue
            for call in made:
                calls.add(str(call.get("id") if isinstance(call, Mapping) else None))
            yield {**message, "tool_calls": [_with_arguments(call) for call in made]}
        else:
            yield {**message, "role": "user"}


def _with_arguments(call: JSON) -> JSON:
    """Return a call whose arguments an engine can decode, if it has none."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if not isinstance(function, Mapping) or function.get("arguments"):
        return call
    return {**call, "function": {**function, "arguments": NO_ARGUMENTS}}


def _in_turns_of_the_user(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with those of the system in the user's next turn."""
    found: list[Message] = []
    waiting: list[Message] = []
    last = max(
        (at for at, each in enumerate(messages) if each.get("role") == "user"),
        default=-1,
    )
    for at, message in enumerate(messages):
        role = message.get("role")
        if role == "system" and at < last:
            waiting.append(message)
        elif role == "system":
            found.append({**message, "role": "user"})
        elif role == "user" and waiting:
            found.append({**message, "content": _prefixed(message, _joined(waiting))})
            waiting = []
        else:
            found.append(message)
    return found


def _prefixed(message: Message, text: str) -> JSON:
    content = message.get("content")
    if isinstance(content, list | tuple):
        return [{"type": "text", "text": text}, *content]
    return f"{text}\n\n{message_text(message)}"


def _joined(messages: Sequence[Message]) -> str:
    return "\n\n".join(filter(None, map(message_text, messages)))


def _with_reasoning(message: Message, *, named: bool) -> Message:
    """Return the message with its thoughts under all names, or without them."""
    thoughts = message.get(REASONING_NAMES[0])
    if thoughts is None:
        return message
    fields = {name: value for name, value in message.items() if name not in REASONING}
    return {**fields, **dict.fromkeys(REASONING_NAMES, thoughts)} if named else fields
