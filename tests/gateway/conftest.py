"""A coordinator for each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.keys import client
from gateway.serving import Pool, serving
from harness.slow_imports import openai as sdk


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with serving(tmp_path) as running:
        yield running


@pytest.fixture
async def openai(pool: Pool) -> "AsyncIterator[sdk.AsyncOpenAI]":
    """The official client, without retries."""
    async with client(pool) as each:
        yield each
