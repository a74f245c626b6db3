"""Options of the whole suite."""

import pytest

from harness import profiles
from tasks.ray_cluster import ray_cluster

__all__ = ["ray_cluster"]  # of which there is one for the whole suite

profiles.register()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every",
        action="store_true",
        help="run every case of the tests that otherwise take a sample",
    )
