"""A coordinator with two machines, and a browser: shared by the tests of a module."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from browser.chromium import Visitor, browser, visitor
from live.conftest import programs, slow_model
from live.programs import KEY, Pool, Programs, eventually

__all__ = ["programs", "slow_model"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that start a browser as long."""
    if "engine" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.long)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A coordinator with two workers that run the tiny model."""
    running = Programs(tmp_path_factory.mktemp("pool"))
    try:
        pool = running.serve()
        pool.joined("beagle")
        pool.joined("collie")
        eventually(lambda: len(pool.workers()) == 2, "both join")
        yield pool
    finally:
        running.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def stranger(engine: Browser, pool: Pool) -> Iterator[Visitor]:
    """A visitor who is not signed in."""
    with visitor(engine, pool.url) as visiting:
        yield visiting


@pytest.fixture
def admin(stranger: Visitor) -> Visitor:
    """A visitor who is signed in with the first key."""
    stranger.sign_in(KEY)
    return stranger
