"""llama.cpp's own programs on this machine, which run models of several machines.

``rpc-server`` holds some layers of a model for another machine, and ``llama-server``
runs a model whose layers others hold.  Both ends must have the same version of their
protocol, which changes with releases of llama.cpp.
"""

import asyncio
import os
import re
import shutil
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.domain.errors import ConfigError

RPC_SERVERS = ("rpc-server", "ggml-rpc-server")  # its name differs between packages
LLAMA_SERVERS = ("llama-server",)
DEBIAN = ("usr/libexec", "*/llama/bin")  # where Debian's package puts some of them
CPU = "CPU"  # what they call the processor
BANNER_TIMEOUT = 20.0  # seconds until rpc-server has loaded its libraries
BANNER_MAX = 64 << 10  # bytes
INHERITED = re.compile(
    r"(LD_LIBRARY_PATH|DYLD_.*|(CUDA|GGML|GPU|HIP|HSA|NVIDIA|ROC[RM]?|VK)_.*"
    r"|SYSTEMROOT|LANG|LC_.*)"
)
"""The variables that find libraries and processors; others may have secrets."""

_BANNER = re.compile(r"RPC server v(\d+\.\d+\.\d+)\s.*?\bDevices:\s+([\w.:-]+): ", re.S)


@dataclass(frozen=True, slots=True)
class ShardPrograms:
    """llama.cpp's programs of this machine.

    Without a ``llama_server`` it can lend, but not run a model.  ``protocol`` has name
    and version, and ``device`` is the first one that rpc-server names, such as ``CPU``.
    """

    rpc_server: Path
    llama_server: Path | None
    protocol: str
    device: str


async def find_programs(folder: Path | None = None) -> ShardPrograms | None:
    """Find the programs in a folder, or on PATH; None: they are not there.

    Raises ConfigError if the folder lacks them, or if they do not start.
    """
    found = await asyncio.to_thread(_paths, folder)
    if found is None:
        return None
    rpc_server, llama_server = found
    protocol, device = await _describe(rpc_server)
    return ShardPrograms(rpc_server, llama_server, protocol, device)


def program_environment(**more: str) -> dict[str, str]:
    """Return the environment of a program: nothing that it does not need."""
    inherited = {k: v for k, v in os.environ.items() if INHERITED.fullmatch(k)}
    # With PATH, llama.cpp would run a program on what it cannot decode as an image, and
    # a debugger on itself when it aborts.
    quiet = {"PATH": os.devnull, "GGML_NO_BACKTRACE": "1"}
    return {**quiet, **inherited, **more}


def _paths(folder: Path | None) -> tuple[Path, Path | None] | None:
    if folder is None:
        debian = map(str, Path(os.path.abspath(os.sep), DEBIAN[0]).glob(DEBIAN[1]))
        places = os.pathsep.join([os.environ.get("PATH", os.defpath), *debian])
    else:
        places = str(folder)
    rpc_server = _which(RPC_SERVERS, places)
    if rpc_server is None:
        if folder is not None:
            raise ConfigError(
                f"{folder} has no {' or '.join(RPC_SERVERS)}. Give the folder of "
                "llama.cpp's programs, built with its RPC backend."
            )
        return None
    return rpc_server, _which(LLAMA_SERVERS, places)


def _which(names: Sequence[str], places: str) -> Path | None:
    found = (shutil.which(name, path=places) for name in names)
    return next((Path(each).absolute() for each in found if each), None)


async def _describe(rpc_server: Path) -> tuple[str, str]:
    """Start rpc-server once; return its protocol and its first device.

    Raises ConfigError.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *(str(rpc_server), "-H", "127.0.0.1", "-p", str(free_port())),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env=program_environment(),
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"{rpc_server} does not start: {error.strerror}") from error
    assert process.stdout is not None
    printed = ""
    try:
        async with asyncio.timeout(BANNER_TIMEOUT):
            while len(printed) < BANNER_MAX:
                data = await process.stdout.read(BANNER_MAX)
                printed += data.decode(errors="replace")
                if banner := _BANNER.search(printed):
                    return f"ggml-rpc {banner[1]}", banner[2]
                if not data:
                    break
    except TimeoutError:
        pass
    finally:
        _kill(process)
        # Read to the end: the rest of its output would keep the pipe open.
        await process.communicate()
    last = printed.strip().rpartition("\n")[2] or "it printed nothing"
    raise ConfigError(f"{rpc_server} does not start, or has no version: {last}")


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        if sys.platform != "win32":  # with the children that a wrapper may have
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
