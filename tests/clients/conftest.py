"""A pool for the clients of other projects, in a process of its own like them."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from clients.page import CHAT_MODEL, TOOL_MODEL, VECTOR_MODEL
from engines.conftest import vectors
from live.programs import TINY, Pool, Programs, eventually
from models.tool_answers import TOOLS_GGUF

__all__ = ["vectors"]


INSTALLED = Path(__file__).parents[2] / ".venv-clients"
"""Where `make test-long` installs the clients."""


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[None]:
    """What tiktoken downloads elsewhere: LiteLLM brings a copy."""
    assert INSTALLED.exists(), "the clients are not installed: make .venv-clients/.made"
    (folder,) = INSTALLED.glob("lib/*/site-packages/litellm/*/tokenizers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        yield


@pytest.fixture(scope="module")
def pool(
    tmp_path_factory: pytest.TempPathFactory, vectors: Path, vocabulary: None
) -> Iterator[Pool]:
    """A coordinator, and a worker with the models that the page names."""
    models = {CHAT_MODEL: TINY, TOOL_MODEL: TOOLS_GGUF, VECTOR_MODEL: vectors}
    running = Programs(tmp_path_factory.mktemp("pool"))
    try:
        pool = running.serve()
        offers = [("--model", f"{name}={file}") for name, file in models.items()]
        pool.joined("one", *chain.from_iterable(offers))
        eventually(lambda: {*models} <= {*pool.admin("status")["models"]}, "all load")
        yield pool
    finally:
        running.close()
