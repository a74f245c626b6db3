"""A coordinator for each test, or for all tests of a module.

A module that is marked with ``shared_pool`` has one coordinator, and one loop for its
tests and fixtures: starting a coordinator takes longer than most tests.  Tests that
need one in which nothing has happened yet are marked with ``own_pool`` there.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.keys import client, request
from gateway.serving import KEY, Pool, eventually, serving
from harness.slow_imports import openai as sdk

in_loop_of_module = pytest_asyncio.fixture(loop_scope="module")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    loop_of_module = pytest.mark.asyncio(loop_scope="module")
    for item in items:
        if has_marker(item, "shared_pool") and pytest_asyncio.is_async_test(item):
            item.add_marker(loop_of_module, append=False)


def has_marker(item: pytest.Item, name: str) -> bool:
    return item.get_closest_marker(name) is not None


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Pool:
    if not has_marker(request.node, "shared_pool"):
        name = "new_pool"
    elif has_marker(request.node, "own_pool"):
        name = "new_pool_in_loop_of_module"
    else:
        name = "shared_pool"
    pool: Pool = request.getfixturevalue(name)
    return pool


@pytest.fixture(scope="module")
def pool_options() -> dict[str, Any]:
    """The options of `serving`, which a module may have its own of."""
    return {}


@pytest.fixture
async def new_pool(tmp_path: Path, pool_options: Any) -> AsyncIterator[Pool]:
    async with serving(tmp_path, **pool_options) as running:
        yield running


@in_loop_of_module
async def new_pool_in_loop_of_module(
    tmp_path: Path, pool_options: Any
) -> AsyncIterator[Pool]:
    async with serving(tmp_path, **pool_options) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing_pool(
    tmp_path_factory: pytest.TempPathFactory, pool_options: Any
) -> AsyncIterator[Pool]:
    folder = tmp_path_factory.mktemp("coordinator")
    async with serving(folder, **pool_options) as running:
        yield running


@in_loop_of_module
async def shared_pool(standing_pool: Pool, pool_options: Any) -> AsyncIterator[Pool]:
    """The coordinator of a module, which each test leaves as it has found it.

    Its jobs are cancelled, its workers are disconnected, and its keys and tokens are
    revoked, so that other tests can have their names.
    """
    yield standing_pool
    hub = standing_pool.hub
    for job_id in [*hub.pool.jobs]:
        hub.cancel(job_id, "the test is over")
    hub.disconnect_all("the test is over")
    await eventually(lambda: not (hub.pool.jobs or hub.pool.workers))
    admin = next(iter(pool_options.get("keys", {"default": KEY}).values()))
    for path in ("/admin/keys", "/admin/tokens"):
        _, listed = await request(standing_pool, "GET", path, key=admin)
        for each in listed["data"]:
            if each["created_at"] is not None and each["revoked_at"] is None:
                url = f"{path}/{each['name']}"
                await request(standing_pool, "DELETE", url, key=admin)


@pytest.fixture
def openai(request: pytest.FixtureRequest) -> "sdk.AsyncOpenAI":
    """The official client, without retries."""
    shared = has_marker(request.node, "shared_pool")
    name = "openai_in_loop_of_module" if shared else "openai_in_loop_of_test"
    openai: sdk.AsyncOpenAI = request.getfixturevalue(name)
    return openai


@pytest.fixture
async def openai_in_loop_of_test(pool: Pool) -> "AsyncIterator[sdk.AsyncOpenAI]":
    async with client(pool) as each:
        yield each


@in_loop_of_module
async def openai_in_loop_of_module(pool: Pool) -> "AsyncIterator[sdk.AsyncOpenAI]":
    async with client(pool) as each:
        yield each
