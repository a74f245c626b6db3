"""Checks of this machine: versions, disk, keys, ports, firewall, engines, models."""

import asyncio
import importlib.metadata
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from rich.filesize import decimal

from shoal import __version__
from shoal.cli.local.doctor.findings import (
    Check,
    Examined,
    Finding,
    failed,
    ok,
    warning,
)
from shoal.config.installation import install_extra
from shoal.config.private_files import readable_by_others
from shoal.config.secret_files import KEY_FILE, SEED_FILE, TOKEN_FILE
from shoal.engines import gguf_files, local_servers
from shoal.engines.resources import free_memory
from shoal.worker.hardware import this_machine

SPACE_LOW = 2_000_000_000  # bytes
SPACE_NEEDED = 100_000_000
SECRETS = (KEY_FILE, TOKEN_FILE, SEED_FILE)
LOOPBACK = ("127.0.0.1", "::1", "localhost")
FIREWALLS = ("ufw", "firewalld")
"""Services of Linux that refuse connections from other machines, unless told."""


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
                f"give it back to this user: sudo chown -R $USER {folder}",
            )
            return
    if open_:
        named = " ".join(map(str, open_))
        yield warning("keys", f"other users can read {named}", f"chmod go= {named}")
    else:
        yield ok("keys", f"in {folder}, for this user alone")


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
            f"{host}:{port} cannot be listened on: {error.strerror}",
            "end the program that has it, or choose another: shoal serve --port 4011",
        )
    else:
        yield ok("port", f"{port} is free for `shoal serve`")


def check_firewall(examined: Examined) -> Iterator[Finding]:
    """Check whether other machines can reach a coordinator of this one."""
    host, port = examined.serve.host, examined.serve.port
    if host in LOOPBACK:
        yield ok(
            "network",
            "`shoal serve` listens on this machine alone; for others: shoal serve "
            "--host 0.0.0.0 --tls auto",
        )
        return
    active = [each for each in FIREWALLS if _is_active(examined, each)]
    if "ufw" in active:
        yield warning(
            "network",
            "the firewall ufw is active",
            f"let other machines in: sudo ufw allow {port}/tcp",
        )
    elif "firewalld" in active:
        yield warning(
            "network",
            "the firewall firewalld is active",
            f"let other machines in: sudo firewall-cmd --permanent --add-port={port}/"
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
    told = examined.run(["timedatectl", "show", "--property=NTPSynchronized"])
    if "NTPSynchronized=no" in told:
        yield warning(
            "clock",
            "it is not synchronised",
            "receipts and keys have dates: sudo timedatectl set-ntp true",
        )
    elif "NTPSynchronized=yes" in told:
        yield ok("clock", "synchronised")


def check_engines(examined: Examined) -> Iterator[Finding]:
    """Report the engines whose models `shoal join` would offer."""
    servers = asyncio.run(local_servers.find_servers(local_servers.server_locations()))
    for url in servers:
        yield ok("engine", f"a server with models at {url}")
    embedded = find_spec("xllamacpp") is not None
    if embedded:
        version = importlib.metadata.version("xllamacpp")
        yield ok("engine", f"embedded llama.cpp ({version})")
    elif servers:
        yield ok("engine", "the embedded one is not installed, and not needed")
    else:
        yield warning(
            "engine",
            "no server with models runs here, and the embedded one is not installed",
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
        yield ok("models", f"{len(found)} files, of which {largest.name} would run")
    elif found:
        yield warning(
            "models",
            f"{len(found)} files, none of which fits into the free memory",
            "shoal models pull chooses a quantization that fits",
        )
    elif gguf_files.has_demo_model():
        yield ok("models", f"{gguf_files.DEMO_MODEL} (a small one to begin with)")
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
