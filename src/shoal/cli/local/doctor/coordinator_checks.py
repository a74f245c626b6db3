"""Checks of the coordinator: whether it answers, its key, version, clock and nodes."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from shoal import __version__
from shoal.cli.local.doctor.findings import (
    Check,
    Examined,
    Finding,
    failed,
    ok,
    warning,
)
from shoal.client.coordinator import CoordinatorApi
from shoal.config.secret_files import KEY_FILE
from shoal.domain.errors import ShoalError

CLOCK_TOLERANCE = 5.0  # seconds


def find_health(api: CoordinatorApi) -> tuple[Mapping[str, Any] | None, str]:
    """Return the coordinator's report of its health, or None and why there is none."""
    if not (api.url or api.api_key or (api.data_dir / KEY_FILE).exists()):
        return None, "none has run on this machine"
    try:
        health = api.request("/healthz")
    except ShoalError as error:
        return None, str(error)
    if not isinstance(health, Mapping) or "shoal" not in health:
        return None, f"{api.base_url} is not a Shoal coordinator"
    return health, ""


def check_version(examined: Examined) -> Iterator[Finding]:
    """Compare the coordinator's version with that of this program."""
    assert examined.health is not None, "it answers"
    version = examined.health["shoal"]
    text = f"Shoal {version} answers at {examined.api.base_url}"
    if version == __version__:
        yield ok("coordinator", text)
    else:
        yield warning(
            "coordinator",
            f"{text}, and this program is {__version__}",
            "install the same version on both: newer options are unknown to the older",
        )


def check_clocks(examined: Examined) -> Iterator[Finding]:
    """Compare the coordinator's clock with that of this machine."""
    before = time.time()
    there = examined.api.server_time()
    after = time.time()
    if there is None:
        return
    difference = max(before - there - 1, there - after, 0.0)  # it has whole seconds
    if difference > CLOCK_TOLERANCE:
        yield warning(
            "clocks",
            f"the coordinator's clock differs by {difference:.0f} s",
            "synchronise both: receipts, keys and join tokens have dates",
        )
    else:
        yield ok("clocks", "the coordinator's and this machine's agree")


def check_pool(examined: Examined) -> Iterator[Finding]:
    """Check the API key, and what the pool says about itself and its nodes."""
    try:
        status = examined.api.request("/admin/status")
    except ShoalError as error:
        yield failed(
            "API key",
            str(error),
            "give the key that `shoal serve` printed: --api-key or SHOAL_API_KEY",
        )
        return
    yield ok("API key", "accepted")
    if not status["ready"]:
        yield failed("jobs", f"not accepted: {status['why_not']}", "see its log")
    if not status["workers"]:
        yield warning(
            "nodes",
            "no worker has joined",
            "run the command that `shoal join-line` prints, on any machine",
        )
    else:
        yield ok("nodes", f"{len(status['workers'])} workers, {_models(status)}")
    for peer in status["refused"]:
        yield warning(
            "nodes",
            f"{peer['name'] or peer['id']} is not admitted: {peer['reason']}",
            "`shoal join-line` prints the command that admits a machine",
        )
    others = {peer["release"] for peer in status["peers"]} - {"", status["version"]}
    if others:
        yield warning(
            "nodes",
            f"some run Shoal {', '.join(sorted(others))}, the coordinator "
            f"{status['version']}",
            "install the same version everywhere",
        )


COORDINATOR_CHECKS: tuple[Check, ...] = (check_version, check_clocks, check_pool)


def _models(status: Mapping[str, Any]) -> str:
    count = len(status["models"])
    return "1 model" if count == 1 else f"{count} models"
