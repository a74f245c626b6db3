"""The same tests as elsewhere, through a front."""

import sys
from typing import Any

import pytest

if sys.platform == "win32":  # without Unix sockets
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def pool_options() -> dict[str, Any]:
    return {"front": True}
