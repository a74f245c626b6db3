"""What `shoal doctor` examines: this machine, then its coordinator."""

import asyncio
import importlib.metadata
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from rich.filesize import decimal

from shoal import __version__
from shoal.client.coordinator import CoordinatorApi
from shoal.config import ServeConfig
from shoal.config.installation import install_extra
from shoal.config.private_files import readable_by_others
from shoal.config.secret_files import KEY_FILE, SEED_FILE, SIGNING_LOG_FILE, TOKEN_FILE
from shoal.domain.errors import ShoalError
from shoal.engines import gguf_files, local_servers
from shoal.engines.resources import free_memory
from shoal.processes.programs import RunProgram, program_output
from shoal.worker.hardware import this_machine


class Severity(Enum):
    OK = "ok"
    WARNING = "warning"  # it works, but not as well as it could
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found; the remedy is empty if there is nothing to do."""

    severity: Severity
    subject: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Examined:
    """The machine and the coordinator that are examined.

    ``serve`` are the settings that `shoal serve` would have here; ``health`` is the
    coordinator's report of its health, and None if it does not answer.
    """

    api: CoordinatorApi
    serve: ServeConfig
    health: Mapping[str, Any] | None = None
    run: RunProgram = field(default=program_output)

    @property
    def folder(self) -> Path:
        """The data folder."""
        return self.serve.data_dir.expanduser()


Check: TypeAlias = Callable[[Examined], Iterator[Finding]]


def ok(subject: str, text: str) -> Finding:
    """Return a finding without a remedy."""
    return Finding(Severity.OK, subject, text)


def warning(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding about what could be better."""
    return Finding(Severity.WARNING, subject, text, remedy)


def failed(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding about what does not work."""
    return Finding(Severity.FAILED, subject, text, remedy)


SPACE_LOW = 2_000_000_000  # bytes
SPACE_NEEDED = 100_000_000
SECRETS = (KEY_FILE, TOKEN_FILE, SEED_FILE, SIGNING_LOG_FILE)
LOOPBACK = ("127.0.0.1", "::1", "localhost")
FIREWALLS = ("ufw", "firewalld")
"""Firewall services of Linux: by default, they refuse connections from others."""


def check_versions(examined: Examined) -> Iterator[Finding]:
    """Report the versions of this program and of the embedded engine."""
    yield ok("version", f"Shoal {__version__}, Python {platform.python_version()}")


def check_disk(examined: Examined) -> Iterator[Finding]:
    """Check the free space for jobs and models."""
    folder = examined.folder
    place = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(place).free
    text = f"{decimal(free)} free at {folder}"
    remedy = "free some space, or choose another folder with --data-dir"
    if free < SPACE_NEEDED:
        yield failed("disk", text, remedy)
    elif free < SPACE_LOW:
        yield warning("disk", text, remedy)
    else:
        yield ok("disk", text)


def check_keys(examined: Examined) -> Iterator[Finding]:
    """Check that this user, and no other, can read the keys."""
    folder = examined.folder
    if not folder.exists():
        yield ok("keys", f"none yet: `shoal serve` creates them in {folder}")
        return
    open_ = []
    for path in (folder, *(folder / name for name in SECRETS)):
        try:
            if path.exists() and readable_by_others(path):
                open_.append(path)
            if path.is_file():
                path.read_bytes()
        except OSError as error:
            yield failed(
                "keys",
                f"{path}: {error.strerror}",
                f"make this user its owner: sudo chown -R $USER {folder}",
            )
            return
    if open_:
        named = " ".join(map(str, open_))
        yield warning("keys", f"other users can read {named}", f"chmod go= {named}")
    else:
        yield ok("keys", f"in {folder}, readable only by this user")


def check_port(examined: Examined) -> Iterator[Finding]:
    """Check that the coordinator's port is its own, or free."""
    host, port = examined.serve.host, examined.serve.port
    if examined.health is not None or not port:
        return  # the coordinator has it
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            if sys.platform != "win32":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        yield failed(
            "port",
            f"cannot listen on {host}:{port}: {error.strerror}",
            "stop the program that uses it, or choose another: shoal serve --port 4011",
        )
    else:
        yield ok("port", f"{port} is free for `shoal serve`")


def check_firewall(examined: Examined) -> Iterator[Finding]:
    """Check whether other machines can reach a coordinator of this one."""
    host, port = examined.serve.host, examined.serve.port
    if host in LOOPBACK:
        yield ok(
            "network",
            "`shoal serve` accepts connections from this machine only; for other "
            "machines: shoal serve --host 0.0.0.0 --tls auto",
        )
        return
    active = [each for each in FIREWALLS if _is_active(examined, each)]
    if "ufw" in active:
        yield warning(
            "network",
            "the firewall ufw is active",
            f"to allow other machines: sudo ufw allow {port}/tcp",
        )
    elif "firewalld" in active:
        yield warning(
            "network",
            "the firewall firewalld is active",
            f"to allow other machines: sudo firewall-cmd --permanent --add-port={port}/"
            "tcp && sudo firewall-cmd --reload",
        )
    elif "enabled" in examined.run(
        ["/usr/libexec/ApplicationFirewall/socketfilterfw", "--getglobalstate"]
    ):
        yield warning(
            "network",
            "the firewall of macOS is on",
            "allow Python in System Settings, Network, Firewall, Options",
        )
    else:
        yield ok("network", "no firewall found on this machine")


def check_clock(examined: Examined) -> Iterator[Finding]:
    """Check whether the system keeps its clock right."""
    output = examined.run(["timedatectl", "show", "--property=NTPSynchronized"])
    if "NTPSynchronized=no" in output:
        yield warning(
            "clock",
            "it is not synchronised",
            "receipts and keys depend on the time: sudo timedatectl set-ntp true",
        )
    elif "NTPSynchronized=yes" in output:
        yield ok("clock", "synchronised")


def check_engines(examined: Examined) -> Iterator[Finding]:
    """Report the engines whose models `shoal join` would offer."""
    servers = asyncio.run(local_servers.find_servers(local_servers.server_locations()))
    for url in servers:
        yield ok("engine", f"a model server at {url}")
    embedded = find_spec("xllamacpp") is not None
    if embedded:
        version = importlib.metadata.version("xllamacpp")
        yield ok("engine", f"embedded llama.cpp ({version})")
    elif servers:
        yield ok("engine", "the embedded engine is not installed, and not needed")
    else:
        yield warning(
            "engine",
            "no model server is running here, and the embedded engine is not installed",
            "start Ollama, LM Studio, llama-server or vLLM; or: "
            + install_extra("llm"),
        )
    hardware = this_machine()
    memory = free_memory()
    free = "" if memory is None else f", {decimal(memory)} of memory free"
    gpu = f", {hardware.gpu_memory_gb:g} GB VRAM" if hardware.gpu_memory_gb else ""
    yield ok("hardware", f"{hardware.chip}{gpu}{free}")


def check_models(examined: Examined) -> Iterator[Finding]:
    """Report the model that the embedded engine would run."""
    folders = gguf_files.model_folders(examined.folder)
    found = [*gguf_files.find_models(folders)]
    largest = gguf_files.largest_fitting_model(folders)
    if largest is not None:
        yield ok("models", f"{len(found)} files; the largest that fits: {largest.name}")
    elif found:
        yield warning(
            "models",
            f"{len(found)} files, none of which fits into the free memory",
            "shoal models pull chooses a quantization that fits",
        )
    elif gguf_files.has_demo_model():
        yield ok("models", f"{gguf_files.DEMO_MODEL} (a small one to start with)")
    else:
        yield warning(
            "models",
            "no GGUF file on this machine",
            "shoal models pull ORGANIZATION/NAME, or a small one: "
            f"{gguf_files.install_demo_model()}",
        )


MACHINE_CHECKS: tuple[Check, ...] = (
    check_versions,
    check_disk,
    check_keys,
    check_port,
    check_firewall,
    check_clock,
    check_engines,
    check_models,
)


def _is_active(examined: Examined, service: str) -> bool:
    return examined.run(["systemctl", "is-active", service]).strip() == "active"


CLOCK_TOLERANCE = 5.0  # seconds


def find_health(api: CoordinatorApi) -> tuple[Mapping[str, Any] | None, str]:
    """Return the coordinator's report of its health, or None and why there is none."""
    if not (api.url or api.api_key or (api.data_dir / KEY_FILE).exists()):
        return None, "none has run on this machine"
    try:
        health = api.at_once.request("/healthz")
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
            "install the same version on both: the older one does not know newer "
            "options",
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
            "synchronise both: receipts, keys and join tokens depend on the time",
        )
    else:
        yield ok("clocks", "the coordinator and this machine agree")


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
        yield ok("nodes", f"{_counted(status, 'worker')}, {_counted(status, 'model')}")
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


def _counted(status: Mapping[str, Any], noun: str) -> str:
    count = len(status[f"{noun}s"])
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"
