"""``/openapi.json``: the HTTP interface, described by the types that it is made of.

Source: OpenAPI Specification 3.1.0; JSON Schema comes from msgspec.
"""

import asyncio
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import msgspec
from aiohttp import web

import shoal
from shoal.gateway.http.operation import Operation, Operations
from shoal.gateway.http.responses import JSON_TYPE, SSE_TYPE

api = Operations()

REF = "#/components/schemas/{name}"


class EncodedDocument:
    """The description, encoded when it is first requested: that takes 50 ms."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        self._operations = operations

    @cached_property
    def body(self) -> bytes:
        """The JSON text."""
        return msgspec.json.encode(openapi_document(self._operations))


DOCUMENT = web.AppKey("openapi", EncodedDocument)


@api.get("/openapi.json", "This description")
async def show_openapi(request: web.Request) -> web.Response:
    """Answer with the description; it contains nothing about the pool."""
    document = request.app[DOCUMENT]
    body = await asyncio.to_thread(lambda: document.body)
    return web.Response(body=body, content_type=JSON_TYPE)


def openapi_document(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the description of the documented operations, as JSON."""
    documented = [each for each in operations if each.documented]
    types: set[type[Any]] = {each.errors.body for each in operations}
    for operation in documented:
        types |= {each for each in (operation.answer, operation.body) if each}
        types |= {operation.query} if operation.query else set()
        types |= {*operation.parts}
    order = sorted(types, key=lambda each: each.__name__)
    _, schemas = msgspec.json.schema_components(order, ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in documented:
        described = _operation(operation)
        if parameters := _parameters(operation, schemas):
            described["parameters"] = parameters
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Shoal",
            "version": shoal.__version__,
            "description": "One pool for AI work, of the computers you already have.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(operation: Operation) -> dict[str, Any]:
    answer: dict[str, Any] = {operation.media: {"schema": _schema(operation)}}
    if operation.streams:
        event = _EVENT if operation.streams == SSE_TYPE else {"type": "string"}
        answer[operation.streams] = {"schema": event}
    if operation.text_media:
        answer[operation.text_media] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "responses": {
            str(operation.status): {"description": "The answer", "content": answer},
            "default": {
                "description": "What went wrong",
                "content": {JSON_TYPE: {"schema": _ref(operation.errors.body)}},
            },
        },
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {JSON_TYPE: {"schema": _ref(operation.body)}},
        }
    if operation.scope is None:
        described["security"] = []
    return described


def _parameters(
    operation: Operation, schemas: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    in_path = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": _TEXT}
        for part in operation.path.split("/")
        if part.startswith("{")
    ]
    if operation.query is None:
        return in_path
    properties = schemas[operation.query.__name__]["properties"]
    in_query = [
        {"name": name, "in": "query", "schema": _not_null(schema)}
        for name, schema in properties.items()
    ]
    return in_path + in_query


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a given parameter, without null."""
    for each in schema.get("anyOf", ()):
        if each != {"type": "null"}:
            return dict(each)
    return schema


_TEXT = {"type": "string", "minLength": 1}

_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
"""Each event of a stream: OpenAPI 3.1 has the schema of one for that of a stream."""


def _schema(operation: Operation) -> dict[str, Any]:
    if operation.media == SSE_TYPE:
        return _EVENT
    if operation.answer is not None:
        return _ref(operation.answer)
    return {"type": "object" if operation.media == JSON_TYPE else "string"}


def _ref(type_: type[Any]) -> dict[str, Any]:
    return {"$ref": msgspec.json.schema(type_, ref_template=REF)["$ref"]}


def _operation_id(operation: Operation) -> str:
    words = operation.path.replace("{", "by_").replace("}", "").strip("/").split("/")
    return "_".join([operation.method.lower(), *words]).replace(".", "_")
