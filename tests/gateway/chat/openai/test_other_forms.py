"""Chat requests in the forms of other servers than OpenAI's."""

import json
from typing import Any

import pytest

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import Chat, Feature
from shoal.gateway.chat.openai.chat_request import decode_chat_request


def decode(*messages: dict[str, Any], **more: Any) -> Chat:
    given = messages or ({"role": "user", "content": "hi"},)
    body = {"model": "m", "messages": given, **more}
    return decode_chat_request(json.dumps(body).encode()).work


@pytest.mark.parametrize(
    ("fields", "thoughts"),
    [
        ({"reasoning_content": "because"}, "because"),
        ({"reasoning": "because"}, "because"),
        ({"reasoning": "because", "reasoning_content": None}, "because"),
        ({"reasoning": "because", "reasoning_content": "because"}, "because"),
        ({"reasoning": None}, None),
        ({"reasoning": {"effort": "low"}}, None),
        ({}, None),
    ],
)
def test_thoughts_in_a_history_have_one_name(
    fields: dict[str, Any], thoughts: str | None
) -> None:
    (message,) = decode({"role": "assistant", "content": "a", **fields}).messages

    assert message.get("reasoning_content") == thoughts
    assert "reasoning" not in message


def test_json_object_with_a_schema_is_a_json_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    work = decode(response_format={"type": "json_object", "schema": schema})

    assert work.options["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema},
        "schema": schema,
    }
    assert work.needs == {Feature.SCHEMA}


def test_json_object_without_a_schema_stays_one() -> None:
    for schema in ({}, {"schema": None}):
        work = decode(response_format={"type": "json_object", **schema})

        assert work.options["response_format"] == {"type": "json_object"}


def test_schema_that_is_no_object_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        decode(response_format={"type": "json_object", "schema": [1]})

    assert refusal.value.field == "response_format.schema"
