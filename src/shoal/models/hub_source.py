"""The hub as a source of chunks, beside machines that fetch the same model.

The hub gives the hash of each file, and none of a chunk: so the manifest has none
either, and the whole files are compared at the end.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shoal.domain.errors import ShoalError, Unavailable
from shoal.domain.model_messages import (
    ChunkSent,
    ChunksRequest,
    ManifestAnswer,
    ManifestRequest,
    ModelMessage,
)
from shoal.models.bulk_connection import BulkChunk
from shoal.models.manifest import Manifest, manifest_of_files
from shoal.models.model_hub import ModelHub
from shoal.models.names import GgufModel, base_name


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

        Raises PeerError if the names of the files cannot be used here.
        """
        files = (
            (base_name(each.name), each.size, bytes.fromhex(each.sha256))
            for each in self.model.files
        )
        return manifest_of_files(files)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator["HubConnection"]:
        lost: ShoalError | None = None
        async with asyncio.TaskGroup() as tasks:
            connection = HubConnection(self, tasks)
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

    def __init__(self, source: HubSource, tasks: asyncio.TaskGroup) -> None:
        self.sends_chunks = True
        self.receive: Callable[[ModelMessage], None] = lambda message: None
        self.on_lost: Callable[[ShoalError], None] = lambda error: None
        self._source = source
        self._tasks = tasks
        self._reading: set[asyncio.Task[None]] = set()

    def send(self, message: ModelMessage) -> bool:
        """Answer a request; what is for other machines is ignored."""
        match message:
            case ManifestRequest(model):
                data = self._source.manifest.encoded
                answer = ManifestAnswer(model, data)
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
        place = source.manifest.place(chunk)
        by_name = {base_name(each.name): each for each in source.model.files}
        file = by_name[source.manifest.files[place.file].name]
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
