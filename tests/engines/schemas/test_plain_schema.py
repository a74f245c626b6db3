"""Schemas for llama.cpp: what it would ignore is written in another way, or refused."""

from typing import Any

import pytest

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import Chat, Feature
from shoal.engines.llama_engine import plain_message, plain_work
from shoal.engines.schemas.plain_schema import plain_schema

TEXT = {"type": "string"}
NUMBER = {"type": "integer"}
A = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}
CLOSED_A = A | {"additionalProperties": False}
CLOSED_B = {
    "type": "object",
    "properties": {"b": TEXT},
    "additionalProperties": False,
}
JOINED = {"$defs": {"A": CLOSED_A}, "allOf": [{"$ref": "#/$defs/A"}, CLOSED_B]}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        TEXT | {"description": "a text", "title": "Text", "default": "a"},
        {"type": "object"},
        {"type": "object", "additionalProperties": TEXT},
        {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
        {"enum": ["a", 1, None]},
        {"const": {"a": 1}},
        TEXT | {"minLength": 1, "maxLength": 3},
        TEXT | {"format": "date-time"},
        NUMBER | {"minimum": 1, "maximum": 3},
        {"anyOf": [TEXT, {"type": "null"}]},
        {"$ref": "#/$defs/A", "$defs": {"A": CLOSED_A}},
        {"type": "number"},
        {"type": "no such type"},
        7,
    ],
    ids=str,
)
def test_what_llama_cpp_obeys_is_unchanged(schema: Any) -> None:
    assert plain_schema(schema, "s") == schema


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        (True, {}),
        (TEXT | {"pattern": r"^\d{3}$"}, TEXT | {"pattern": "^[0-9]{3,3}$"}),
        (
            TEXT | {"pattern": "^[a-z]*$", "maxLength": 5},
            TEXT | {"pattern": "^[a-z]{0,5}$"},
        ),
        ({"pattern": "^a$"}, TEXT | {"pattern": "^[a]$"}),
        ({"minLength": 1}, TEXT | {"minLength": 1}),
        (TEXT | {"format": "uuid", "minLength": 36}, TEXT | {"format": "uuid"}),
        (TEXT | {"format": "password"}, TEXT),
        ({"type": "integer", "format": "int64"}, NUMBER),
        (NUMBER | {"exclusiveMinimum": 0}, NUMBER | {"minimum": 1}),
        (
            NUMBER | {"minimum": 1, "exclusiveMinimum": 3, "exclusiveMaximum": 9.5},
            NUMBER | {"minimum": 4, "maximum": 9},
        ),
        (NUMBER | {"maximum": 2**64 - 1, "multipleOf": 1}, NUMBER),
        (
            {"type": ["string", "null"], "pattern": "^a$", "title": "T"},
            {"title": "T", "anyOf": [TEXT | {"pattern": "^[a]$"}, {"type": "null"}]},
        ),
        ({"type": ["string", "null"], "enum": ["a", None]}, {"enum": ["a", None]}),
        (A, CLOSED_A),
        (A | {"unevaluatedProperties": False}, CLOSED_A),
        (A | {"minProperties": 1, "maxProperties": 3}, CLOSED_A),
        (
            CLOSED_A | {"minProperties": 1, "maxProperties": 1},
            CLOSED_A,
        ),
        (
            {"type": "object", "required": ["a"]},
            {
                "type": "object",
                "required": ["a"],
                "properties": {"a": {}},
                "additionalProperties": True,
            },
        ),
        (
            {"properties": {"a": {"pattern": "^a$"}}, "patternProperties": {}},
            {
                "type": "object",
                "properties": {"a": TEXT | {"pattern": "^[a]$"}},
                "additionalProperties": False,
            },
        ),
        (
            {"type": "array", "prefixItems": [TEXT, True], "items": False},
            {"type": "array", "prefixItems": [TEXT, {}]},
        ),
        (
            {"type": "array", "items": [TEXT], "minItems": 1, "maxItems": 1},
            {"type": "array", "prefixItems": [TEXT]},
        ),
        (
            {"type": "array", "items": {"pattern": "^a$"}, "uniqueItems": False},
            {"type": "array", "items": TEXT | {"pattern": "^[a]$"}},
        ),
        # What is beside others would be ignored.
        (
            {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]},
            {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"a": {}},
                        "required": ["a"],
                        "additionalProperties": False,
                    }
                ]
            },
        ),
        (
            {"type": "object", "oneOf": [A, True]},
            {"oneOf": [CLOSED_A, {"type": "object"}]},
        ),
        ({"allOf": [TEXT, {"maxLength": 3}]}, TEXT | {"maxLength": 3}),
        (
            {"allOf": [A, {"properties": {"b": TEXT}, "required": ["b"]}]},
            {
                "type": "object",
                "properties": {"a": TEXT, "b": TEXT},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        ),
        (
            {"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}, "title": "T"},
            {"$ref": "#/$defs/A", "$defs": {"A": CLOSED_A}, "title": "T"},
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/A"}],
                "properties": {"b": TEXT},
                "$defs": {"A": A},
            },
            JOINED,
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": TEXT}}],
                "type": "object",
                "$defs": {"A": A},
            },
            JOINED,
        ),
    ],
    ids=str,
)
def test_what_it_would_ignore_is_written_in_another_way(
    schema: Any, plain: Any
) -> None:
    assert plain_schema(schema, "s") == plain


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        (TEXT | {"pattern": r"(?=a)"}, r"s\.pattern: .*\(\?=a"),
        (TEXT | {"pattern": "^a$", "format": "date"}, r"s\.pattern: .*format date"),
        (TEXT | {"pattern": "^a*b*$", "maxLength": 3}, r"s\.pattern: .*maxLength"),
        (TEXT | {"format": "regex"}, r"s\.format: .*regex"),
        (TEXT | {"format": "date", "maxLength": 5}, r"s\.format: .*maxLength"),
        (TEXT | {"pattern": "^a$", "minLength": "1"}, r"s\.minLength: .*a number"),
        ({"type": "number", "minimum": 0}, r"s\.minimum: .*integers"),
        ({"minimum": 0}, r"s\.minimum: .*integers"),
        ({"type": ["null", "number"], "multipleOf": 2}, r"s\.multipleOf"),
        (NUMBER | {"multipleOf": 2}, r"s\.multipleOf"),
        (NUMBER | {"minimum": 1, "exclusiveMinimum": True}, r"s\.exclusiveMinimum"),
        (NUMBER | {"maximum": "9"}, r"s\.maximum: .*a number"),
        ({"patternProperties": {"^a": {}}}, r"s\.patternProperties"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, r"s\.propertyNames"),
        ({"type": "object", "minProperties": 1}, r"s\.minProperties"),
        ({"type": "object", "maxProperties": 1}, r"s\.maxProperties"),
        ({"type": "array", "uniqueItems": True}, r"s\.uniqueItems"),
        ({"type": "array", "contains": {}}, r"s\.contains"),
        ({"prefixItems": [TEXT], "items": [TEXT]}, r"s\.prefixItems"),
        ({"prefixItems": [TEXT], "minItems": 2}, r"s\.prefixItems: .*minItems"),
        ({"not": {"type": "string"}}, r"s\.not"),
        ({"if": {}, "then": {}}, r"s\.if"),
        ({"dependentRequired": {"a": ["b"]}}, r"s\.dependentRequired"),
        ({"$ref": "#/$defs/A", "minLength": 1}, r"s\.minLength: .*\$ref"),
        (
            {"minLength": 1, "anyOf": [{"$ref": "#/$defs/A"}]},
            r"s\.anyOf\[0\]\.\$ref",
        ),
        ({"minLength": 1, "anyOf": [{"minLength": 2}]}, r"s\.anyOf\[0\]\.minLength"),
        (
            {"additionalProperties": False, "anyOf": [A]},
            r"s\.anyOf\[0\]\.properties: .*additionalProperties",
        ),
        (
            {"allOf": [{"$ref": "#/$defs/A"}, TEXT], "$defs": {"A": A}},
            r"s\.allOf\[1\]: .*no object",
        ),
        (
            {"allOf": [{"$ref": "#/$defs/A"}, A], "$defs": {"A": A}},
            r"s\.allOf\[1\]: .*same property",
        ),
        ({"allOf": [{"$ref": "#/$defs/B"}, A]}, r"s\.allOf\[0\]: .*no object"),
        (
            {"properties": {"a": {"items": {"pattern": r"\b"}}}},
            r"s\.properties\.a\.items\.pattern",
        ),
        ({"$defs": {"A": {"not": {}}}}, r"s\.\$defs\.A\.not"),
        ({"additionalProperties": {"not": {}}}, r"s\.additionalProperties\.not"),
    ],
    ids=str,
)
def test_what_has_no_grammar_is_refused_by_name(schema: Any, part: str) -> None:
    with pytest.raises(InvalidRequest, match=part) as caught:
        plain_schema(schema, "s")

    assert caught.value.field == "s"


# In requests.

BAD = {"type": "string", "pattern": r"\b"}


def asked(**options: Any) -> Any:
    chat = Chat("m", ({"role": "user", "content": "hi"},), options=options)
    return plain_work(chat, {Feature.TOOLS, Feature.SCHEMA})


@pytest.mark.parametrize(
    ("form", "path"),
    [
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD}},
            r"response_format\.json_schema\.schema\.pattern",
        ),
        ({"type": "json_object", "schema": BAD}, r"response_format\.schema\.pattern"),
    ],
)
def test_format_that_cannot_be_obeyed_is_refused(form: Any, path: str) -> None:
    with pytest.raises(InvalidRequest, match=path) as caught:
        asked(response_format=form)

    assert caught.value.field == "response_format"


@pytest.mark.parametrize("form", [{}, [], ["date"], None, 1])
def test_format_that_is_no_text_is_a_remark(form: Any) -> None:
    assert plain_schema(TEXT | {"format": form}, "schema") == TEXT


@pytest.mark.parametrize("kind", [{}, ["text"], None, 1, "video"])
def test_part_that_no_model_reads_is_refused(kind: Any) -> None:
    with pytest.raises(InvalidRequest, match="no model reads"):
        plain_message({"role": "user", "content": [{"type": kind, "text": "x"}]})


def test_only_strict_tools_have_to_be_obeyed() -> None:
    function = {"name": "f", "parameters": BAD}
    lenient = [{"type": "function", "function": function}]
    strict = [{"type": "function", "function": function | {"strict": True}}]

    assert asked(tools=lenient).options["tools"] == lenient
    with pytest.raises(
        InvalidRequest, match=r"tools\[0\]\.function\.parameters\.pattern"
    ):
        asked(tools=strict)


def test_formats_and_tools_without_schemas_are_unchanged() -> None:
    options: dict[str, Any] = {
        "response_format": {"type": "json_object"},
        "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
    }

    assert asked(**options).options == options
