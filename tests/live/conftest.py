"""Programs that end with the test that started them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from live.programs import GatedModel, Pool, Programs

SCHEMA = Path(__file__).with_name("test_schema.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the collection of slow modules if none of their tests runs."""
    left_out = config.option.markexpr == "not long" and collection_path == SCHEMA
    return True if left_out else None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    """Load Schemathesis's plugin where it is needed: it takes long to import."""
    if file_path == SCHEMA:
        parent.config.pluginmanager.import_plugin("schemathesis.pytest.plugin")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests below this folder as long that have not the marker ``short``."""
    if not item.get_closest_marker("short"):
        item.add_marker(pytest.mark.long)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    running = Programs(tmp_path)
    yield running
    running.close()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A shared coordinator with one worker that runs the tiny model."""
    running = Programs(tmp_path_factory.mktemp("pool"))
    try:
        pool = running.serve()
        pool.joined("one")
        yield pool
    finally:
        running.close()


@pytest.fixture
def slow_model() -> Iterator[GatedModel]:
    """A model that sends five pieces and then waits."""
    model = GatedModel(pause=5)
    yield model
    model.close()
