"""How a job becomes the request of an engine."""

import json
from typing import Any

import pytest

from shoal.domain.work import Chat
from shoal.engines.requests import llama_request, openai_request

ANSWER = {"role": "tool", "content": "4", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    ("message", "role"),
    [
        *(({"role": role, "content": "x"}, role) for role in ("system", "user")),
        ({"role": "assistant", "content": "x"}, "assistant"),
        ({"role": "Boss", "content": "x"}, "user"),
        ({"role": "tool", "content": "x"}, "user"),
        (ANSWER, "tool"),
    ],
)
def test_a_role_that_engines_may_refuse_becomes_the_users(
    message: dict[str, Any], role: str
) -> None:
    chat = Chat("m", (message,))

    (sent,) = json.loads(openai_request(chat, "m").body)["messages"]
    (embedded,) = llama_request(chat)["messages"]

    assert sent == {**message, "role": role}
    assert embedded == sent
