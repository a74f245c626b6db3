"""How a job becomes the request of an engine."""

import json
from collections.abc import Mapping

import pytest

from shoal.domain.work import JSON, Chat
from shoal.engines.requests import openai_request, with_chosen_tools


def test_options_cannot_override_the_chat() -> None:
    options = {"n_predict": 9, "stream": False, "top_k": 3}
    chat = Chat("m", ({"role": "user", "content": "x"},), None, 0.0, options)

    assert json.loads(openai_request(chat, "m").body) == {
        "messages": [{"role": "user", "content": "x"}],
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "top_k": 3,
    }


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
