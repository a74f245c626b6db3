"""The input of a script, its files and its environment, and the files it leaves.

The program that submits a run packs the files; its members unpack them.  The
environment is what torchrun sets, and the run's own variables.  Source: "torchrun
(Elastic Launch)", section "Environment Variables", in the documentation of PyTorch
2.13; the rest of what its agent sets is there for scripts that read it
(``torch/distributed/elastic/agent/server/local_elastic_agent.py``).
"""

import io
import os
import socket
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias
from urllib.parse import SplitResult, urlsplit

from shoal.domain.addresses import is_loopback, split_addresses
from shoal.domain.errors import ConfigError, InvalidRequest
from shoal.tasks.running_call import COORDINATOR_FINGERPRINT as COORDINATOR_FINGERPRINT
from shoal.tasks.running_call import COORDINATOR_URL as COORDINATOR_URL
from shoal.training.run_events import run_id_of

RUN, RUN_TOKEN = "SHOAL_RUN", "SHOAL_RUN_TOKEN"
RUN_URL, RUN_FINGERPRINT = "SHOAL_RUN_URL", "SHOAL_RUN_FINGERPRINT"
RUN_BACKEND, RUN_OUTPUT = "SHOAL_RUN_BACKEND", "SHOAL_RUN_OUTPUT"
"""The last is set if files are wanted, which scripts leave as rank 0 or as the writer.
"""
OUTPUT_FOLDER = "SHOAL_OUTPUT"
THREADS = "OMP_NUM_THREADS"
OTHER_THREADS = frozenset({"OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"})
"""Set for tasks; without them, those libraries follow the variable above as well."""
PORTS = range(20_000, 30_000)
"""Where rank 0 listens: below what systems give away, from 32,768 or 49,152 on."""
SHOAL = "shoal"  # the backend that forms its groups at the coordinator

FILES_MAX = 10_000
SIZE_MAX = 1 << 30  # bytes of all files
ARCHIVE_MAX = 256 << 20  # bytes of them together, compressed: one blob
TOGETHER_MAX = 64 << 20  # bytes of output that are returned together
PIECE_MAX = 32 << 20  # bytes of a piece of what is beyond
COMPRESSION = 1  # of zlib's levels: code shrinks fourfold, and most data not at all
EARLIEST = (1980, 1, 1, 0, 0, 0)  # equal files make equal archives

Contents: TypeAlias = bytes | list[str]
"""Those of a file: its bytes, or the SHA-256 of its pieces, which are stored apart."""


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The coordinator of a worker, as its processes reach it.

    Of several URLs, separated by commas, the first says where it is.
    """

    url: str
    fingerprint: str  # in hexadecimal digits; empty: none

    @property
    def host(self) -> str:
        return self._parts.hostname or ""

    @property
    def _parts(self) -> SplitResult:
        return urlsplit(split_addresses(self.url)[0])

    @property
    def port(self) -> int:
        parts = self._parts
        return parts.port or (443 if parts.scheme == "https" else 80)


def reachable_host(published: str, own: str, coordinator: Coordinator) -> str:
    """Return the host by which this machine reaches a member that published one.

    A member on the coordinator's machine may have joined it over loopback: others reach
    it where they reach the coordinator.
    """
    if is_loopback(published) and not is_loopback(own):
        return coordinator.host
    return published


def free_port(run_id: str) -> int:
    """Return a port of this machine that is free, and will be when rank 0 listens.

    Until then seconds pass, in which PyTorch is imported.  So it is none of those that
    systems give to any program that asks for a port; each run begins with another one.

    Raises OSError if there is none.
    """
    first = int(run_id[:8], 16)
    for port in (PORTS[(first + each) % len(PORTS)] for each in range(len(PORTS))):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))  # at all addresses, as PyTorch does
            return port
    raise OSError(f"all ports from {PORTS[0]} to {PORTS[-1]} are in use")


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A place in a round: ``node`` of ``nodes``, with a number of processes each."""

    node: int
    nodes: int
    processes: int

    @property
    def size(self) -> int:
        """The number of ranks in all."""
        return self.nodes * self.processes

    def rank(self, local: int) -> int:
        """Return the rank of a process of this member."""
        return self.node * self.processes + local


def torchrun_variables(
    place: NodePlace, local: int, master: tuple[str, int], run_id: str, starts: int
) -> Mapping[str, str]:
    """Return what torchrun sets for the process ``local`` of a member.

    ``starts`` are those of the script before this one.
    """
    rank, size = str(place.rank(local)), str(place.size)
    return {
        "LOCAL_RANK": str(local),
        "RANK": rank,
        "GROUP_RANK": str(place.node),
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(place.processes),
        "WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RESTART_COUNT": str(starts),
        "TORCHELASTIC_MAX_RESTARTS": str(starts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 has the store
        "PYTHON_EXEC": sys.executable,
    }


def run_variables(
    token: str, backend: str, coordinator: Coordinator, *, output: bool
) -> Mapping[str, str]:
    """Return the run's own variables; its rendezvous is for the backend ``shoal``."""
    own = {RUN: run_id_of(token), RUN_BACKEND: backend}
    if backend != SHOAL:
        return own
    return {
        **own,
        RUN_TOKEN: token,
        RUN_URL: coordinator.url,
        RUN_FINGERPRINT: coordinator.fingerprint,
        **({RUN_OUTPUT: "1"} if output else {}),
    }


def worker_variables(whole_machine: bool, processes: int) -> Mapping[str, str]:
    """Return the variables of the worker, with the threads of numeric libraries.

    Processes that have a whole machine share its cores evenly.  As with torchrun, one
    variable sets the threads of all libraries.
    """
    own = {k: v for k, v in os.environ.items() if k not in OTHER_THREADS}
    if not whole_machine:
        return own
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return {**own, THREADS: str(max(1, cores // processes))}


def pack_script(script: Path, beside: Sequence[Path]) -> bytes:
    """Return an archive of a script, and of files and folders beside it.

    A folder keeps its name; hidden files and ``__pycache__`` are left out.

    Raises ConfigError naming what is missing, twice there, or too large.
    """
    if not script.is_file():
        raise ConfigError(f"{script}: there is no such file")
    archive, size = io.BytesIO(), 0
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        for name, file in _named_files(script, beside):
            size += file.stat().st_size
            if len(target.namelist()) >= FILES_MAX or size > SIZE_MAX:
                raise ConfigError(
                    f"the script and its files exceed {FILES_MAX} files or "
                    f"{SIZE_MAX >> 20} MiB at {file}: put data where the workers read "
                    "it, and pass its place as an argument"
                )
            if name in target.namelist():
                raise ConfigError(f"--with: two files are named {name}: rename one")
            info = zipfile.ZipInfo(name, EARLIEST)
            info.compress_type = zipfile.ZIP_DEFLATED
            target.writestr(info, file.read_bytes(), compresslevel=COMPRESSION)
    if archive.tell() > ARCHIVE_MAX:
        raise ConfigError(
            f"the script and its files have {archive.tell() >> 20} MiB compressed, and "
            f"at most {ARCHIVE_MAX >> 20} MiB can be sent: put data where the workers "
            "read it, and pass its place as an argument"
        )
    return archive.getvalue()


def _named_files(script: Path, beside: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the files with their names in the working folder."""
    yield script.name, script
    for each in beside:
        if each.is_file():
            yield each.name, each
        elif each.is_dir():
            folder = each.resolve()
            for file in sorted(folder.rglob("*")):
                inner = file.relative_to(folder)
                left_out = any(
                    part.startswith(".") or part == "__pycache__"
                    for part in inner.parts
                )
                if file.is_file() and not left_out:
                    yield str(PurePosixPath(folder.name, *inner.parts)), file
        else:
            raise ConfigError(f"--with {each}: there is no such file or folder")


def unpack_script(archive: bytes, folder: Path) -> None:
    """Unpack an archive into an empty folder.

    Raises InvalidRequest if it is damaged, or a name leads out of the folder.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as source:
            files = source.infolist()
            size = sum(each.file_size for each in files)
            if len(files) > FILES_MAX or size > SIZE_MAX:
                raise InvalidRequest("the script has too many files, or too large ones")
            for each in files:
                name = PurePosixPath(each.filename)
                if name.is_absolute() or ".." in name.parts:
                    raise InvalidRequest(f"a file of the script is named {name}")
                source.extract(each, folder)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError) as error:
        raise InvalidRequest(f"the files of the script: {error}") from error


def collect_output(folder: Path, store: Callable[[bytes], str]) -> dict[str, Contents]:
    """Return the files that a script left in its output folder, by name.

    ``store`` stores a piece, and returns its SHA-256: files beyond ``TOGETHER_MAX``.

    Raises InvalidRequest if there are too many.
    """
    found: dict[str, Contents] = {}
    size = 0
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        size += file.stat().st_size
        if len(found) >= FILES_MAX:
            raise InvalidRequest(
                f"the script left more than {FILES_MAX} files in its output folder: "
                "pack them together"
            )
        name = file.relative_to(folder).as_posix()
        if size <= TOGETHER_MAX:
            found[name] = file.read_bytes()
            continue
        with file.open("rb") as opened:
            pieces = iter(lambda: opened.read(PIECE_MAX), b"")
            found[name] = [store(each) for each in pieces]
    return found


def write_output(
    files: Mapping[str, Contents], folder: Path, fetch: Callable[[str], bytes]
) -> None:
    """Write the files that a run returned; names that lead out of it are refused.

    ``fetch`` returns a piece, by its SHA-256.  Raises InvalidRequest, OSError.
    """
    for name, contents in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise InvalidRequest(f"the run returned a file named {name!r}")
        target = folder.joinpath(*path.parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as opened:
            if isinstance(contents, bytes):
                opened.write(contents)
                continue
            for each in contents:
                opened.write(fetch(each))
