"""What ``docs/promises.md`` says of jobs, payments and receipts, with real processes
killed.

One siege; ``pytest tests/live/test_jobs_survive.py --every`` has as many as make a
thousand kills.  The tests look at what it has left.
"""

import asyncio
import base64
import importlib.util
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from live import checker, databases
from live.programs import KEY, Program, Programs
from live.siege import KILLS, Siege

SIEGES = 17
VERIFIER = Path(__file__).parents[2] / "examples" / "verify_receipt.py"
SAMPLE = 100  # receipts that both verifiers are given


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "siege" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every")
        seeds = range(SIEGES if every else 1)
        metafunc.parametrize("siege", seeds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def siege(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Siege]:
    """A coordinator that lives, after all that was killed, and no job is open."""
    programs = Programs(tmp_path_factory.mktemp("siege"))
    siege = Siege(programs, Random(request.param))
    try:
        asyncio.run(siege.run())
        yield siege
    finally:
        programs.close()
