"""The same tests as elsewhere, through a front."""

from typing import Any

import pytest


@pytest.fixture(scope="module")
def pool_options() -> dict[str, Any]:
    return {"front": True}
