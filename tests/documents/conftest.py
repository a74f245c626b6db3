"""Real ``shoal`` processes for the documents' peers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from live.programs import Programs

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests without the marker ``short`` as long."""
    for item in items:
        if HERE in item.path.parents and not item.get_closest_marker("short"):
            item.add_marker(pytest.mark.long)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    running = Programs(tmp_path)
    yield running
    running.close()
