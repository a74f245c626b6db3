"""A coordinator for each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from gateway.keys import client
from gateway.serving import Pool, serving


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with serving(tmp_path) as running:
        yield running


@pytest.fixture
async def openai(pool: Pool) -> AsyncIterator[AsyncOpenAI]:
    """The official client, without retries."""
    async with client(pool) as each:
        yield each
