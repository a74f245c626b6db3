"""Schemas as the real engine obeys them, whatever its model would rather write."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from engines.outputs import ask, chat_of
from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON
from shoal.engines.llama_engine import LlamaEngine

# The tests share an engine, and so its loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")


def asked_for(schema: JSON) -> JSON:
    """Return the response format with a schema."""
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


async def answer_to(llama: LlamaEngine, schema: dict[str, Any]) -> Any:
    """Return what the model writes as the property of an object."""
    wrapped = {
        "type": "object",
        "properties": {"x": schema},
        "required": ["x"],
        "$defs": schema.get("$defs", {}),
    }
    options = {"response_format": asked_for(wrapped)}

    answer = await ask(llama, chat_of("Answer.", max_tokens=100, options=options))

    assert answer.finish_reason == "stop", answer.text
    return json.loads(answer.text)["x"]


@pytest.mark.parametrize(
    "pattern",
    [
        r"^\d{3}$",
        r"^[A-Z]\w{2}\s\S\d?$",
        r"^(\d{1,3}\.){3}\d{1,3}$",
        r'^["\\]{3}$',
        r"^\u0041\u0022?$",
        r"^[😀-😅]{2}é[^a-zA-Z0-9\s]$",
        r"^(a|)b$|^c{3}$",
        "^$",
    ],
)
async def test_string_matches_its_pattern(llama: LlamaEngine, pattern: str) -> None:
    text = await answer_to(llama, {"type": "string", "pattern": pattern})

    assert re.search(pattern, text) is not None, text


A = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "matches"),
    [
        (
            {"type": "string", "pattern": r"^\d+$", "maxLength": 4},
            lambda x: re.fullmatch(r"\d{1,4}", x),
        ),
        ({"format": "ipv4"}, lambda x: re.fullmatch(r"\d+(\.\d+){3}", x)),
        (
            {"type": ["integer", "null"], "exclusiveMinimum": 41, "maximum": 43},
            lambda x: x in (42, 43, None),
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {"const": 1}}}],
                "$defs": {"A": A},
            },
            lambda x: isinstance(x["a"], int) and x.get("b", 1) == 1,
        ),
        ({"type": "object", "anyOf": [A]}, lambda x: isinstance(x["a"], int)),
        (
            {"prefixItems": [{"pattern": "^a$"}, {"enum": [1]}], "items": False},
            lambda x: x == ["a", 1],
        ),
    ],
    ids=["length", "format", "bounds", "allOf", "beside anyOf", "tuple"],
)
async def test_value_matches_its_schema(
    llama: LlamaEngine, schema: dict[str, Any], matches: Callable[[Any], object]
) -> None:
    value = await answer_to(llama, schema)

    assert matches(value), value


async def test_pattern_without_a_grammar_is_an_error(llama: LlamaEngine) -> None:
    options = {"response_format": asked_for({"pattern": "^(?=a)b$"})}

    with pytest.raises(InvalidRequest, match=r"response_format.*schema\.pattern"):
        await ask(llama, chat_of("Answer.", options=options))
