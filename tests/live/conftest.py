"""Programs that end with the test that started them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from live.programs import GatedModel, Pool, Programs

HERE = Path(__file__).parent
SCHEMA = HERE / "test_schema.py"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what takes each process two seconds to collect, if none of it runs."""
    left_out = config.option.markexpr == "not long" and collection_path == SCHEMA
    return True if left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to ``make test-long`` what is not marked as short."""
    for item in items:
        if HERE in item.path.parents and not item.get_closest_marker("short"):
            item.add_marker(pytest.mark.long)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    running = Programs(tmp_path)
    yield running
    running.close()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A coordinator with one worker that runs the tiny model, to be left as it is."""
    running = Programs(tmp_path_factory.mktemp("pool"))
    try:
        pool = running.serve()
        pool.joined("one")
        yield pool
    finally:
        running.close()


@pytest.fixture
def slow_model() -> Iterator[GatedModel]:
    """A model that says five pieces and waits to be let go on."""
    model = GatedModel(pause=5)
    yield model
    model.close()
