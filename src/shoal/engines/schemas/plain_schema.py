"""Adapts JSON schemas to what llama.cpp makes grammars of, or refuses them.

llama.cpp leaves constraints out that it has no grammar for, without an error.  Here,
what it would leave out is written in another way, or is an error that names it.  Values
of an adapted schema are also of the given one; some of that one may be missing.

Sources: JSON Schema, 2020-12; llama.cpp's ``common/json-schema.cpp``.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON
from shoal.engines.schemas.pattern_syntax import UnsupportedPattern
from shoal.engines.schemas.patterns import translate_pattern

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


UNSUPPORTED: Mapping[str, tuple[JSON, ...]] = {
    "patternProperties": ({},),
    "propertyNames": ({}, True),
    "uniqueItems": (False,),
    "contains": (),
    "not": (),
    **dict.fromkeys(("if", "then", "else"), ()),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    # An object has no other properties anyway, and a tuple no other items.
    "unevaluatedProperties": (True, False),
    "unevaluatedItems": (True, False),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
"""Constraints without a grammar, with the values that demand nothing."""

DEFINITIONS = ("$defs", "definitions")

BOUND_MAX = 10**15  # numbers in grammars have at most 16 digits


_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_LOCAL = "[A-Za-z0-9_+-]+"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_GROUP = "[0-9A-Fa-f]{1,4}"
_SHORTENED = [f"({_GROUP}:){{1,{n}}}(:{_GROUP}){{1,{7 - n}}}" for n in range(1, 7)]
_IPV6 = [
    f"({_GROUP}:){{7}}{_GROUP}",
    *_SHORTENED,
    f"({_GROUP}:){{1,7}}:",
    f":(:{_GROUP}){{1,7}}",
    "::",
]
_MINUTES = r"\d+M(\d+S)?"
_TIME = rf"T(\d+H({_MINUTES})?|{_MINUTES}|\d+S)"
_DAYS = r"\d+M(\d+D)?"
_DATE = rf"(\d+Y({_DAYS})?|{_DAYS}|\d+D)"

FORMAT_PATTERNS: Mapping[str, str] = {
    "email": rf"^{_LOCAL}(\.{_LOCAL})*@{_LABEL}(\.{_LABEL})+$",
    "hostname": rf"^{_LABEL}(\.{_LABEL})*$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
    "ipv6": f"^({'|'.join(_IPV6)})$",
    "uri": r"^[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:/?#@!$&'()*+,;=-]|%[0-9A-F]{2})+$",
    "duration": rf"^P({_DATE}({_TIME})?|{_TIME}|\d+W)$",
}
"""The formats that llama.cpp does not know."""

FORMAT_LENGTHS: Mapping[str, tuple[int, int]] = {
    "date": (10, 10),
    "time": (9, 18),
    "date-time": (20, 29),
    **dict.fromkeys(("uuid", *(f"uuid{n}" for n in range(1, 6))), (36, 36)),
}
"""The formats that llama.cpp knows, with the least and the most characters of each."""

UNSUPPORTED_FORMATS = frozenset(
    {
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    }
)
"""The other formats that JSON Schema defines."""

FORMATS = UNSUPPORTED_FORMATS | FORMAT_PATTERNS.keys() | FORMAT_LENGTHS.keys()
"""All formats that mean something; any other is only a remark."""


def plain_schema(schema: JSON, path: str) -> JSON:
    """Return a schema that llama.cpp obeys in all its parts.

    ``path`` is where the request has it.

    Raises InvalidRequest naming a part that it would ignore.
    """
    return _Adapter(schema).adapt(schema, path)


@dataclass(frozen=True, slots=True)
class _Adapter:
    """Adapts the parts of one schema; ``root`` is the whole."""

    root: JSON

    def adapt(self, schema: JSON, at: str) -> JSON:
        """Return the adapted schema; llama.cpp refuses what is none."""
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            return schema
        for keyword, neutral in UNSUPPORTED.items():
            if keyword in schema and schema[keyword] not in neutral:
                raise refusal(f"{at}.{keyword}")
        found = {name: schema[name] for name in schema if name not in UNSUPPORTED}
        if str(found.get("format")) not in FORMATS:
            found.pop("format", None)
        for name in DEFINITIONS:
            if isinstance(parts := found.get(name), Mapping):
                found[name] = self._adapt_all(parts, f"{at}.{name}")
        if "$ref" in found:
            for other in (CONSTRAINTS & found.keys()) - {"$ref", "type"}:
                raise refusal(f"{at}.{other}", "it is beside $ref")
            return found
        for keyword in ("oneOf", "anyOf"):
            if keyword in found:
                return self._alternatives(found, keyword, at)
        if "allOf" in found:
            return self._all_of(found, at)
        if "enum" in found or "const" in found:
            return {name: found[name] for name in found if name != "type"}
        return self._typed(found, at)

    def _adapt_all(self, parts: Schema, at: str) -> Schema:
        return {name: self.adapt(each, f"{at}.{name}") for name, each in parts.items()}

    # Schemas that are combined of others.

    def _alternatives(self, schema: Schema, keyword: str, at: str) -> Schema:
        """Move what is beside the alternatives into each, as it would be ignored."""
        branches = schema[keyword]
        if not is_list(branches):
            return schema
        beside, remarks = split(schema, keyword)
        paths = [f"{at}.{keyword}[{index}]" for index in range(len(branches))]
        return remarks | {
            keyword: [
                self.adapt(merged(beside, branch, path), path)
                for branch, path in zip(branches, paths, strict=True)
            ]
        }

    def _all_of(self, schema: Schema, at: str) -> JSON:
        parts = schema["allOf"]
        if not is_list(parts):
            return schema
        beside, remarks = split(schema, "allOf")
        at = f"{at}.allOf"
        refers = any(map(is_reference, parts))
        if not refers or beside.keys() - {"type"}:
            parts = [*parts, beside]
        if refers and len(parts) > 1:
            return remarks | {"allOf": self._objects(parts, at)}
        whole: JSON = remarks
        for index, part in enumerate(parts):
            whole = merged(whole, part, f"{at}[{index}]")
        return self.adapt(whole, at)

    def _objects(self, parts: Sequence[JSON], at: str) -> Sequence[JSON]:
        """Adapt schemas of objects with different properties, which llama.cpp joins."""
        names: set[str] = set()
        for index, part in enumerate(parts):
            target = self._target(part)
            properties = target.get("properties") if target is not None else None
            if target is None or not isinstance(properties, Mapping):
                raise refusal(f"{at}[{index}]", "it describes no object")
            if CONSTRAINTS & target.keys() - {"type", *KEYWORDS["object"]}:
                raise refusal(f"{at}[{index}]", "it describes more than an object")
            if names & properties.keys():
                raise refusal(f"{at}[{index}]", "another has the same property")
            names |= properties.keys()
        return [self.adapt(part, f"{at}[{index}]") for index, part in enumerate(parts)]

    def _target(self, schema: JSON) -> Schema | None:
        """Return the schema that a reference leads to, or the schema itself."""
        if not is_reference(schema):
            return schema if isinstance(schema, Mapping) else None
        found: JSON = self.root
        for name in str(schema["$ref"]).split("/")[1:]:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) and "$ref" not in found else None

    # Schemas of one type.

    def _typed(self, schema: Schema, at: str) -> JSON:
        types = schema.get("type", implied_type(schema))
        if is_list(types):
            beside, remarks = split(schema, "type")
            branches = [
                self._typed(about(each, beside) | {"type": each}, at) for each in types
            ]
            return remarks | {"anyOf": branches}
        match types:
            case "object":
                return self._object({**schema, "type": types}, at)
            case "array":
                return self._array({**schema, "type": types}, at)
            case "string":
                return _string({**schema, "type": types}, at)
            case "integer":
                return _integer({**schema, "type": types}, at)
            case "number":
                for keyword in KEYWORDS["number"]:
                    if keyword in schema:
                        raise refusal(f"{at}.{keyword}", "only for integers")
                return {**schema, "type": types}
            case _:
                return schema

    def _object(self, schema: dict[str, JSON], at: str) -> Schema:
        properties, required = schema.get("properties"), schema.get("required")
        additional = schema.get("additionalProperties", "properties" not in schema)
        names = {*map(str, required)} if is_list(required) else set()
        found = {**properties} if isinstance(properties, Mapping) else {}
        found |= {name: {} for name in sorted(names - found.keys())}
        if found or properties is not None:
            schema["properties"] = self._adapt_all(found, f"{at}.properties")
            schema["additionalProperties"] = additional
        if isinstance(additional, Mapping):
            path = f"{at}.additionalProperties"
            schema["additionalProperties"] = self.adapt(additional, path)
        least = _count(schema, "minProperties", at) or 0
        most = _count(schema, "maxProperties", at)
        if least > len(names):
            raise refusal(f"{at}.minProperties")
        if most is not None and (additional is not False or most < len(found)):
            raise refusal(f"{at}.maxProperties")
        return schema

    def _array(self, schema: dict[str, JSON], at: str) -> Schema:
        items, prefix = schema.get("items"), schema.get("prefixItems")
        keyword = "items" if is_list(items) else "prefixItems"
        places = schema.get(keyword)
        if not is_list(places):
            if "items" in schema:
                schema["items"] = self.adapt(items, f"{at}.items")
            return schema
        # A tuple has just these items: none further that would have to match.
        if keyword == "items" and prefix is not None:
            raise refusal(f"{at}.prefixItems", "items is a list, too")
        least = _count(schema, "minItems", at) or 0
        most = _count(schema, "maxItems", at)
        if least > len(places) or (most is not None and most < len(places)):
            raise refusal(f"{at}.{keyword}", "with minItems or maxItems")
        schema.pop("items", None)
        schema["prefixItems"] = [
            self.adapt(each, f"{at}.{keyword}[{index}]")
            for index, each in enumerate(places)
        ]
        return schema


def _string(schema: dict[str, JSON], at: str) -> Schema:
    pattern, name = schema.get("pattern"), str(schema.get("format", ""))
    if name in UNSUPPORTED_FORMATS:
        raise refusal(f"{at}.format", name)
    if name in FORMAT_PATTERNS or name in FORMAT_LENGTHS:
        if pattern is not None:
            raise refusal(f"{at}.pattern", f"it is beside the format {name}")
        pattern = FORMAT_PATTERNS.get(name)
    if not (isinstance(pattern, str) or name in FORMAT_LENGTHS):
        return schema
    least, most = _count(schema, "minLength", at) or 0, _count(schema, "maxLength", at)
    if isinstance(pattern, str):
        try:
            schema["pattern"] = translate_pattern(pattern, least, most)
        except UnsupportedPattern as error:
            raise refusal(f"{at}.pattern", f"{pattern[:80]}: {error}") from error
        schema.pop("format", None)
        return schema
    shortest, longest = FORMAT_LENGTHS[name]
    if least > shortest or (most is not None and most < longest):
        raise refusal(f"{at}.format", "with minLength or maxLength")
    return schema


def _integer(schema: dict[str, JSON], at: str) -> Schema:
    """Join the bounds: llama.cpp reads one of each end, and rounds large ones."""
    if schema.pop("multipleOf", 1) != 1:
        raise refusal(f"{at}.multipleOf")
    least = [math.ceil(each) for each in _bounds(schema, "minimum", at)]
    least += [math.floor(each) + 1 for each in _bounds(schema, "exclusiveMinimum", at)]
    most = [math.floor(each) for each in _bounds(schema, "maximum", at)]
    most += [math.ceil(each) - 1 for each in _bounds(schema, "exclusiveMaximum", at)]
    if least and max(least) > -BOUND_MAX:
        schema["minimum"] = max(least)
    if most and min(most) < BOUND_MAX:
        schema["maximum"] = min(most)
    return schema


def _count(schema: dict[str, JSON], keyword: str, at: str) -> int | None:
    """Take a number of parts out of a schema; None: it has none."""
    match schema.pop(keyword, None):
        case bool():
            raise refusal(f"{at}.{keyword}", "expected a number")
        case None | int() as count:
            return count
        case float() as count if count.is_integer():
            return int(count)
        case _:
            raise refusal(f"{at}.{keyword}", "expected a number")


def _bounds(schema: dict[str, JSON], keyword: str, at: str) -> Sequence[float]:
    """Take a bound out of a schema."""
    if keyword not in schema:
        return ()
    match schema.pop(keyword):
        case bool():  # of an older draft
            raise refusal(f"{at}.{keyword}", "expected a number")
        case int() | float() as bound if math.isfinite(bound):
            return (bound,)
        case _:
            raise refusal(f"{at}.{keyword}", "expected a number")
