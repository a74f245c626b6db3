"""The suite's options, profiles and guards: CONTRIBUTING.md tells how to use them."""

import gc
import signal
from collections.abc import Generator

import pytest
from aiohttp import web_app

from harness import profiles
from harness.costs import Costs
from harness.failures import Failures
from harness.forks import LINUX, Forks
from harness.guard import Guard
from harness.leftovers import Reaper
from harness.postgres import database_url, postgres
from harness.s3 import bucket, s3
from harness.speed import slowness
from tasks.clusters.real import dask_cluster, ray_cluster

LONGEST = {"simulation", "training", "browser"}  # folders

__all__ = [
    "bucket",
    "dask_cluster",
    "database_url",
    "postgres",
    "ray_cluster",
    "s3",
]  # of which there is one each for the whole suite

profiles.register()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processes",
        type=int,
        default=0,
        help="how many processes run tests at once (default: this one alone)",
    )
    parser.addoption(
        "--every",
        action="store_true",
        help="run every case of the tests that otherwise take a sample",
    )
    parser.addoption(
        "--minutes",
        type=float,
        help="how long tests take that can go on for long (default: seconds)",
    )
    parser.addoption(
        "--hang-after",
        type=float,
        metavar="SECONDS",
        help="how long a phase of a test may be idle, and half of how long it may take"
        " (default: by its marker and by the speed of the machine)",
    )
    parser.addoption(
        "--costs",
        action="store_true",
        help="print the processor seconds of each folder, file and fixture",
    )


def pytest_configure(config: pytest.Config) -> None:
    slowness()  # for the processes below this one
    # A shell lets what runs in the background ignore it, and programs pass that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Failures(), "failures")
    if config.option.costs:
        config.pluginmanager.register(Costs(), "costs")
    if config.option.processes and LINUX:
        forks = Forks(config.option.processes, set_up)
        config.pluginmanager.register(forks, "forks")
    else:
        set_up(config)


def set_up(config: pytest.Config) -> None:
    """Register what each process that runs tests needs."""
    reaper = Reaper()
    config.add_cleanup(reaper.close)
    config.pluginmanager.register(Guard([reaper.pid]), "guard")


def pytest_report_header() -> str:
    return f"slowness: {slowness():.1f}, by which the limits of tests are multiplied"


def pytest_collection() -> None:
    gc.disable()  # next to nothing of what collecting makes is garbage


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A file is one process's.  Those that take longest begin first, lest the end of a
    # run is one process's alone.
    items.sort(key=lambda item: not LONGEST & {*item.path.parts})


def pytest_collection_finish() -> None:
    # Thousands of tests are millions of objects.  Frozen, they are not looked at in
    # each collection of garbage, of which tests that look for leaks make many.
    gc.freeze()
    gc.enable()
    # What tests make is mostly alive while they run: looking at it as often as Python
    # does by default takes a fifth of their processor time.
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, object, object]:
    """Collect no garbage while a traceback is parsed.

    What is collected may log a traceback, and CPython 3.11 cannot parse one source in
    the middle of another: the whole run would end with an internal error.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After a file, keep later collections of garbage from examining what it left."""
    # It keeps 1,024 handlers alive, and with them hundreds of whole coordinators.
    web_app._cached_build_middleware.cache_clear()
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
