"""The function tools of a chat, which dialects translate to, with their limits.

Source: OpenAI's API reference, "Create chat completion".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import UNSET, Meta, Raw, UnsetType

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON
from shoal.gateway.http.decoding import (
    OBJECT_MAX,
    decode_object,
    is_given,
    size_of,
)

TOOLS_MAX = 128
CALLS_MAX = 1024  # of one message
CALL_ID_MAX = 256  # characters
FUNCTION_NAME_MAX = 128  # characters

FunctionName = Annotated[str, Meta(min_length=1, max_length=FUNCTION_NAME_MAX)]


@dataclass(frozen=True, slots=True)
class RequestedFunction:
    """A function that a body describes.

    ``parameters`` are a JSON schema; ``path`` is where the body has it.
    """

    name: str
    path: str
    parameters: Raw | UnsetType = UNSET
    description: str | None = None
    strict: bool | None = None


def function_tools(functions: Sequence[RequestedFunction]) -> list[JSON]:
    """Return the option ``tools`` of a chat.

    Raises InvalidRequest if two functions have the same name, or a schema is no object
    or too large.
    """
    if len({each.name for each in functions}) < len(functions):
        raise InvalidRequest("tools: two functions have the same name", "tools")
    if sum(size_of(each.parameters) for each in functions) > OBJECT_MAX:
        raise InvalidRequest(f"tools: more than {OBJECT_MAX} bytes", "tools")
    return [_function_tool(each) for each in functions]


def chosen_tool(name: str) -> Mapping[str, JSON]:
    """Return the option ``tool_choice`` that makes the model call one function."""
    return {"type": "function", "function": {"name": name}}


def check_chosen(name: str, names: Sequence[str]) -> None:
    """Check that a chosen function is among those of the request.

    Raises InvalidRequest.
    """
    if name not in names:
        raise InvalidRequest(f"tool_choice: there is no tool {name!r}", "tool_choice")


def no_tools() -> InvalidRequest:
    """Return the error for a choice of tools in a request without any."""
    return InvalidRequest("tool_choice: there are no tools", "tool_choice")


def _function_tool(given: RequestedFunction) -> Mapping[str, JSON]:
    function: dict[str, JSON] = {"name": given.name}
    if given.description is not None:
        function["description"] = given.description
    if is_given(given.parameters):
        function["parameters"] = decode_object(given.parameters, given.path)
    if given.strict is not None:
        function["strict"] = given.strict
    return {"type": "function", "function": function}
