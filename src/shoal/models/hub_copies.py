"""Gets a model of the hub with machines of the pool: these have its very files, or get
parts of it from the hub at the same time.

The hub says which files these are, by their SHA-256: names of models are only a guess
where they may be.  It gives the hash of each file, and none of a chunk: so its manifest
has none either, and the whole files are compared at the end.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.domain.errors import PeerError, ShoalError, Unavailable
from shoal.domain.model_messages import (
    ChunkSent,
    ChunksRequest,
    HashingModel,
    ManifestAnswer,
    ManifestRequest,
    ModelMessage,
)
from shoal.models import manifest
from shoal.models.bulk_connection import BulkChunk
from shoal.models.chunk_senders import ByteRate
from shoal.models.fetch import ModelPeer, OnProgress, fetch_model
from shoal.models.manifest import Manifest, manifest_of_files
from shoal.models.model_hub import ModelHub
from shoal.models.names import GgufModel, base_name
from shoal.models.seed_server import OpenPort

CONNECT_TIMEOUT = 5.0  # seconds
ANSWER_TIMEOUT = 20.0  # seconds without an answer, or a word that hashing goes on


@dataclass(frozen=True, slots=True)
class HubSource:
    """A model in a repository of the hub, of a ``revision``; empty: the latest."""

    hub: ModelHub
    repository: str
    model: GgufModel
    revision: str = ""

    @property
    def url(self) -> str:
        return f"{self.hub.endpoint}/{self.repository}"

    @property
    def manifest(self) -> Manifest:
        """The manifest, without the hashes of chunks.

        Raises PeerError if the names or the hashes of the files cannot be used here.
        """
        files = (
            (base_name(each.name), each.size, bytes.fromhex(each.sha256))
            for each in self.model.files
        )
        try:
            return manifest_of_files(files)
        except ValueError as error:
            raise PeerError(f"{self.url}: no SHA-256: {error}") from error

    @asynccontextmanager
    async def connect(self) -> AsyncIterator["HubConnection"]:
        lost: ShoalError | None = None
        content = self.manifest  # once: it has 32 bytes for each chunk
        async with asyncio.TaskGroup() as tasks:
            connection = HubConnection(self, content, tasks)
            try:
                yield connection
            except ShoalError as error:
                lost = error  # the group would wrap it
            finally:
                connection.leave()
        if lost is not None:
            raise lost


class HubConnection:
    """Answers as a peer does that has the whole model."""

    def __init__(
        self, source: HubSource, content: Manifest, tasks: asyncio.TaskGroup
    ) -> None:
        self.sends_chunks = True
        self.receive: Callable[[ModelMessage], None] = lambda message: None
        self.on_lost: Callable[[ShoalError], None] = lambda error: None
        self._source = source
        self._content = content
        self._tasks = tasks
        self._reading: set[asyncio.Task[None]] = set()

    def send(self, message: ModelMessage) -> bool:
        """Answer a request; what is for other machines is ignored."""
        match message:
            case ManifestRequest(model):
                answer = ManifestAnswer(model, self._content.encoded)
                asyncio.get_running_loop().call_soon(self.receive, answer)
            case ChunksRequest(root, chunks):
                # As many at a time as are requested: the receiver limits them.
                for chunk in chunks:
                    task = self._tasks.create_task(self._send_chunk(root, chunk))
                    self._reading.add(task)
                    task.add_done_callback(self._reading.discard)
            case _:
                pass
        return True

    def speed_up(
        self,
        is_right: Callable[[int, memoryview], bool],
        on_chunk: Callable[[BulkChunk], None],
    ) -> None:
        """Go on as before: the hub sends each chunk on a connection of its own."""

    def leave(self) -> None:
        """End what is being read."""
        for task in self._reading:
            task.cancel()

    async def _send_chunk(self, root: bytes, chunk: int) -> None:
        source = self._source
        place = self._content.place(chunk)
        by_name = {base_name(each.name): each for each in source.model.files}
        file = by_name[self._content.files[place.file].name]
        where = file.name, place.offset, place.size
        try:
            data = await asyncio.to_thread(
                source.hub.read, source.repository, source.revision, *where
            )
        except Unavailable as error:
            self.on_lost(error)
        except ShoalError as error:  # such as a model that is gated by now
            self.on_lost(Unavailable(str(error)))
        else:
            self.receive(ChunkSent(root, chunk, data))


async def fetch_with_pool(
    source: HubSource,
    names: Collection[str],
    peers: Sequence[ModelPeer],
    folder: Path,
    progress: OnProgress,
    *,
    open_port: OpenPort | None = None,
    rate: ByteRate | None = None,
) -> dict[str, Path] | None:
    """Fetch the files of a model into a folder; return them by their SHA-256.

    The ``peers`` are asked for models of these ``names``.  If none has exactly these
    files, they come from the hub, and machines that the peers know, and that fetch the
    model as well, swap parts with this one.  None: no peer answers, so the hub's own
    library does as well.  What has arrived of a fetch that fails stays in the folder.

    Raises ShoalError; PeerError if the files are not the hub's.
    """
    wanted = {each.sha256 for each in source.model.files}
    asked = [_find(peer, names, wanted) for peer in peers]
    answers = [*zip(peers, await asyncio.gather(*asked), strict=True)]
    answering = [peer for peer, found in answers if found is not None]
    if not answering:
        return None
    copy = next((found for _, found in answers if found), None)
    sources: list[ModelPeer] = [source]
    name, content = next(iter(names)), source.manifest
    if copy:
        ((name, content),) = copy.items()
        sources = [peer for peer, found in answers if found == copy]
    fetched = await fetch_model(
        *(name, sources, folder),
        address=content.address,
        replace=True,
        progress=progress,
        open_port=open_port,
        rate=rate,
        introducers=() if copy else answering,
    )
    return {each.sha256.hex(): fetched.path / each.name for each in content.files}


async def _find(
    peer: ModelPeer, names: Collection[str], wanted: Collection[str]
) -> dict[str, Manifest] | None:
    """Return the manifest of the wanted files at a peer, by their model's name, if any.

    None: it cannot be asked.
    """
    answers: asyncio.Queue[ModelMessage | ShoalError] = asyncio.Queue()
    try:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(CONNECT_TIMEOUT):  # it may be elsewhere
                connection = await stack.enter_async_context(peer.connect())
            if not connection.sends_chunks:
                return None
            connection.receive = connection.on_lost = answers.put_nowait
            for name in names:
                connection.send(ManifestRequest(name))
                content = await _manifest(name, answers)
                files = () if content is None else content.files
                if content and {each.sha256.hex() for each in files} == wanted:
                    return {name: content}
    except (ShoalError, TimeoutError):
        return None
    return {}


async def _manifest(
    name: str, answers: "asyncio.Queue[ModelMessage | ShoalError]"
) -> Manifest | None:
    """Wait for a peer's answer.  Raises ShoalError; TimeoutError if it is silent."""
    while True:
        async with asyncio.timeout(ANSWER_TIMEOUT):
            answer = await answers.get()
        match answer:
            case ManifestAnswer(model=model, manifest=data) if model == name:
                return manifest.decode(data) if data else None
            case HashingModel() | ManifestAnswer():
                continue
            case ShoalError():
                raise answer
            case _:
                raise PeerError("it answers what was not asked")
