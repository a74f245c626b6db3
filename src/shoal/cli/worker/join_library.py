"""The library of a worker: models that it loads when its coordinator says so."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.config import JoinConfig
from shoal.config.installation import install_extra
from shoal.domain.errors import ConfigError
from shoal.domain.worker import LoadableModel, ModelLibrary
from shoal.engines import gguf_files, selection
from shoal.engines.gguf_files import DEMO_MODEL, demo_model_path, model_folders
from shoal.engines.llama_engine import CONTEXT, LlamaEngine, is_installed
from shoal.engines.loadable_files import FileLibrary
from shoal.engines.resources import free_memory
from shoal.models.library import loadable_files
from shoal.protocols.seam.protocol import AnyWireProtocol

LOAD_NONE, LOAD_LOCAL, LOAD_PULL = "none", "local", "pull"
LOADS = ("", LOAD_NONE, LOAD_LOCAL, LOAD_PULL)
"""The words of ``--load``; empty: the default."""

GB = 1_000_000_000
FREE_SHARE = 0.9  # of the free memory, which models may take


def loads_on_order(config: JoinConfig) -> bool:
    """Return whether the owner wants models to be loaded when they are needed."""
    return config.load in (LOAD_LOCAL, LOAD_PULL)


@dataclass(frozen=True, slots=True)
class WorkerLibrary:
    """The models that a worker loads on order; ``memory`` is in bytes, 0: unknown.

    ``context`` and ``slots`` are those of a model that is loaded without a choice.
    """

    files: FileLibrary
    memory: int
    context: int
    slots: int
    threads: int
    bandwidth: float

    @property
    def current(self) -> ModelLibrary:
        """The library, as of the last scan."""
        return ModelLibrary(
            tuple(each.model for each in self.files.files.values()),
            self.memory,
            self.bandwidth,
            self.context,
            self.slots,
        )

    def need(self, name: str, file: Path) -> int:
        """Return the bytes that a model of this worker needs."""
        found = self.files.files.get(name)
        model = LoadableModel(name, gguf_files.model_size(file))
        model = model if found is None else found.model
        context = min(self.context, model.context or self.context)
        return model.memory(context, self.slots)

    async def scan(self) -> None:
        """Look for models again."""
        with suppress(ConfigError):  # a folder is not readable: what is known stays
            await asyncio.to_thread(self.files.scan)

    async def open(self, model: LoadableModel, context: int, slots: int) -> LlamaEngine:
        """Return an engine for a model, which is not loaded yet.

        Raises ConfigError.
        """
        name = model.name
        if (file := self.files.files.get(name)) is None:
            raise ConfigError(f"{name} is no longer on this machine")
        if name == DEMO_MODEL and file.path == gguf_files.demo_model_file():
            await asyncio.to_thread(demo_model_path)  # verifies it
        return await selection.open_file(
            name, file.path, slots=slots, context=context, threads=self.threads
        )


async def open_worker_library(
    config: JoinConfig,
    protocol: AnyWireProtocol,
    data: Path,
    sources: Sequence[selection.EngineSource],
    bandwidth: float,
) -> WorkerLibrary | None:
    """Return the models that a coordinator may load here; None: there are none.

    Args:
        data: Shoal's data folder.
        sources: the engines of the worker; their files belong to the library, too.
        bandwidth: of the memory, in GB of 10^9 bytes a second; 0: unknown.

    Raises ConfigError if they are asked for, and cannot be.
    """
    if config.load == LOAD_NONE:
        return None
    wanted = loads_on_order(config)
    if not (protocol.joint and protocol.preferred):
        if wanted:
            raise ConfigError(
                f"--load {config.load}: the protocol {protocol.name} has no orders to "
                "load models; name them with --model"
            )
        return None
    if not is_installed():
        if wanted:
            raise ConfigError(
                f"--load {config.load}: the embedded engine is not installed: "
                f"{install_extra('llm')}"
            )
        return None
    named = {
        source.engine.models[0].name: source.file
        for source in sources
        if source.file is not None
    }
    free = free_memory() or 0
    library = WorkerLibrary(
        FileLibrary(partial(_list_files, named, data)),
        int(config.memory * GB) or int(free * FREE_SHARE),
        config.context or CONTEXT,
        config.slots or selection.SLOTS,
        config.threads,
        bandwidth,
    )
    await library.scan()
    return library


def _list_files(named: Mapping[str, Path], data: Path) -> Iterator[tuple[str, Path]]:
    yield from named.items()
    paths = frozenset(named.values())
    folders = model_folders(data)
    for name, path in loadable_files(folders[0].folder, folders):
        if path not in paths:
            yield name, path
