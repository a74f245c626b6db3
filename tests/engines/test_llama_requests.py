"""What llama.cpp's server is given of a job."""

from collections.abc import Mapping

import pytest

from shoal.domain.work import JSON, Chat
from shoal.engines.llama_requests import with_chosen_tools

TOOLS: tuple[JSON, ...] = tuple(
    {"type": "function", "function": {"name": name}} for name in ("f", "g")
)


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        (None, {"tools": TOOLS}),
        ("auto", {"tools": TOOLS, "tool_choice": "auto"}),
        ("required", {"tools": TOOLS, "tool_choice": "required"}),
        (TOOLS[1], {"tools": [TOOLS[1]], "tool_choice": "required"}),
        ("none", {}),
    ],
)
def test_choice_of_a_tool_leaves_it_alone(
    choice: JSON, sent: Mapping[str, object]
) -> None:
    options = {"tools": TOOLS} | ({"tool_choice": choice} if choice else {})
    chat = Chat("m", ({"role": "user", "content": "x"},), options=options)

    assert with_chosen_tools(chat).options == sent
