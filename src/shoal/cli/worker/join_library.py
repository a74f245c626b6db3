"""The library of a worker: models that it loads when its coordinator says so."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from shoal.cli.worker.join_lending import SharedMemory, open_shared_memory, peers_of
from shoal.cli.worker.join_target import JoinTarget
from shoal.config import JoinConfig
from shoal.config.installation import install_extra
from shoal.domain.errors import ConfigError, PeerError, Unavailable, UnknownModel
from shoal.domain.work import HubModel, ModelOrder
from shoal.domain.worker import Hardware, LoadableModel, ModelLibrary
from shoal.engines import selection
from shoal.engines.catalog import MODELS_MAX
from shoal.engines.gguf_files import model_folders, model_size, parts_of
from shoal.engines.gguf_header import InvalidGguf
from shoal.engines.llama_engine import CONTEXT, LlamaEngine, is_installed
from shoal.engines.loadable_files import FileLibrary, LoadableFile, describe_file
from shoal.engines.resources import free_memory, free_memory_of_gpus
from shoal.ledger.keys import Signer
from shoal.models.chunk_senders import ByteRate
from shoal.models.file_hashes import FileHashes
from shoal.models.library import loadable_files
from shoal.models.library_server import LibraryServer
from shoal.models.peer_connection import DialledPeer
from shoal.pool.models.machine import shown_size

if TYPE_CHECKING:
    from shoal.models.hub_copies import HubSource

LOAD_NONE, LOAD_LOCAL, LOAD_PULL = "none", "local", "pull"
LOADS = ("", LOAD_NONE, LOAD_LOCAL, LOAD_PULL)
"""The words of ``--load``; empty: the default."""

GB = 1_000_000_000
FREE_SHARE = 0.9  # of what is free, or of a GPU

log = logging.getLogger("shoal.cli")


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The bytes that all models may take together; 0: unknown.

    ``free`` returns how many more they may take now, besides the owner's programs: of
    the free memory, so much is mapped from the files of models that are loaded.  It
    returns 0 if that is unknown.  None: only the limit counts.
    """

    limit: int
    free: Callable[[int], int] | None = None


def loads_on_order(config: JoinConfig) -> bool:
    """Return whether the owner wants models to be loaded when they are needed."""
    return config.load in (LOAD_LOCAL, LOAD_PULL)


@dataclass(frozen=True, slots=True)
class WorkerLibrary:
    """The models that a worker loads on order; ``memory`` is in bytes, 0: unknown.

    Those of the ``started`` were loaded from the start.  The ``servers`` load models of
    their own.

    ``context`` and ``slots`` are those of a model that is loaded without a choice.
    ``share`` gets their files after each scan; ``rate`` is that of all copies.  Models
    that are not here are copied from the ``peers`` into the ``folder``; without peers
    they are unknown.  ``shared`` is how it takes part in models of several machines;
    None: it does not.  Those that are ``too_large`` for this machine, which its owner
    named, run only so.  ``free`` is as in ``ModelMemory``.
    """

    files: FileLibrary
    memory: int
    context: int
    slots: int
    threads: int
    bandwidth: float
    share: Callable[[Mapping[str, Path]], None]
    rate: ByteRate
    folder: Path
    peers: Sequence[DialledPeer] = ()
    started: Set[str] = frozenset()
    servers: Sequence[selection.EngineSource] = ()
    shared: SharedMemory | None = None
    too_large: Set[str] = frozenset()
    free: Callable[[int], int] | None = None
    hashes: FileHashes = field(default_factory=FileHashes)
    _digests: dict[Path, str] = field(default_factory=dict)
    _scanning: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def current(self) -> ModelLibrary:
        """The library, as of the last scan."""
        models = {
            name: structs.replace(
                each.model,
                stays=name in self.started,
                digest=self._digests.get(each.path, ""),
            )
            for name, each in self.files.files.items()
        }
        for source in self.servers:
            assert source.control is not None, "only these"
            for model in source.control.library(source.offered_models):
                models[model.name] = model
        return ModelLibrary(
            tuple(models.values())[:MODELS_MAX],
            self.memory,
            self.bandwidth,
            self.context,
            self.slots,
            fetches=bool(self.peers),
        )

    @property
    def lent(self) -> int:
        """The bytes that are lent to models that other machines run."""
        return 0 if self.shared is None else self.shared.terms.memory

    def need(self, file: Path) -> int:
        """Return the bytes that the model of a file needs."""
        try:
            model = describe_file(file)
        except (OSError, InvalidGguf):
            model = LoadableModel("", model_size(file))
        context = min(self.context, model.context or self.context)
        return model.memory(context, self.slots)

    def needs(self, files: Iterable[Path]) -> int:
        """Return the bytes that the models of files need together."""
        return sum(map(self.need, files))

    async def scan(self) -> None:
        """Look for models again."""
        async with self._scanning:  # else an earlier look could be the last to end
            with suppress(ConfigError):  # a folder cannot be read: what is known stays
                await asyncio.to_thread(self._scan)
        files = self.files.files.items()
        self.share({name: each.path for name, each in files})

    def _scan(self) -> None:
        self.files.scan()
        for each in self.files.files.values():
            if self.shared is not None and each.model.layers is not None:
                parts = ((part.name, part.resolve()) for part in parts_of(each.path))
                self._digests[each.path] = self.hashes.address(parts)

    async def fetch(
        self, order: ModelOrder, on_copied: Callable[[int, int | None], None]
    ) -> None:
        """Copy a model into the folder: from the pool, or else from the hub.

        Raises ShoalError.
        """
        # They load NumPy, which takes 25 MB, and hardly any worker copies models.
        from shoal.app.model_port import port_towards
        from shoal.models.fetch import fetch_model

        open_port = await asyncio.to_thread(port_towards, self.peers[0].url)
        try:
            await fetch_model(
                *(order.name, self.peers, self.folder),
                progress=on_copied,
                donors=self.paths(),
                hashes=self.hashes,
                open_port=open_port,
                rate=self.rate,
            )
        except (UnknownModel, Unavailable, PeerError) as error:
            if order.hub is None:
                raise
            log.info("from the hub model=%s reason=%r", order.name, str(error))
        else:
            return
        from shoal.models.hub_copies import fetch_with_pool

        source = await asyncio.to_thread(self._hub_source, order.hub)
        fetched = None
        try:
            fetched = await fetch_with_pool(
                *(source, [order.name], self.peers, self.folder, on_copied),
                open_port=open_port,
                rate=self.rate,
            )
        except PeerError as error:  # a machine may have sent wrong parts
            log.warning("refetching model=%s reason=%r", order.name, str(error))
        if fetched is None:  # or no peer answers: from the hub alone
            there = order.name, [source], self.folder
            await fetch_model(*there, replace=True, progress=on_copied)

    def _hub_source(self, model: HubModel) -> "HubSource":
        """Find a model at the hub.  Raises ConfigError if it does not fit here."""
        from shoal.models.hub_copies import HubSource
        from shoal.models.model_hub import ModelHub

        # Each machine of the pool may name one, and gets a copy.
        hub = ModelHub(public_only=True)
        files = hub.find(model)
        if self.memory and files.size > self.memory:
            raise ConfigError(
                f"{model.file} has {shown_size(files.size)}, and this machine lends "
                f"{shown_size(self.memory)} to models"
            )
        return HubSource(hub, model.repository, files, model.revision)

    def paths(self) -> Sequence[Path]:
        """Return the files of its models, the first part of each."""
        return [each.path for each in self.files.files.values()]

    def shared_paths(self) -> Sequence[Path]:
        """Return the files that other machines of the pool can get, too."""
        return () if self.share is _ignore else self.paths()

    def file(self, name: str) -> LoadableFile:
        """Return the file of a model.  Raises ConfigError."""
        if (file := self.files.files.get(name)) is None:
            raise ConfigError(f"{name} is no longer on this machine")
        return file

    async def open(self, model: LoadableModel, context: int, slots: int) -> LlamaEngine:
        """Return an engine for a model, which is not loaded yet.

        Raises ConfigError.
        """
        path, name = self.file(model.name).path, model.name
        return await selection.open_file(
            name, path, slots=slots, context=context, threads=self.threads
        )


async def open_worker_library(
    config: JoinConfig,
    target: JoinTarget,
    data: Path,
    sources: Sequence[selection.EngineSource],
    hardware: Hardware,
    sharing: LibraryServer,
    *,
    keeps: bool,
    signer: Signer | None,
) -> WorkerLibrary | None:
    """Return the models that a coordinator may load here; None: there are none.

    Args:
        data: Shoal's data folder.
        sources: the engines of the worker.
        hardware: of this machine.
        sharing: lets other machines copy files, if the owner asks for ``--load``.
        keeps: the owner has named the files of ``sources``, which stay loaded; else
            they belong to the library.
        signer: the worker's, which the coordinator admits.

    Raises ConfigError if they are asked for, and cannot be.
    """
    shared = await open_shared_memory(config, target, data, signer)
    wanted, protocol = loads_on_order(config), target.protocol
    if not (protocol.joint and protocol.preferred):
        if wanted:
            raise ConfigError(
                f"--load {config.load}: the protocol {protocol.name} has no orders to "
                "load models; name them with --model"
            )
        return None
    installed = is_installed()
    loads = config.load != LOAD_NONE
    servers = tuple(each for each in sources if loads and each.control is not None)
    able = installed or any(
        each.control is not None and each.control.served for each in servers
    )
    if wanted and not able:
        raise ConfigError(
            f"--load {config.load}: no server here loads models on order, and the "
            f"embedded engine is not installed: {install_extra('llm')}"
        )
    pulls = config.load == LOAD_PULL
    if pulls and not installed:
        raise ConfigError(
            f"--load pull: only the embedded engine loads what is copied: "
            f"{install_extra('llm')}; or give --load local"
        )
    if pulls and not target.url:
        raise ConfigError(
            "--load pull: a worker that listens does not know where to copy models "
            "from; give --load local"
        )
    loaded = {
        source.engine.models[0].name: source.file
        for source in sources
        if source.file is not None
    }
    gpus = int((hardware.gpu_memory_gb or 0) * GB)
    memory = await model_memory(config, servers, gpus, embedded=installed)
    large = frozenset[str]()
    if shared is not None and shared.runs and memory.limit:
        large = frozenset(
            name for name, file in loaded.items() if model_size(file) > memory.limit
        )
    lends = shared is not None and shared.terms.memory > 0
    if not (large or lends or (loads and able)):
        return None
    kept = frozenset(loaded) - large if keeps or not loads else frozenset[str]()
    others = data if loads and installed else None
    library = WorkerLibrary(
        FileLibrary(partial(_list_files, loaded, kept, others)),
        memory.limit,
        config.context or CONTEXT,
        config.slots or selection.SLOTS,
        config.threads,
        hardware.bandwidth_gb,
        sharing.share if wanted else _ignore,
        sharing.rate,
        model_folders(data)[0].folder,
        peers_of(target, signer) if pulls else (),
        loaded.keys() - kept - large,
        servers,
        shared,
        large,
        memory.free,
        FileHashes(data),
    )
    if kept and library.memory:
        files = [loaded[name] for name in kept]
        taken = await asyncio.to_thread(library.needs, files)
        library = replace(library, memory=max(1, library.memory - taken))
    await library.scan()
    if wanted and not (library.current.models or pulls or lends):
        log.warning(
            "there is no model to load in %s or other programs' folders yet; "
            "`shoal models pull ORGANIZATION/NAME` gets one",
            library.folder,
        )
    return library


async def model_memory(
    config: JoinConfig,
    servers: Sequence[selection.EngineSource],
    gpu_memory: int,
    *,
    embedded: bool,
) -> ModelMemory:
    """Return how much memory models may take.

    Args:
        servers: those that load models on order.
        gpu_memory: bytes of the machine's GPUs; 0: it has none.
        embedded: whether the embedded engine is installed.
    """
    if config.memory:
        return ModelMemory(config.memory)
    here = [each for each in servers if each.is_here]
    if servers and not here:
        return ModelMemory(0)  # of another machine
    if gpu_memory and here:
        return ModelMemory(int(gpu_memory * FREE_SHARE))
    if gpu_memory and embedded and (found := await free_memory_of_gpus()):
        return ModelMemory(int(found * FREE_SHARE))
    taken = sum(each.control.memory for each in here if each.control is not None)
    limit = _free_now(0)
    return ModelMemory(limit + taken, _free_now) if limit else ModelMemory(0)


def _free_now(mapped: int) -> int:
    free = free_memory()
    return max(1, int((free - mapped) * FREE_SHARE)) if free else 0


def _ignore(files: Mapping[str, Path]) -> None:
    """Share no files."""


def _list_files(
    loaded: Mapping[str, Path], kept: Set[str], data: Path | None
) -> Iterator[tuple[str, Path]]:
    """Yield the files of the library: none that is kept, under whatever name.

    ``data`` is Shoal's data folder; None: only what was named is listed.
    """
    for name, path in loaded.items():
        if name not in kept:
            yield name, path
    if data is None:
        return
    paths = frozenset(loaded.values())
    folders = model_folders(data)
    for name, path in loadable_files(folders[0].folder, folders):
        if path not in paths and name not in kept:
            yield name, path
