"""Finds the engines given on the command line, or those of this machine."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import structs

from shoal.domain.errors import ConfigError
from shoal.domain.work import JobKind
from shoal.domain.worker import ServedModel
from shoal.engines import gguf_files, local_servers
from shoal.engines.adapters import find_adapters
from shoal.engines.catalog import LATEST, QueryServer
from shoal.engines.engine import Engine
from shoal.engines.llama_engine import CONTEXT, LlamaEngine, check_installed
from shoal.engines.loadable_files import EMBEDDED
from shoal.engines.openai_server import EngineLoading, OpenAIEngine
from shoal.engines.server_control import ServerControl

AUTO = "auto"
SLOTS = 4  # of the embedded engine
LISTED_MAX = 10  # models that a message names
LOADING_RETRY = 2.0  # seconds until a server that loads its model is asked again

log = logging.getLogger("shoal.engines")


FIELDS: Mapping[str, bool | None] = {"auto": None, "any": True, "known": False}
"""The words of ``--fields``, as ``EngineOptions.any_field``."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of engines and models.

    Attributes:
        engines: ``auto``, ``embedded`` or the base URLs of servers; empty: ``auto``,
            unless all models are files.
        models: ``NAME=PATH`` for a file; else names or patterns of models to offer;
            empty: all models.
        slots: concurrent jobs of each engine; 0: the engine's own number.
        context: tokens of a job in the embedded engine; 0: its default.
        threads: threads of the embedded engine; 0: its default.
        any_field: as in ``OpenAIEngine``.
        on_order: models are loaded on order: without a named file, none is chosen, and
            servers are controlled that have an API for that.
        memory: bytes that a file which is chosen may need; 0: what is free.
    """

    engines: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    slots: int = 0
    api_key: str = ""
    context: int = 0
    threads: int = 0
    any_field: bool | None = None
    on_order: bool = False
    memory: int = 0


@dataclass(frozen=True, slots=True)
class EngineSource:
    """An engine, the names of its models to offer, and a unique label.

    It is started, unless it ``is_unloaded``: then its start loads ``file``, which may
    take minutes.
    """

    label: str
    engine: Engine
    names: tuple[str, ...] = ()
    file: Path | None = None
    is_unloaded: bool = False

    @property
    def control(self) -> ServerControl | None:
        """What loads the models of its server on order; None: it loads none."""
        engine = self.engine
        return engine.control if isinstance(engine, OpenAIEngine) else None

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        engine = self.engine
        return not isinstance(engine, OpenAIEngine) or _is_here(engine.url)

    @property
    def known_models(self) -> Sequence[ServedModel]:
        """Its models, and those that it has not loaded."""
        loadable = self.control.served if self.control is not None else []
        names = {each.name for each in loadable}
        return [*loadable, *(m for m in self.engine.models if m.name not in names)]

    def offered_models(self, models: Sequence[ServedModel]) -> Sequence[ServedModel]:
        """Return the models to offer, under the requested names."""
        return select_models(models, self.names) if self.names else models


@dataclass(frozen=True, slots=True)
class SearchLocations:
    """Where to search for servers and files."""

    servers: tuple[local_servers.ServerLocation, ...]
    files: tuple[gguf_files.ModelFolder, ...]


async def find_engines(
    options: EngineOptions, locations: SearchLocations, stack: AsyncExitStack
) -> list[EngineSource]:
    """Find the requested engines; leaving ``stack`` closes them.

    Servers are asked for their models, and waited for if they are loading one, and
    files opened, but no file is loaded: that may take minutes.

    Raises ConfigError if there is none, one fails, or one lacks a named model.
    """
    files = [
        each for each in map(parse_model_option, options.models) if each[1] is not None
    ]
    names = tuple(
        name for name in options.models if parse_model_option(name)[1] is None
    )
    engines = options.engines or ((EMBEDDED,) if files and not names else (AUTO,))
    urls = [each for each in engines if each not in (AUTO, EMBEDDED)]
    if files and len(urls) == len(engines):
        raise ConfigError(
            f"{files[0][1]}: a server at {urls[0]} opens its models itself"
        )
    sources = [
        await _open_server(url, options, names, locations, stack) for url in urls
    ]
    if AUTO in engines:
        for url in await local_servers.find_servers(locations.servers):
            try:
                # The key is only for servers given by URL.
                source = await _open_server(
                    *(url, replace(options, api_key=""), names, locations, stack)
                )
            except ConfigError as error:
                log.warning("passed over %s: %s", url, error)
                continue
            if source.offered_models(source.known_models):
                sources.append(source)
    missing = [
        name for name in names if not any(_offers_model(each, name) for each in sources)
    ]
    if missing and len(urls) == len(engines):
        raise ConfigError(_missing_model_message(sources, missing[0]))
    for name in missing:
        files.append(
            (name, await asyncio.to_thread(_model_file, name, sources, locations))
        )
    chooses = not options.on_order and (EMBEDDED in engines or not sources)
    if not files and chooses:
        files = [await asyncio.to_thread(_local_model, locations, options.memory)]
    for name, path in files:
        assert path is not None
        sources.append(await _open_file(name, path, options, stack))
    return sources


def limit_models(
    sources: Sequence[EngineSource], limit: int | None
) -> tuple[list[EngineSource], list[str]]:
    """Return sources with at most ``limit`` models, and the names of the others.

    Models for chats come first.  A changed order in the engine has no effect.
    """
    if limit is None:
        return list(sources), []
    offered = [
        (number, model)
        for number, source in enumerate(sources)
        for model in source.offered_models(source.engine.models)
    ]
    offered.sort(key=lambda each: JobKind.CHAT not in each[1].kinds)
    taken: dict[int, list[str]] = {}
    for number, model in offered[:limit]:
        # The name may contain pattern characters.
        taken.setdefault(number, []).append(escape(model.name))
    return [
        replace(sources[number], names=tuple(names)) for number, names in taken.items()
    ], [model.name for _, model in offered[limit:]]


def parse_model_option(text: str) -> tuple[str, Path | None]:
    """Split ``NAME[=PATH]``; a path alone takes the name of its file.

    Raises ConfigError if the name or the path is empty.
    """
    name, equals, path = text.partition("=")
    if not equals and name.endswith(".gguf"):
        return Path(name).stem, Path(name).expanduser()
    if not name or (equals and not path):
        raise ConfigError(f"model {text!r}: expected NAME or NAME=PATH")
    return name, Path(path).expanduser() if equals else None


def select_models(
    models: Sequence[ServedModel], names: Sequence[str]
) -> Sequence[ServedModel]:
    """Return the models that match one of the names or patterns.

    A name without a tag selects ``:latest``, offered without the tag.
    """
    picked: dict[str, ServedModel] = {}
    for name in names:
        for model in models:
            if fnmatchcase(model.name, name):
                picked[model.name] = model
            elif model.name == name + LATEST:
                picked[name] = structs.replace(model, name=name)
    return list(picked.values())


async def _open_server(
    url: str,
    options: EngineOptions,
    names: tuple[str, ...],
    locations: SearchLocations,
    stack: AsyncExitStack,
) -> EngineSource:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"engine {url!r}: expected {AUTO!r}, {EMBEDDED!r}, 'ray', 'dask' or an "
            "http:// URL"
        )
    exact = [name for name in names if not _is_pattern(name)]
    engine = OpenAIEngine(
        *(url, exact),
        slots=options.slots,
        api_key=options.api_key,
        any_field=options.any_field,
        control=_control(url, locations) if options.on_order else None,
    )
    stack.push_async_callback(engine.close)
    await _start_when_loaded(engine)
    location = urlsplit(engine.url)
    label = str(location.port or location.hostname)
    if location.hostname != local_servers.LOOPBACK:
        label = f"{location.hostname}-{location.port}" if location.port else label
    return EngineSource(label, engine, names)


def _control(
    url: str, locations: SearchLocations
) -> Callable[[QueryServer], ServerControl]:
    """Return what makes the control of a server; one here can read adapters here."""
    if _is_here(url):
        return partial(
            ServerControl, find_adapters=partial(find_adapters, locations.files)
        )
    return ServerControl


def _is_here(url: str) -> bool:
    return urlsplit(url).hostname in (local_servers.LOOPBACK, "localhost", "::1")


async def _start_when_loaded(engine: OpenAIEngine) -> None:
    """Start an engine; wait for one that is loading its model, as long as that takes.

    Machines and their programs start in any order.  Raises ConfigError.
    """
    logged = False
    while True:
        try:
            await engine.start()
        except EngineLoading as error:
            if not logged:
                log.warning("waiting until the engine is ready: %s", error)
            logged = True
            await asyncio.sleep(LOADING_RETRY)
        else:
            return


async def _open_file(
    name: str, path: Path, options: EngineOptions, stack: AsyncExitStack
) -> EngineSource:
    engine = await open_file(
        name,
        path,
        slots=options.slots or SLOTS,
        context=options.context or CONTEXT,
        threads=options.threads,
    )
    stack.push_async_callback(engine.close)
    return EngineSource(EMBEDDED, engine, file=path, is_unloaded=True)


async def open_file(
    name: str, path: Path, *, slots: int, context: int, threads: int
) -> LlamaEngine:
    """Return an engine for a GGUF file, which is not loaded yet; the caller closes it.

    Raises ConfigError.
    """
    await asyncio.to_thread(check_installed, path)
    return LlamaEngine(
        name,
        path,
        projector=await asyncio.to_thread(gguf_files.projector_of, path),
        slots=slots,
        context=context,
        threads=threads or None,
        kinds=await asyncio.to_thread(gguf_files.kinds_of, path),
    )


def _is_pattern(name: str) -> bool:
    return not set("*?[").isdisjoint(name)


def _offers_model(source: EngineSource, name: str) -> bool:
    return bool(select_models(source.known_models, (name,)))


def _missing_model_message(sources: Sequence[EngineSource], name: str) -> str:
    offered = [model.name for each in sources for model in each.known_models]
    listed = ascii(", ".join(offered[:LISTED_MAX]))[1:-1]
    subject = "the engine does" if len(sources) == 1 else "the engines do"
    return f"{subject} not have {name!r}, but {listed}"


def _model_file(
    name: str, sources: Sequence[EngineSource], locations: SearchLocations
) -> Path:
    """Return the GGUF file of a model that no server has."""
    if (path := gguf_files.find_model(locations.files, name)) is not None:
        return path
    if name == gguf_files.DEMO_MODEL:
        return gguf_files.demo_model_path()
    reason = "no engine on this machine has it"
    if sources:
        reason = _missing_model_message(sources, name)
    file = "NAME" if _is_pattern(name) else name
    raise ConfigError(
        f"model {name!r}: {reason}, and there is no GGUF file of that name; give its "
        f"file, as {file}=FILE.gguf"
    )


def _local_model(locations: SearchLocations, memory: int) -> tuple[str, Path]:
    """Return a local model and its file."""
    path = gguf_files.largest_fitting_model(locations.files, limit=memory)
    if path is not None:
        return path.stem, path
    if gguf_files.has_demo_model():
        return gguf_files.DEMO_MODEL, gguf_files.demo_model_path()
    ports = ", ".join(f"{each.servers} ({each.port})" for each in locations.servers)
    raise ConfigError(
        f"nothing here runs models: no server at the usual ports ({ports}), no GGUF "
        f"file that fits into memory in {locations.files[0].folder} or other programs' "
        "folders. Start a server, or name a file with --model NAME=FILE.gguf, or "
        f"install a small model: {gguf_files.install_demo_model()}; to call Python "
        "functions instead, give --tasks MODULE"
    )
