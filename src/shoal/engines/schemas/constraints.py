"""The constraints of JSON schemas, and how two schemas become one.

Source: JSON Schema, 2020-12.
"""

from collections.abc import Mapping, Sequence, Set
from typing import TypeAlias, TypeGuard

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON

Schema: TypeAlias = Mapping[str, JSON]

KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "object": (
        *("properties", "required", "additionalProperties"),
        *("minProperties", "maxProperties"),
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": (
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        "multipleOf",
    ),
}
"""Constraints by the type of the values that they are about."""

TYPED = frozenset(word for words in KEYWORDS.values() for word in words)
COMBINING = ("$ref", "oneOf", "anyOf", "allOf", "enum", "const")
CONSTRAINTS = TYPED | {"type", *COMBINING}


def merged(schema: JSON, other: JSON, at: str) -> JSON:
    """Return a schema whose values match both.

    Raises InvalidRequest for constraints of both that cannot be joined.
    """
    if other is True:
        return schema
    if not isinstance(schema, Mapping) or not isinstance(other, Mapping):
        return other
    constraints = CONSTRAINTS & schema.keys()
    if "$ref" in schema or ("$ref" in other and constraints - {"type"}):
        raise refusal(f"{at}.$ref", "it is beside other constraints")
    merged = {**schema}
    for name, value in other.items():
        before = merged.get(name)
        if name not in CONSTRAINTS or name not in merged or before == value:
            merged[name] = value
        elif name == "required" and is_list(before) and is_list(value):
            merged[name] = [*before, *value]
        elif name == "properties" and (joined := _joined(before, value)) is not None:
            merged[name] = joined
        else:
            raise refusal(f"{at}.{name}", "it is also given beside it")
    for one, another in ((schema, other), (other, schema)):
        if one.get("additionalProperties", True) is not True and (
            _names(another) - _names(one)
        ):
            raise refusal(f"{at}.properties", "additionalProperties excludes them")
    return merged


def _joined(one: JSON, other: JSON) -> Schema | None:
    """Return the properties of both; None if one has two schemas."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return None
    if any(one[name] != other[name] for name in one.keys() & other.keys()):
        return None
    return {**one, **other}


def _names(schema: Schema) -> Set[str]:
    properties = schema.get("properties")
    return properties.keys() if isinstance(properties, Mapping) else set()


def split(schema: Schema, keyword: str) -> tuple[dict[str, JSON], dict[str, JSON]]:
    """Return the constraints beside a keyword, and the rest of the schema."""
    beside = {name: schema[name] for name in schema if name in CONSTRAINTS}
    rest = {name: schema[name] for name in schema if name not in CONSTRAINTS}
    beside.pop(keyword)
    return beside, rest


def about(type_: JSON, schema: Schema) -> dict[str, JSON]:
    """Return the constraints that are about values of a type."""
    key = "number" if type_ == "integer" else str(type_)
    return {name: schema[name] for name in KEYWORDS.get(key, ()) if name in schema}


def implied_type(schema: Schema) -> JSON:
    """Return the type of the values that constraints are about; None: any."""
    for type_, keywords in KEYWORDS.items():
        if not schema.keys().isdisjoint(keywords):
            return type_
    return None


def is_list(value: JSON) -> TypeGuard[Sequence[JSON]]:
    """Say whether a value is a list."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def is_reference(schema: JSON) -> TypeGuard[Schema]:
    """Say whether a schema stands elsewhere."""
    return isinstance(schema, Mapping) and "$ref" in schema


def refusal(at: str, reason: str = "") -> InvalidRequest:
    """Return the error for a part that llama.cpp would ignore."""
    detail = f": {reason}" if reason else ""
    text = f"{at}: the embedded engine cannot obey it{detail}"
    return InvalidRequest(text, at.partition(".")[0])
