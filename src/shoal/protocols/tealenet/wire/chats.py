"""Chats as peers that are not ours take them and ask for them.

Source: OpenAI's API reference, "Create chat completion", and what real peers refuse and
drop of it; see ``docs/protocols/tealenet.md``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.domain.work import ANY_MODEL, JSON, Chat, text_of

TOKENS_MAX = 2**31 - 1

TAKEN = (
    *("top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("stop", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
    *("n", "logprobs", "top_logprobs", "reasoning_effort", "verbosity", "user"),
    # Not OpenAI's, but known to most engines.
    *("top_k", "min_p", "repetition_penalty", "repeat_penalty"),
    "chat_template_kwargs",
)
"""Options that are taken from other peers: what else there is may mean anything."""

ASKS_NOTHING: Mapping[str, tuple[JSON, ...]] = {
    "stop": ([], ""),
    "tools": ([],),
    "response_format": ({"type": "text"},),
    "n": (1,),
    "logprobs": (False,),
    "logit_bias": ({},),
}
"""Values of options that are as good as none: a worker need not know the option."""


def chat_request(chat: Chat) -> dict[str, Any]:
    """Return a chat as all real peers take it, without anything that is null."""
    request: dict[str, Any] = {
        name: value
        for name, given in chat.options.items()
        if (value := _OPTIONS.get(name, _as_it_is)(given)) is not None
    }
    if chat.model != ANY_MODEL:
        request["model"] = chat.model
    request["messages"] = [_message(message) for message in chat.messages]
    if chat.max_tokens is not None:
        request["max_tokens"] = min(max(1, chat.max_tokens), TOKENS_MAX)
    if chat.temperature is not None:
        request["temperature"] = chat.temperature
    request["stream"] = True
    request["stream_options"] = {
        **request.get("stream_options", {}),
        "include_usage": True,
    }
    return request


def chat_of(request: Mapping[str, Any]) -> Chat:
    """Return what a plain peer asks for; ``decode`` has looked at the types."""
    limit = request.get("max_completion_tokens") or request.get("max_tokens")
    options = {}
    for name in TAKEN:
        value = request.get(name)
        if value is None or value in ASKS_NOTHING.get(name, ()):
            continue
        whole = isinstance(value, float) and value.is_integer()
        options[name] = int(value) if whole and name in ("n", "seed") else value
    if isinstance(stop := options.get("stop"), str):
        options["stop"] = [stop]
    if "tools" not in options:
        options.pop("tool_choice", None)
        options.pop("parallel_tool_calls", None)
    return Chat(
        model_of(request),
        tuple(_with_content(message) for message in request["messages"]),
        None if limit is None or limit < 0 else int(min(max(1, limit), TOKENS_MAX)),
        request.get("temperature"),
        options,
    )


def model_of(request: Mapping[str, Any]) -> str:
    """Return the model that a request names; ANY_MODEL if it names none."""
    model = request.get("model")
    return model if isinstance(model, str) and model else ANY_MODEL


# Private parts, in the order in which they are called.


def _with_content(message: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return a message with the text that a Mac takes it to have: none is empty."""
    if message.get("content") is None and not message.get("tool_calls"):
        return {**message, "content": ""}
    return message


def _message(message: Mapping[str, JSON]) -> dict[str, Any]:
    """Return a message as a Mac takes it: a text, and no parts unless it has others."""
    told = {name: value for name, value in message.items() if value is not None}
    role = told.get("role")
    if not isinstance(role, str) or not role:
        told["role"] = "user"
    elif role == "developer":  # the newer name of the same role
        told["role"] = "system"
    content = told.get("content")
    if not isinstance(content, str) and not _has_more_than_text(content):
        told["content"] = text_of(message)  # Rust peers must find the key
    for name in ("name", "tool_call_id"):
        if not isinstance(told.get(name), str):
            told.pop(name, None)
    calls = told.pop("tool_calls", None)
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        told["tool_calls"] = [
            {"index": index, **call}  # as Macs have it in messages, too
            for index, call in enumerate(calls)
            if isinstance(call, Mapping)
        ]
    return told


def _has_more_than_text(content: JSON) -> bool:
    return isinstance(content, Sequence) and any(
        isinstance(part, Mapping) and part.get("type") != "text" for part in content
    )


def _as_it_is(value: JSON) -> JSON:
    return value


def _number(value: JSON) -> JSON:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None


def _integer(value: JSON) -> JSON:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: JSON) -> JSON:
    return value if isinstance(value, str) else None


def _texts(value: JSON) -> JSON:
    """A Mac takes no text where it wants several."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Sequence):
        return None
    return [each for each in value if isinstance(each, str)] or None


def _list(value: JSON) -> JSON:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return value if is_list and value else None


def _flags(value: JSON) -> JSON:
    """A Mac takes nothing but booleans among the options of streams."""
    if not isinstance(value, Mapping):
        return None
    return {name: flag for name, flag in value.items() if isinstance(flag, bool)}


def _nothing(value: JSON) -> JSON:
    return None


_OPTIONS: Mapping[str, Callable[[JSON], JSON]] = {
    "top_p": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "seed": _integer,
    "stop": _texts,
    "tools": _list,
    "stream_options": _flags,
    "user": _text,
    "group_id": _text,
    # They are said otherwise.
    "messages": _nothing,
    "model": _nothing,
    "max_tokens": _nothing,
    "temperature": _nothing,
    "stream": _nothing,
}
"""How the options are written that real peers have types for; None: not at all."""
