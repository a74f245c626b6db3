"""Fetches a model in chunks, from several peers at once."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Container,
    Iterable,
    Sequence,
)
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from shoal.domain.errors import (
    ConfigError,
    PeerError,
    ShoalError,
    Unavailable,
    UnknownModel,
)
from shoal.domain.model_messages import (
    ChunksElsewhere,
    ChunkSent,
    ChunksHeld,
    ChunksRefused,
    ChunksRequest,
    HashingModel,
    ManifestAnswer,
    ManifestRequest,
    ModelMessage,
    SeederAt,
)
from shoal.models import manifest
from shoal.models.bulk_connection import BulkChunk, ReadInto
from shoal.models.chunk_selection import ChunkSelection
from shoal.models.chunk_senders import ByteRate
from shoal.models.download import DownloadedModel, DownloadRequest, ModelDownload
from shoal.models.file_hashes import FileHashes
from shoal.models.manifest import Manifest
from shoal.models.model_folder import check_target
from shoal.models.names import model_folder_name
from shoal.models.partial_model import PartialModel
from shoal.models.peer_connection import DialledPeer, PeerConnection
from shoal.models.seed_server import OpenPort, seeding
from shoal.transports.clock import LoopClock
from shoal.transports.own_networks import Network, is_near, own_networks

RETRY_FIRST = 0.5  # seconds until a lost source is dialled again, then twice as long
RETRIES_MAX = 4  # without a chunk in between
MANIFEST_TIMEOUT = 100.0  # seconds without progress of a source that hashes the model
STARVED_TIMEOUT = 60.0  # seconds in which nothing can be requested
BULKS_MAX = 2  # sources with a bulk connection, each with the memory of some chunks
BULK_TRIES_MAX = 3  # connections to a source, after which it gets no bulk connection
SOURCES_MAX = 32  # that were given, and others that fetch the model, too
UNWRITTEN_MAX = 16  # chunks that have arrived, above which no more are requested

log = logging.getLogger("shoal.models")

OnProgress = Callable[[int, int | None], None]
"""Receives the bytes that are held, and those of the model, if they are known."""


class ChunkConnection(Protocol):
    """A connection to a source, as ``PeerConnection``."""

    sends_chunks: bool
    receive: Callable[[ModelMessage], None]
    on_lost: Callable[[ShoalError], None]

    def send(self, message: ModelMessage) -> bool: ...

    def speed_up(
        self,
        is_right: Callable[[int, memoryview], bool],
        on_chunk: Callable[[BulkChunk], None],
    ) -> None:
        """Use a bulk connection for the chunks, if there may be one."""

    def leave(self) -> None: ...


class ModelPeer(Protocol):
    """A peer that may send a model, named by its ``url``."""

    @property
    def url(self) -> str: ...

    def connect(self) -> AbstractAsyncContextManager[ChunkConnection]:
        """Return a connection to it, once it has admitted this peer, for a block.

        Raises ShoalError; Unavailable: it may be tried again.
        """


class ChunkStore(Protocol):
    """What keeps the chunks of a manifest that are fetched, as ``PartialModel``.

    ``wanted`` are those that it needs, by number; a write may add others.  Its methods
    block on the disk, and raise ConfigError if that fails.
    """

    @property
    def manifest(self) -> Manifest: ...

    @property
    def wanted(self) -> Collection[int]: ...

    def begin(self, donors: Iterable[Path], hashes: FileHashes) -> set[int]:
        """Open it; return the chunks that it has, or has copied from ``donors``."""

    def write(
        self,
        chunks: Iterable[tuple[int, bytes | memoryview]],
        checked: Container[int] = (),
    ) -> set[int]:
        """Keep the chunks that have their hashes, or are ``checked``; return those."""

    def commit(self) -> Path:
        """Make what was fetched usable; return where it is."""

    def close(self) -> None:
        """Close it; what was not committed stays, for the next fetch."""


async def fetch_model(
    model: str,
    sources: Sequence[ModelPeer],
    folder: Path,
    *,
    address: str = "",
    replace: bool = False,
    progress: OnProgress = lambda held, size: None,
    donors: Iterable[Path] = (),
    hashes: FileHashes | None = None,
    whole: DownloadRequest | None = None,
    open_port: OpenPort | None = None,
    rate: ByteRate | None = None,
    introducers: Sequence[ModelPeer] = (),
) -> DownloadedModel:
    """Fetch a model into its folder below ``folder``; return where it is.

    All ``sources`` send parts of it; those that fail are left out.  What an earlier
    call has fetched, and chunks that ``donors`` have, are not fetched again.  Cancel
    the task to stop: what has arrived stays, and the next call goes on.

    ``address`` is the content address that the model must have; empty: that of the
    source that answers first.  ``replace`` permits the replacement of an existing
    model.  From a single source that sends no chunks, the model is copied as a whole,
    as ``whole`` says.  With ``open_port``, others that fetch the model from the same
    sources get what has arrived here, within the ``rate``, and send what they have.
    The ``introducers`` do not have the model, and only tell those that fetch it of each
    other.

    Raises UnknownModel if no source shares it, ConfigError if it cannot be stored, and
    Unavailable if all sources have failed, each with its reason.
    """
    root = manifest.parse_address(address) if address else b""
    whole = whole or DownloadRequest(model, folder, replace)
    target = whole.folder / model_folder_name(model)
    await asyncio.to_thread(check_target, target, replace=whole.replace)
    hashes = hashes or FileHashes()

    def open_store(content: Manifest) -> PartialModel:
        return PartialModel(whole.folder, model, content, replace=whole.replace)

    fetch = _Fetch(
        *(model, open_store, root, progress, [*donors], hashes),
        *(whole, open_port, rate or ByteRate()),
    )
    return await fetch.run(sources, introducers)


async def fetch_parts(
    model: str,
    sources: Sequence[ModelPeer],
    open_store: Callable[[Manifest], ChunkStore],
    *,
    address: str = "",
    progress: OnProgress = lambda held, size: None,
    donors: Iterable[Path] = (),
    hashes: FileHashes | None = None,
) -> Path:
    """Fetch the chunks of a model that a store wants; return what its commit returns.

    Otherwise as ``fetch_model``; also raises PeerError if no source sends chunks.
    """
    root = manifest.parse_address(address) if address else b""
    hashes = hashes or FileHashes()
    fetch = _Fetch(model, open_store, root, progress, [*donors], hashes)
    return (await fetch.run(sources, ())).path


def _keep() -> None:
    pass


class _Arrival(NamedTuple):
    """A chunk that was requested; ``is_right`` None: it is not checked yet."""

    source: str
    chunk: int
    data: bytes | memoryview
    is_right: bool | None = None
    release: Callable[[], None] = _keep


@dataclass(frozen=True, slots=True)
class _Held:
    """What is held of a model, for others that fetch it."""

    _model: PartialModel
    _selection: ChunkSelection

    @property
    def manifest(self) -> Manifest:
        return self._model.manifest

    @property
    def held(self) -> bytes:
        return np.packbits(self._selection.held, bitorder="little").tobytes()

    async def reader(self, chunk: int) -> ReadInto:
        """Return what reads a chunk that is held.  Raises Unavailable."""
        if not self._selection.held[chunk]:
            raise Unavailable("it has no such chunk yet")
        return partial(self._model.read, chunk)


@dataclass(slots=True, eq=False)
class _Fetch:
    """The fetch of one model; ``_alive`` are the sources that may still send."""

    _model: str
    _open_store: Callable[[Manifest], ChunkStore]
    _root: bytes
    _progress: OnProgress
    _donors: Sequence[Path]
    _hashes: FileHashes
    _whole_request: DownloadRequest | None = None  # None: only chunks are of use
    _open_port: OpenPort | None = None
    _rate: ByteRate = field(default_factory=ByteRate)
    _given: set[str] = field(default_factory=set)  # sources; others were found
    _introducers: set[str] = field(default_factory=set)  # which have nothing of it
    _alive: set[str] = field(default_factory=set)
    _errors: dict[str, ShoalError] = field(default_factory=dict)
    _connections: dict[str, ChunkConnection] = field(default_factory=dict)
    _connected: Counter[str] = field(default_factory=Counter)  # how often
    _sped_up: set[str] = field(default_factory=set)  # may have a bulk connection
    _available: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    _manifest: Manifest | None = None
    _selection: ChunkSelection | None = None
    _arrivals: deque[_Arrival] = field(default_factory=deque)
    _hashed: dict[str, int] = field(default_factory=dict)  # bytes, by source
    _using: list[asyncio.Task[None]] = field(default_factory=list)
    _whole: DownloadedModel | ShoalError | None = None
    _seeder: SeederAt | None = None  # this end
    _tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _clock: LoopClock = field(default_factory=LoopClock)
    _networks: Collection[Network] = field(default_factory=own_networks)

    async def run(
        self, sources: Sequence[ModelPeer], introducers: Sequence[ModelPeer]
    ) -> DownloadedModel:
        self._introducers = {each.url for each in introducers}
        self._given = {each.url for each in sources} | self._introducers
        outcome: DownloadedModel | ShoalError
        async with self._tasks:
            for each in (*sources, *introducers):
                self._begin_using(each)
            try:
                outcome = await self._fetch()
            except ShoalError as error:
                outcome = error
            for task in self._using:
                task.cancel()
        if isinstance(outcome, ShoalError):
            raise outcome
        return outcome

    # Sources.

    def _begin_using(self, peer: ModelPeer) -> None:
        """Use a source, once."""
        if peer.url not in self._alive:
            self._alive.add(peer.url)
            self._using.append(self._tasks.create_task(self._use(peer.url, peer)))

    async def _use(self, name: str, peer: ModelPeer) -> None:
        """Get what one source sends, until it fails for good."""
        retries = 0
        while True:
            held = self._held_bytes
            try:
                await self._use_connection(name, peer)
                return
            except Unavailable as error:
                retries = 0 if self._held_bytes > held else retries + 1
                if name not in self._alive:
                    return
                if self._manifest is None or retries > RETRIES_MAX:
                    self._fail(name, error)
                    return
            except ShoalError as error:
                self._fail(name, error)
                return
            await asyncio.sleep(RETRY_FIRST * 2 ** max(retries - 1, 0))

    async def _use_connection(self, name: str, peer: ModelPeer) -> None:
        """Get what one source sends over one connection.  Raises ShoalError."""
        lost = asyncio.get_running_loop().create_future()
        async with peer.connect() as connection:
            if not isinstance(connection, PeerConnection):
                pass
            elif not connection.sends_chunks:
                if self._whole_request is None or len(self._given) > 1:
                    raise PeerError("it sends no chunks: copy from it alone")
                await self._copy_whole(connection, self._whole_request)
                return

            def on_lost(error: ShoalError) -> None:
                if not lost.done():
                    lost.set_result(error)

            connection.on_lost = on_lost
            connection.receive = partial(self._receive, name)
            self._connections[name] = connection
            self._connected[name] += 1
            try:
                if name in self._introducers:
                    self._announce(name)
                else:
                    connection.send(ManifestRequest(self._model, bulk=True))
                    await self._until_answered(name, lost)
                raise await lost
            finally:
                self._hashed.pop(name, None)
                self._sped_up.discard(name)
                del self._connections[name]
                self._remove(name)  # before it is closed, which may take a while

    async def _until_answered(
        self, name: str, lost: "asyncio.Future[ShoalError]"
    ) -> None:
        """Wait until a source is lost, or has answered.

        Raises Unavailable if it neither answers nor says that it goes on hashing.
        """
        before, self._hashed[name] = -1, 0
        while not lost.done() and (hashed := self._hashed.get(name)) is not None:
            if hashed <= before:
                raise Unavailable(
                    f"it has sent nothing of the model for {MANIFEST_TIMEOUT:g} s"
                )
            before = hashed
            await asyncio.wait((lost,), timeout=MANIFEST_TIMEOUT)

    async def _copy_whole(
        self, connection: PeerConnection, request: DownloadRequest
    ) -> None:
        """Copy the model from a peer that sends no chunks."""
        download = ModelDownload(request, connection.send, self._progress)
        connection.receive, connection.on_lost = (
            download.receive,
            download.on_disconnect,
        )
        connection.wait_for_room = download.wait_for_room
        try:
            self._whole = await download.run()
        except ShoalError as error:
            self._whole = error
        self._changed.set()

    def _receive(self, name: str, message: ModelMessage) -> None:
        if name not in self._alive:
            return
        match message:
            case HashingModel(model=self._model, hashed=hashed):
                if hashed > self._hashed.get(name, hashed):
                    self._hashed[name] = hashed
                    if self._manifest is None:
                        self._progress(0, None)
            case ManifestAnswer(model=self._model):
                self._hashed.pop(name, None)
                try:
                    self._on_manifest(name, message)
                except ShoalError as error:
                    self._fail(name, error)
            case ChunkSent(root=self._root, chunk=chunk, data=data):
                self._on_chunk(_Arrival(name, chunk, data))
            case ChunksHeld(root=self._root, chunks=chunks) if self._manifest:
                has = np.zeros(self._manifest.chunks, bool)
                has[[each for each in chunks if 0 <= each < len(has)]] = True
                self._on_available(name, has)
            case ChunksElsewhere(root=self._root, chunks=chunks) if self._selection:
                self._selection.on_elsewhere(name, chunks, self._clock.now())
                self._send_requests()
            case SeederAt(root=self._root, url=url, passcode=passcode) if (
                name in self._given and self._seeder is not None
            ):
                # The passcode is proved, not sent, on what this scheme encrypts.
                is_other = url.startswith("http://") and url != self._seeder.url
                if is_other and len(self._using) < SOURCES_MAX and self._selection:
                    self._selection.shuffle(uuid4().int)
                    self._begin_using(DialledPeer(url, passcode=passcode))
            case ChunksRefused(root=self._root, reason=reason):
                # It may have others by now, or the model again.
                self._connections[name].on_lost(Unavailable(reason))
            case _:
                pass

    def _on_manifest(self, name: str, answer: ManifestAnswer) -> None:
        """Use a source.  Raises ShoalError if it has not this model."""
        if not answer.manifest:
            raise UnknownModel(
                f"the peer does not share {answer.model}: {answer.reason}"
            )
        found = manifest.decode(answer.manifest)
        if self._root and found.root != self._root:
            raise PeerError(
                f"it has another model of this name: {found.address}, expected "
                f"{manifest.SCHEME}{self._root.hex()}"
            )
        if self._manifest is None:
            self._manifest, self._root = found, found.root
        bits = np.frombuffer(answer.held, np.uint8)
        has = np.ones(found.chunks, bool)
        if answer.held:
            if len(answer.held) != -(-found.chunks // 8):
                raise PeerError("what it has is not of this model")
            has = np.unpackbits(bits, bitorder="little")[: found.chunks].astype(bool)
        self._on_available(name, has)
        self._announce(name)

    def _announce_all(self, here: SeederAt) -> None:
        """Tell the sources of this end: an empty URL says that it only receives."""
        self._seeder = here
        for name in self._connections:
            self._announce(name)

    def _announce(self, name: str) -> None:
        """Tell a source of the port here, so that others hear of it."""
        if self._seeder is not None and name in self._given:
            self._connections[name].send(self._seeder)

    def _on_available(self, name: str, has: npt.NDArray[np.bool_]) -> None:
        if self._selection is None:
            self._available[name] = self._available.get(name, False) | has
        else:
            if name not in self._selection.sources:
                near = is_near(name, self._networks)
                self._selection.add_source(name, self._clock.now(), near=near)
            self._selection.on_available(name, has)
        self._changed.set()

    def _on_bulk_chunk(self, name: str, arrived: BulkChunk) -> None:
        chunk, data, is_right, release = arrived
        self._on_chunk(_Arrival(name, chunk, data, is_right, release))

    def _on_chunk(self, arrival: _Arrival) -> None:
        name, selection, content = arrival.source, self._selection, self._manifest
        if selection is None or content is None:
            return
        if not selection.expects(name, arrival.chunk, self._clock.now()):
            arrival.release()
            self._fail_dropped(name)
            return
        if selection.is_fast(name):
            self._speed_up(name, content)
        self._arrivals.append(arrival)
        self._changed.set()

    def _speed_up(self, name: str, content: Manifest) -> None:
        """Let a fast source use a bulk connection, if that has not failed often."""
        if (
            name not in self._sped_up
            and len(self._sped_up) < BULKS_MAX
            and self._connected[name] <= BULK_TRIES_MAX
        ):
            self._sped_up.add(name)
            on_chunk = partial(self._on_bulk_chunk, name)
            self._connections[name].speed_up(content.has_hash, on_chunk)

    def _remove(self, name: str) -> None:
        self._available.pop(name, None)
        if self._selection is not None:
            self._selection.remove_source(name)
        self._changed.set()

    def _fail(self, name: str, error: ShoalError) -> None:
        """Use a source no more."""
        self._remove(name)
        self._alive.discard(name)
        self._errors[name] = error
        if (connection := self._connections.get(name)) is not None:
            connection.leave()

    def _fail_dropped(self, name: str) -> None:
        """Use a source no more that the selection has dropped."""
        assert self._selection is not None, "chunks are requested"
        if name in self._alive and name in self._selection.failures:
            self._fail(name, PeerError(self._selection.failures[name]))

    # The model.

    @property
    def _held_bytes(self) -> int:
        if self._selection is None or self._manifest is None:
            return 0
        held = self._selection.held_count * manifest.CHUNK
        return min(held, self._manifest.size)

    def _report_progress(self) -> None:
        if self._selection is not None and self._manifest is not None:
            wanted = self._selection.wanted_count * manifest.CHUNK
            self._progress(self._held_bytes, min(wanted, self._manifest.size))

    async def _fetch(self) -> DownloadedModel:
        """Fetch the model from the sources, as they come and go.  Raises ShoalError."""
        content = await self._first_manifest()
        if content is None:
            assert self._whole is not None, "the model was copied as a whole"
            if isinstance(self._whole, ShoalError):
                raise self._whole
            return self._whole
        store = self._open_store(content)
        loop = asyncio.get_running_loop()
        # One thread, so that closing comes after all writes.
        with ThreadPoolExecutor(1, "fetch") as disk:
            try:
                held = await loop.run_in_executor(
                    disk, store.begin, self._donors, self._hashes
                )
                self._selection = ChunkSelection(content.chunks, held, store.wanted)
                if self._introducers:  # others may begin at this moment
                    self._selection.shuffle(uuid4().int)
                for name, has in self._available.items():
                    self._on_available(name, has)
                async with self._seeding(store, self._selection) as on_held:
                    await self._fetch_chunks(store, disk, on_held)
                path = await loop.run_in_executor(disk, store.commit)
            finally:
                await asyncio.shield(loop.run_in_executor(disk, store.close))
        return DownloadedModel(path, content.size, len(content.files), content.address)

    async def _first_manifest(self) -> Manifest | None:
        """Return the manifest; None: the model was copied as a whole."""
        while self._manifest is None and self._whole is None:
            self._raise_if_alone()
            self._changed.clear()
            await self._changed.wait()
        return self._manifest

    @asynccontextmanager
    async def _seeding(
        self, store: ChunkStore, selection: ChunkSelection
    ) -> AsyncIterator[Callable[[int], None]]:
        """Send others what is held; yields what has to hear of more.

        A port that cannot be opened only makes the others wait for longer.
        """
        open_port = self._open_port
        if not isinstance(store, PartialModel):  # it is told who does
            self._announce_all(SeederAt(store.manifest.root, "", ""))
            yield lambda chunk: None
            return
        if open_port is None or selection.complete:
            yield lambda chunk: None
            return
        content = _Held(store, selection)
        async with AsyncExitStack() as stack:
            port = seeding(self._model, content, open_port, self._tasks, self._rate)
            try:
                server, here = await stack.enter_async_context(port)
            except ConfigError as error:
                log.warning("others get nothing from here: %s", error)
                yield lambda chunk: None
                return
            self._announce_all(here)
            yield server.on_held
            for task in self._using:
                task.cancel()  # which shows others that this end needs nothing
            await server.wait_for_others()

    async def _fetch_chunks(
        self,
        store: ChunkStore,
        disk: Executor,
        on_held: Callable[[int], None],
    ) -> None:
        """Fetch until all chunks are held that are wanted.  Raises ShoalError."""
        loop, selection = asyncio.get_running_loop(), self._selection
        assert selection is not None, "the manifest is known"
        self._report_progress()
        while not selection.complete:
            self._send_requests()
            deadline = selection.drop_silent(self._clock.now())
            if failed := self._alive.intersection(selection.failures):
                for name in failed:
                    self._fail_dropped(name)
                continue  # with others
            if not self._arrivals:
                self._raise_if_alone()
                await self._wait(deadline)
                continue
            # In one call: after each, the thread waits for the interpreter's lock.
            arrived = [*self._arrivals]
            self._arrivals.clear()
            right = await loop.run_in_executor(
                *(disk, store.write),
                [
                    (each.chunk, each.data)
                    for each in arrived
                    if each.is_right is not False
                ],
                {each.chunk for each in arrived if each.is_right},
            )
            for each in arrived:
                each.release()
                is_right = each.chunk in right
                selection.on_checked(each.source, each.chunk, right=is_right)
                if is_right:
                    on_held(each.chunk)
            if len(store.wanted) > selection.wanted_count:
                selection.want(store.wanted)
            self._report_progress()

    async def _wait(self, deadline: float | None) -> None:
        """Wait for a change, or until sources must be looked at."""
        self._changed.clear()
        now = self._clock.now()
        try:
            async with asyncio.timeout(
                STARVED_TIMEOUT if deadline is None else max(deadline - now, 0.0)
            ):
                await self._changed.wait()
        except TimeoutError:
            if deadline is None:
                raise Unavailable(
                    f"no source has had the missing parts of {self._model} for "
                    f"{STARVED_TIMEOUT:g} s: name one that has all of it"
                ) from None

    def _send_requests(self) -> None:
        if self._selection is None or len(self._arrivals) >= UNWRITTEN_MAX:
            return
        chunks: dict[str, list[int]] = {}
        for name, chunk in self._selection.requests(self._clock.now()):
            chunks.setdefault(name, []).append(chunk)
        for name, wanted in chunks.items():
            self._connections[name].send(ChunksRequest(self._root, wanted))

    def _raise_if_alone(self) -> None:
        """Raise what has gone wrong if no source is left."""
        if self._alive - self._introducers:
            return
        kept = ""
        if self._held_bytes:
            kept = "; what has arrived is kept: run it again to go on"
        sources = self._given - self._introducers
        if len(sources) == 1:
            error = self._errors[next(iter(sources))]
            if not kept:
                raise error
            raise Unavailable(f"{error}{kept}") from error
        every = "; ".join(f"{name}: {each}" for name, each in self._errors.items())
        kind = UnknownModel if self._all_unknown else Unavailable
        raise kind(f"no source of {self._model} is left: {every}{kept}")

    @property
    def _all_unknown(self) -> bool:
        return all(isinstance(each, UnknownModel) for each in self._errors.values())
