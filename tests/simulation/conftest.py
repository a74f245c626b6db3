"""The seeds of the simulations: one in ``make test``, and more where there is time."""

import pytest

from harness.profiles import some_long

SEEDS = 12
SEEDS_OF_ALL = 50  # with --every


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every")
        seeds = range(SEEDS_OF_ALL if every else SEEDS)
        metafunc.parametrize("seed", some_long(seeds, short=1))
