"""Reads the fields of a streamed message, which servers name and form differently.

Source: OpenAI's API reference, "The chat completion chunk object"; the APIs of vLLM,
SGLang, Ollama, llama-server, OpenRouter and Mistral.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from shoal.domain import tool_calls
from shoal.domain.json_limits import is_too_deep
from shoal.domain.work import JSON

REASONING = (
    *("reasoning_content", "reasoning", "thinking", "reasoning_text"),
    "reasoning_details",
)
"""Names of the model's thoughts; ``Delta`` has the first.  A server may send the same
text under several."""

NO_ARGUMENTS = "{}"
"""The arguments of a call without any; some servers, and programs, send no text."""

_LISTS = (list, tuple)
_MAPPINGS = (dict, Mapping)  # nearly all are of the first, which is known sooner


class MessageReader:
    """Reads the fields of one choice; the results are as ``Delta`` has them.

    The first piece of a call has its id and its name, in whatever order they come.
    ``new_id`` returns the id of a call without one of its own.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._calls = tool_calls.CallAssembler()
        self._numbers: dict[int, int] = {}  # of the calls that began, by their slots
        self._ids: set[str] = set()

    @property
    def has_calls(self) -> bool:
        """Whether any call began."""
        return bool(self._numbers)

    @property
    def nameless_arguments(self) -> str:
        """The arguments of calls whose function was never named."""
        drafts = self._calls.drafts
        return "".join(draft.arguments for draft in drafts if not draft.name)

    def read(self, fields: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """Return the fields of a piece, without empty ones.

        What is no text, no call and no thought, and has another form than it should, is
        left out.

        Raises ValueError if calls cannot be understood.
        """
        if len(fields) == 1:
            thought = fields.get(REASONING[0])
            if thought and isinstance(thought, str):
                return fields  # the hot path of thoughts
        found: dict[str, JSON] = {}
        thoughts: dict[str, str] = {}
        calls: JSON = None
        for name, value in fields.items():
            if value is None or value in ("", []) or name == "role":
                continue
            if name == "content":
                for field, text in _content_texts(value):
                    if text:
                        found[field] = f"{found.get(field, '')}{text}"
            elif name in REASONING:
                thoughts[name] = "".join(text for _, text in _texts_in(value))
            elif name == "refusal":
                if text := "".join(text for _, text in _texts_in(value)):
                    found[name] = text
            elif name == "tool_calls":
                calls = value
            elif name == "function_call":  # OpenAI's older form of a single call
                calls = calls or {"function": value}
            elif not is_too_deep(value):
                found[name] = value
        for name in REASONING if thoughts else ():
            if thoughts.get(name):
                found[REASONING[0]] = thoughts[name]
                break
        if calls and (pieces := self._read_calls(calls)):
            found["tool_calls"] = pieces
        return found

    def complete_calls(self, fields: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """Return the last fields with arguments for the calls that have none so far.

        Programs decode them as JSON, which an empty text is not.
        """
        calls = [each for each in self._calls.drafts if each.name]
        empty = [each for each in calls if not each.arguments.strip()]
        if not empty:
            return fields
        for draft in empty:
            draft.texts.append(NO_ARGUMENTS)
        begun = fields.get("tool_calls")
        pieces = [*begun] if isinstance(begun, _LISTS) else []
        pieces += [self._piece(draft, NO_ARGUMENTS) for draft in empty]
        return {**fields, "tool_calls": pieces}

    def _read_calls(self, calls: JSON) -> list[JSON]:
        if isinstance(calls, _MAPPINGS):
            calls = [calls]
        if not isinstance(calls, _LISTS):
            raise ValueError(f"a {type(calls).__name__} for tool calls")
        for call in calls:
            if not (call is None or isinstance(call, _MAPPINGS)):
                raise ValueError(f"a {type(call).__name__} for a tool call")
        found: list[JSON] = []
        for draft, text in self._calls.add(calls):
            if (piece := self._piece(draft, text)) is not None:
                found.append(piece)
        if self._calls.overflowed:
            raise ValueError(f"more than {tool_calls.CALLS_MAX} tool calls")
        return found

    def _piece(self, draft: tool_calls.CallDraft, text: str) -> JSON:
        """Return the piece of a call that can be passed on now; None: nothing yet."""
        number = self._numbers.get(draft.slot)
        if number is not None:
            function: JSON = {"arguments": text}
            return {"index": number, "function": function} if text else None
        if not draft.name:
            return None
        number = self._numbers[draft.slot] = len(self._numbers)
        call_id = draft.id
        if not call_id or call_id in self._ids:  # clients distinguish calls by it
            call_id = self._new_id()
        self._ids.add(call_id)
        function = {"name": draft.name, "arguments": draft.arguments}
        return {
            "index": number,
            "id": call_id,
            "type": "function",
            "function": function,
        }


def _content_texts(value: JSON) -> Sequence[tuple[str, str]]:
    """Return the texts of a content; a JSON value that a server has parsed is text."""
    if isinstance(value, str):
        return (("content", value),)
    parts = value if isinstance(value, _LISTS) else (value,)
    typed = any(isinstance(part, _MAPPINGS) and "type" in part for part in parts)
    is_value = isinstance(value, _MAPPINGS) and len(value) > 1 and not typed
    texts = () if is_value else tuple(_texts_in(value))
    if texts or typed or value is False:
        return texts
    return (("content", tool_calls.json_text(value)),)


TEXT_NAMES = ("text", "content", "value", "summary")


def _texts_in(value: JSON) -> Iterator[tuple[str, str]]:
    """Yield the texts in a value, each with the field of a message that it belongs to.

    A value is a text, a part with texts, or a list of these.
    """
    if isinstance(value, str):
        yield "content", value
    elif isinstance(value, _MAPPINGS):
        kind = str(value.get("type"))
        is_thought = "thinking" in kind or "reasoning" in kind
        for field, names in (
            (REASONING[0], REASONING),
            (REASONING[0] if is_thought else "content", TEXT_NAMES),
            ("refusal", ("refusal",)),
        ):
            texts = (tuple(_texts_in(value.get(name))) for name in names)
            for inner, text in next(filter(None, texts), ()):
                yield (field if inner == "content" else inner), text
    elif isinstance(value, _LISTS):
        for each in value:
            yield from _texts_in(each)
