"""The memory that a worker lends, and the models that it runs with other machines."""

import asyncio
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from shoal.cli.worker.join_target import JoinTarget
from shoal.config import JoinConfig
from shoal.config.installation import install_extra
from shoal.domain.errors import ConfigError
from shoal.domain.work import ModelOrder
from shoal.domain.worker import MeasuredLink, MemoryLoan
from shoal.engines.loadable_files import LoadableFile
from shoal.engines.shards.programs import ShardPrograms, find_programs
from shoal.engines.shards.shard_process import ShardProcess, can_isolate
from shoal.engines.shards.split_child import has_last_layers
from shoal.engines.shards.split_engine import SplitEngine
from shoal.ledger.keys import Signer
from shoal.models.peer_connection import DialledPeer
from shoal.transports.relayed_sockets import RelayedSockets, TriedUrl
from shoal.worker.lending import Lender, OnCopied
from shoal.worker.owner_throttle import OwnerThrottle
from shoal.worker.shard_hello import RELAY_PATH, write_pass
from shoal.worker.shard_links import ShardLinks

if TYPE_CHECKING:
    from shoal.models.manifest import Manifest

ROUND_TRIPS = 3  # of which the shortest counts
ROUND_TRIP_TIMEOUT = 3.0  # seconds for all of them
CACHES = "shards"  # folder of Shoal's data folder: a folder for each model
_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)


def check_lending(config: JoinConfig) -> None:
    """Raise ConfigError unless the machines that memory is lent to are valid."""
    if config.lend_for and not config.lend_memory:
        raise ConfigError("--lend-for requires --lend-memory")
    for key in config.lend_for:
        if _KEY.fullmatch(key) is None:
            raise ConfigError(
                f"--lend-for {key:.80}: expected the public key of a machine, 64 "
                "hexadecimal digits, as `shoal status --json` shows it"
            )


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The part that a worker takes in models that several machines run.

    ``coordinators`` are the URLs of the HTTP API of a pool, with the ``fingerprint`` of
    their certificate in hexadecimal; empty: links between machines are direct only.
    ``links`` are those to machines with which it has run models, by machine, and
    ``peers`` pass on the files of other machines.
    """

    programs: ShardPrograms
    terms: MemoryLoan
    signer: Signer
    folder: Path
    is_isolated: bool
    coordinators: tuple[str, ...] = ()
    fingerprint: str = ""
    links: dict[str, MeasuredLink] = field(default_factory=dict)
    peers: Sequence[DialledPeer] = ()

    @property
    def runs(self) -> bool:
        """Whether it runs such models, and not only holds parts of them."""
        return self.programs.llama_server is not None

    @property
    def warning(self) -> str:
        """What the owner has to know of what is lent; empty: nothing is."""
        if not self.terms.memory:
            return ""
        keys = len(self.terms.runners)
        to = f"{keys} machines" if keys > 1 else "a machine" if keys else "any machine"
        where = (
            "without a network and files of yours"
            if self.is_isolated
            else "with all rights of this user: install bubblewrap to shut it in"
        )
        return (
            f"this machine lends {self.terms.memory / 10**9:g} GB to models that {to} "
            "of the pool may run: assume that it can run code in a process here, "
            f"{where}"
        )

    def lender(
        self,
        throttle: OwnerThrottle,
        report: Callable[[str, str], None],
        files: Callable[[], Iterable[Path]],
    ) -> Lender:
        """Return what holds parts of models that others run.

        ``files`` are the models of this machine, which may have the same layers.  They
        must be shared with the pool: the process of a part sees what is copied, so a
        machine that knows a hash of a file could get its bytes.
        """

        async def start(folder: Path, cache: Path | None, memory: int) -> ShardProcess:
            return await ShardProcess.start(
                self.programs, folder, cache=cache, memory=memory
            )

        async def copy(
            order: ModelOrder,
            folder: Path,
            on_copied: OnCopied,
        ) -> Path:
            # They load NumPy, which takes 25 MB, and hardly any worker copies layers.
            from shoal.models.fetch import fetch_parts
            from shoal.models.tensor_cache import TensorCache, is_installed

            if not is_installed():
                raise ConfigError(f"fnv-c is missing: {install_extra('giant')}")

            task = asyncio.current_task()

            def on_own_copied(copied: int, wanted: int) -> None:
                if task is not None and task.cancelling():  # the owner needs the disk
                    raise ConfigError("the copy was stopped")
                on_copied(copied, wanted)

            def open_cache(content: "Manifest") -> TensorCache:
                part = order.own_layers, order.own_memory
                return TensorCache(folder, content, *part, on_own_copied)

            return await fetch_parts(
                *(order.name, self.peers, open_cache),
                address=order.digest,
                progress=on_copied,
                donors=files(),
            )

        relay = self._relay if self.coordinators else None
        return Lender(
            *(self.terms, start, self.folder, "", throttle, report, relay),
            *(self.links, copy if self.peers else None),
        )

    def _relay(self, group: str) -> RelayedSockets:
        """Return the way to the other machines of a group over the coordinator."""
        url = TriedUrl(self.coordinators, RELAY_PATH)
        token = write_pass(self.signer, group)
        return RelayedSockets(url, token, self.fingerprint, group)

    async def open_engine(
        self, file: LoadableFile, threads: int, order: ModelOrder
    ) -> SplitEngine:
        """Return an engine that runs a model with others, not started yet.

        Raises ShoalError.
        """
        links = await ShardLinks.open(
            *(order.group, self.signer, self.programs.protocol, order.shards[:-1]),
            self._relay if self.coordinators else None,
            self.links,
        )
        return SplitEngine(
            *(order.name, file.path),
            programs=self.programs,
            layers=[each.layers for each in order.shards],
            links=links,
            slots=order.slots,
            context=order.context,
            threads=threads,
            kinds=file.model.kinds,
            batch=order.batch,
        )


async def open_shared_memory(
    config: JoinConfig, target: JoinTarget, data: Path, signer: Signer | None
) -> SharedMemory | None:
    """Return how a worker takes part in models of several machines; None: it does not.

    Raises ConfigError if the owner lends memory, and that cannot be.
    """
    memory, protocol = config.lend_memory, target.protocol
    if signer is None or not (protocol.joint and protocol.preferred):
        if memory:
            raise ConfigError(
                f"--lend-memory: the protocol {protocol.name} has no models that "
                "several machines run"
            )
        return None
    folder = _absolute(Path(config.llama_cpp)) if config.llama_cpp else None
    try:
        programs = await find_programs(folder)
    except ConfigError:
        if memory or folder:
            raise
        return None  # a program of that name does not start: it was not asked for
    if programs is None:
        if memory:
            raise ConfigError(
                "--lend-memory: llama.cpp's rpc-server was not found in PATH; install "
                "llama.cpp (it is among the programs of its releases), or name its "
                "folder with --llama-cpp"
            )
        return None
    whole = psutil.virtual_memory().total
    if memory > whole:
        raise ConfigError(
            f"--lend-memory: {memory / 1e9:.1f} GB, and this machine has "
            f"{whole / 1e9:.1f} GB"
        )
    key = signer.public_key.hex()
    terms = MemoryLoan(
        *(programs.protocol, key, memory, tuple(config.lend_for)),
        holds_last=has_last_layers(programs.device),
        round_trip=await _round_trip(target.http_url) if target.url else 0.0,
    )
    isolated = bool(memory) and await can_isolate()
    return SharedMemory(
        *(programs, terms, signer, _absolute(data / CACHES), isolated),
        tuple(target.http_urls) if target.url else (),
        (target.fingerprint or b"").hex(),
        peers=peers_of(target, signer) if target.url else (),
    )


def peers_of(target: JoinTarget, signer: Signer | None) -> Sequence[DialledPeer]:
    """Return the coordinators of a pool, which pass its models on."""
    return [
        DialledPeer(
            *(url, target.token),
            plain=target.plain,
            fingerprint=target.fingerprint,
            signer=signer,
        )
        for url in target.http_urls
    ]


async def _round_trip(url: str) -> float:
    """Return the seconds to the server of a URL and back; 0: it does not answer.

    That is how long TCP takes to connect; the shortest of a few has waited for nothing
    else.
    """
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    found = []
    try:
        async with asyncio.timeout(ROUND_TRIP_TIMEOUT):
            where = await loop.getaddrinfo(
                parts.hostname,
                parts.port or (443 if parts.scheme == "https" else 80),
                type=socket.SOCK_STREAM,
            )
            family, kind, protocol, _, address = where[0]
            for _ in range(ROUND_TRIPS):
                with socket.socket(family, kind, protocol) as probe:
                    probe.setblocking(False)
                    began = loop.time()
                    await loop.sock_connect(probe, address)
                    found.append(loop.time() - began)
    except (OSError, ValueError):  # TimeoutError is one, too
        pass
    return round(min(found, default=0.0), 4)


def _absolute(path: Path) -> Path:
    """Return a path that is right in the folders of shards' processes, too."""
    return path.absolute()
