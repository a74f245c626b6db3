"""The OpenAPI document is correct and complete."""

from typing import Any

from gateway.serving import Pool
from shoal.gateway.all_operations import OPERATIONS
from shoal.gateway.openapi import openapi_document


async def test_document_is_public(pool: Pool) -> None:
    async with pool.session.get(f"{pool.url}/openapi.json") as got:
        assert got.status == 200
        assert await got.json() == openapi_document(OPERATIONS)


def test_every_reference_resolves() -> None:
    described = openapi_document(OPERATIONS)
    known = {f"#/components/schemas/{n}" for n in described["components"]["schemas"]}

    assert set(_references(described)) <= known


def _references(value: Any) -> list[str]:
    match value:
        case {"$ref": str() as found}:
            return [found]
        case dict():
            return [each for inner in value.values() for each in _references(inner)]
        case list():
            return [each for inner in value for each in _references(inner)]
        case _:
            return []
