"""The store that outlives the coordinators of a test."""

from collections.abc import Iterator

import pytest

from coordinator.hubs import SlowStore
from simulation import virtual


@pytest.fixture
def store() -> Iterator[SlowStore]:
    store = SlowStore()
    virtual.run(store.open())
    yield store
    virtual.run(store.close())
