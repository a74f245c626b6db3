"""Answers peers' queries about the library, and sends them its models.

To peers that know them, it sends the chunks that they request; to others whole files.
There a refusal is a ``ModelAnswer`` without the model, which has no field for the
reason.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from shoal.domain.errors import ShoalError
from shoal.domain.model_messages import (
    ChunksElsewhere,
    ChunkSent,
    ChunksHeld,
    ChunksRefused,
    ChunksRequest,
    HashingModel,
    ManifestAnswer,
    ManifestRequest,
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelMessage,
    ModelQuery,
    ModelRequest,
    SeederAt,
    SendModelMessage,
    WaitUntilWritable,
)
from shoal.models.bulk_connection import ReadInto
from shoal.models.chunk_senders import ByteRate, ChunkedModel, ChunkSenders, Receiver
from shoal.models.file_hashes import FileHashes, identity, read_chunk
from shoal.models.library import (
    FilePiece,
    Library,
    NotShareable,
    SharedModel,
    read_pieces,
)
from shoal.models.manifest import Manifest
from shoal.models.remote_models import RemoteModel, RemoteModels
from shoal.models.seed_server import OpenPort, Seeders, seeding
from shoal.models.sources import FoundModel, ModelSource, ModelSources

SENDING_MAX = 8  # models at a time
SENDING_TO_PEER_MAX = 2  # of them
QUERIES_MAX = 16  # pending queries of a peer; it may repeat dropped ones
STALL_TIMEOUT = 60.0  # seconds for a peer to read a piece
ID_MAX = 64  # characters of a transfer id
MODELS_MAX = 32  # whose manifests are in memory
HASHING_INTERVAL = 5.0  # seconds between words about a manifest that takes a while
LOGGED_MAX = 1000  # logged refusals that are not repeated

log = logging.getLogger("shoal.models")


@dataclass(frozen=True, slots=True)
class _LocalModel:
    """A model of the library, with the identity of each of its files."""

    name: str
    manifest: Manifest
    model: SharedModel
    identities: tuple[tuple[int, int, int], ...]
    held = b""  # all of it

    async def reader(self, chunk: int) -> ReadInto:
        place = self.manifest.place(chunk)
        path, expected = self.model.files[place.file].path, self.identities[place.file]
        return partial(read_chunk, path, place, expected)


class LibraryServer:
    """Shares a library with any number of peers within an ``async with`` block.

    Leaving the block aborts all transfers.  ``sources`` are the peers that may share
    models themselves; those of some are passed on to the others.  ``hashes`` are those
    of the library's files, and ``rate`` limits the bytes a second that all get.

    ``find_port`` returns what opens a port on the network of a coordinator, or None:
    the machines for which the coordinator passes a model on get it from there, too, if
    they can.  It blocks.
    """

    def __init__(
        self,
        library: Library,
        hashes: FileHashes | None = None,
        rate: int = 0,
        find_port: Callable[[], OpenPort | None] = lambda: None,
    ) -> None:
        self._library = library
        self._hashes = hashes or FileHashes()
        self.rate = ByteRate(rate)
        self.sources = ModelSources()
        self._tasks = asyncio.TaskGroup()
        self._remote = RemoteModels(self.sources, self._tasks)
        self._senders = ChunkSenders(self._tasks, self.rate)
        self.bulk = self._senders.bulk
        self._seeders = Seeders()
        self._find_port = find_port
        self._seeding: dict[bytes, asyncio.Task[None]] = {}  # by the model's address
        self._local: OrderedDict[bytes, _LocalModel] = OrderedDict()
        self._hashing = asyncio.Lock()  # one disk
        self._queries: Counter[str] = Counter()  # by peer
        self._sending: dict[tuple[str, str], asyncio.Task[None]] = {}  # by peer, number
        self._logged: set[tuple[str, str]] = set()

    async def __aenter__(self) -> "LibraryServer":
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hashes.close()
        self._remote.close()
        self._senders.close()
        for task in (*self._sending.values(), *self._seeding.values()):
            task.cancel()
        await self._tasks.__aexit__(kind, error, trace)

    def share(self, models: Mapping[str, Path]) -> None:
        """Share other models beside those of the start."""
        self._library.share(models)

    def on_message(
        self,
        peer: str,
        message: ModelMessage,
        send: SendModelMessage,
        wait_writable: WaitUntilWritable,
    ) -> None:
        """Process a message of a peer, without waiting; the answer follows.

        ``peer`` identifies the peer.
        """
        requester = Receiver(peer, send, wait_writable)
        match message:
            case ModelQuery():
                self._query(requester, message)
            case ModelRequest():
                self._request(requester, message)
            case ManifestRequest():
                self._query(requester, message)
            case ChunksRequest():
                self._request_chunks(requester, message)
            case SeederAt():
                if self._seeders.add(requester, message):
                    self._seed(requester, message)
            case HashingModel() | ManifestAnswer() | ChunkSent() | ChunksRefused():
                self._remote.receive(peer, message)
            case ModelChunk() | ModelDone() | ChunksHeld() | ChunksElsewhere():
                self._log_refusal(peer, "it sends a model without a request")
            case ModelAnswer():
                if not self.sources.receive(peer, message):
                    self._log_refusal(peer, "it answers without a query")
            case _:
                raise AssertionError(f"unknown message {type(message).__name__}")

    def on_peer_joined(
        self, peer: str, send: SendModelMessage, *, passed_on: bool = False
    ) -> None:
        """Add a peer that may share models; ``passed_on``: see ``ModelSource``."""
        self.sources.add(ModelSource(peer, send, passed_on))

    def on_peer_left(self, peer: str) -> None:
        """Abort transfers to a peer at once, not only at the next piece."""
        self.sources.remove(peer)
        self._remote.on_source_left(peer)
        self._senders.on_peer_left(peer)
        self._seeders.remove(peer)
        for (name, _), sending in self._sending.items():
            if name == peer:
                sending.cancel()

    async def own_size(self, model: str) -> int | None:
        """Return the size of a model of the library in bytes; None if it has none."""
        try:
            found = await asyncio.to_thread(self._library.find, model)
        except NotShareable:
            return None
        return None if found is None else found.size

    def _query(self, requester: Receiver, query: ModelQuery | ManifestRequest) -> None:
        if self._queries[requester.name] >= QUERIES_MAX:
            self._log_refusal(requester.name, f"it has {QUERIES_MAX} queries pending")
            return
        self._queries[requester.name] += 1
        answer = (
            self._answer(requester, query.model)
            if isinstance(query, ModelQuery)
            else self._send_manifest(requester, query)
        )
        task = self._tasks.create_task(answer)
        task.add_done_callback(lambda _: self._on_answered(requester.name))

    async def _answer(self, requester: Receiver, name: str) -> None:
        found = await self._find(requester, name)
        copy = await self._find_copy(requester, name) if found is None else found
        size = None if copy is None else copy.size
        requester.send(ModelAnswer(name, copy is not None, size))

    async def _send_manifest(
        self, requester: Receiver, request: ManifestRequest
    ) -> None:
        name, bulk = request.model, b""
        reason = "a coordinator shares the models of its --share and of its workers"
        telling = self._tasks.create_task(self._tell_hashing(requester, name))
        model: ChunkedModel | None = None
        try:
            model = await self._local_model(name)
            if model is None:
                model = await self._remote.find(name, requester.name)
        except NotShareable as error:
            self._log_refusal(requester.name, f"{name} cannot be shared: {error}")
            reason = "its files cannot be shared: its log says why"
        finally:
            telling.cancel()
        if model is None:
            requester.send(ManifestAnswer(name, b"", reason))
            return
        if request.bulk:
            bulk = self.bulk.offer(requester.name, model.manifest.root)
        requester.send(ManifestAnswer(name, model.manifest.encoded, bulk=bulk))

    async def _tell_hashing(self, requester: Receiver, name: str) -> None:
        """Say from time to time that hashing a model goes on, here or at workers."""
        hashed = said = 0
        while True:
            before = self._hashes.hashed + self._remote.hashed(name)
            await asyncio.sleep(HASHING_INTERVAL)
            # Less once a worker has answered.
            hashed += max(0, self._hashes.hashed + self._remote.hashed(name) - before)
            if hashed > said:
                requester.send(HashingModel(name, hashed))
                said = hashed

    async def _local_model(self, name: str) -> _LocalModel | None:
        """Return a model of the library, hashed; None if it has none of the name.

        Raises NotShareable.
        """
        async with self._hashing:
            found = await asyncio.to_thread(self._library.find, name)
            if found is None:
                return None
            local = await asyncio.to_thread(self._hash, name, found)
        self._local[local.manifest.root] = local
        self._local.move_to_end(local.manifest.root)
        if len(self._local) > MODELS_MAX:
            self._local.popitem(last=False)
        return local

    def _hash(self, name: str, model: SharedModel) -> _LocalModel:
        """Hash a model's files, if they are not known.  Raises NotShareable."""
        try:
            before = tuple(identity(each.path.stat()) for each in model.files)
        except OSError as error:
            raise NotShareable(f"{error.filename}: {error.strerror}") from error
        return _LocalModel(name, self._hashes.manifest(model), model, before)

    def _request_chunks(self, requester: Receiver, request: ChunksRequest) -> None:
        root = request.root
        model = self._local.get(root) or self._remote.get(root)
        reason: str | None = "it has no such model now: ask for its manifest again"
        if model is not None:
            all_chunks = range(model.manifest.chunks)
            existing = [each for each in request.chunks if each in all_chunks]
            elsewhere = self._seeders.elsewhere(requester.name, root, existing)
            if elsewhere:
                requester.send(ChunksElsewhere(root, [*elsewhere]))
            here = [each for each in request.chunks if each not in elsewhere]
            reason = self._senders.request(requester, model, here)
        if reason is not None:
            self._log_refusal(requester.name, reason)
            requester.send(ChunksRefused(root, reason))

    def _seed(self, requester: Receiver, other: SeederAt) -> None:
        """Have a model that another peer fetches sent by the machines that have it.

        A coordinator tells these of it, and they answer with ports of their own.
        """
        root = other.root
        if (remote := self._remote.get(root)) is not None:
            for name in remote.holders.keys() - {requester.name}:
                if (source := self.sources.named(name)) is not None:
                    source.send(other)
        model = self._local.get(root)
        if model is not None and root not in self._seeding:
            self._seeding[root] = task = self._tasks.create_task(
                self._seed_model(model, requester)
            )
            task.add_done_callback(lambda _: self._seeding.pop(root))

    async def _seed_model(self, model: _LocalModel, coordinator: Receiver) -> None:
        """Send a model at a port, as long as peers connect to it."""
        if (open_port := await asyncio.to_thread(self._find_port)) is None:
            return
        port = seeding(model.name, model, open_port, self._tasks, self.rate)
        try:
            async with port as (server, here):
                coordinator.send(here)
                await server.wait_for_others(new=True)
        except ShoalError as error:
            log.warning("no port for model=%s reason=%r", model.name, str(error))

    def _on_answered(self, peer: str) -> None:
        self._queries[peer] -= 1
        if not self._queries[peer]:
            del self._queries[peer]

    def _request(self, requester: Receiver, request: ModelRequest) -> None:
        if (
            reason := self._refusal_reason(requester.name, request.transfer_id)
        ) is not None:
            self._log_refusal(requester.name, reason)
            requester.send(ModelAnswer(request.model, available=False))
            return
        key = requester.name, request.transfer_id
        task = self._tasks.create_task(self._send(requester, request))
        self._sending[key] = task
        task.add_done_callback(lambda _: self._sending.pop(key))

    def _refusal_reason(self, peer: str, number: str) -> str | None:
        """Return why a transfer is refused, or None if it is not."""
        if len(number) > ID_MAX:
            return f"a transfer id has more than {ID_MAX} characters"
        if (peer, number) in self._sending:
            return "it uses the id of a running transfer"
        if sum(name == peer for name, _ in self._sending) >= SENDING_TO_PEER_MAX:
            return f"it has {SENDING_TO_PEER_MAX} transfers running"
        if len(self._sending) >= SENDING_MAX:
            return f"{SENDING_MAX} transfers are running"
        return None

    async def _send(self, requester: Receiver, request: ModelRequest) -> None:
        name = request.model
        if (found := await self._find(requester, name)) is not None:
            size, pieces = found.size, _local_pieces(found)
        elif (remote := await self._remote.find(name, requester.name)) is not None:
            size, pieces = remote.manifest.size, _remote_pieces(remote)
        else:
            requester.send(ModelAnswer(name, available=False))
            return
        log.info("sending model=%s peer=%r bytes=%d", name, requester.name, size)
        try:
            complete = await self._send_pieces(requester, request, pieces)
        except (ShoalError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                error = NotShareable(f"it read nothing for {STALL_TIMEOUT:g} s")
            self._log_refusal(requester.name, f"{name} was aborted: {error}")
            requester.send(ModelAnswer(name, available=False))
            return
        end = "sent" if complete else "stopped"
        log.info("%s model=%s peer=%r", end, name, requester.name)

    async def _send_pieces(
        self,
        requester: Receiver,
        request: ModelRequest,
        pieces: AsyncGenerator[FilePiece, None],
    ) -> bool:
        """Send a model as fast as the peer reads; return False if it disconnected.

        Raises ShoalError, and TimeoutError if the peer does not read.
        """
        async with aclosing(pieces):
            async for piece in pieces:
                await self.rate.take(len(piece.data))
                # A peer that reads nothing must not hold a transfer slot for ever.
                async with asyncio.timeout(STALL_TIMEOUT):
                    await requester.wait_writable()
                if not requester.send(_chunk(request, piece)):
                    return False
        return requester.send(ModelDone(request.transfer_id, request.model))

    async def _find_copy(self, requester: Receiver, name: str) -> FoundModel | None:
        """Return a model that another peer shares and that may be passed on."""
        among = [
            source
            for source in self.sources.all
            if source.passed_on and source.name != requester.name
        ]
        found = await self.sources.find(name, among, first=True)
        return found[0] if found else None

    async def _find(self, requester: Receiver, name: str) -> SharedModel | None:
        try:
            return await asyncio.to_thread(self._library.find, name)
        except NotShareable as error:
            self._log_refusal(requester.name, f"{name} cannot be shared: {error}")
            return None

    def _log_refusal(self, peer: str, text: str) -> None:
        """Log a refusal, once: a flood would fill the disk."""
        if (peer, text) in self._logged:
            return
        if len(self._logged) >= LOGGED_MAX:
            self._logged.clear()
        self._logged.add((peer, text))
        log.warning("refused peer=%r reason=%r", peer, text)


async def _local_pieces(model: SharedModel) -> AsyncGenerator[FilePiece, None]:
    """Yield the pieces of a model of the library.  Raises NotShareable."""
    pieces = read_pieces(model)
    try:
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece
    finally:
        # After a cancellation, a thread may be in it still: it is closed after that.
        with suppress(ValueError):
            pieces.close()


async def _remote_pieces(model: RemoteModel) -> AsyncGenerator[FilePiece, None]:
    """Yield the pieces of a worker's model.  Raises Unavailable."""
    files = model.manifest.files
    for file in files:
        if not file.size:
            yield FilePiece(file.name, 0, b"", True)
    for chunk, place in model.manifest.places():
        file, end = files[place.file], place.offset + place.size
        data = await model.read(chunk)
        yield FilePiece(file.name, place.offset, data, end == file.size)


def _chunk(request: ModelRequest, piece: FilePiece) -> ModelChunk:
    return ModelChunk(
        request.transfer_id, piece.file_name, piece.offset, piece.data, piece.last
    )
