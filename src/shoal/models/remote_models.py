"""Models of workers, whose chunks a coordinator passes on without storing them.

Each chunk is checked.  A worker that sends a wrong one, or none, is not asked for the
model again; another one that has the same model is.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from shoal.domain.errors import PeerError, Unavailable
from shoal.domain.model_messages import (
    ChunkSent,
    ChunksRefused,
    ChunksRequest,
    HashingModel,
    ManifestAnswer,
    ManifestRequest,
)
from shoal.models import manifest
from shoal.models.bulk_connection import ReadInto
from shoal.models.manifest import Manifest
from shoal.models.sources import ModelSource, ModelSources

SILENCE_TIMEOUT = 80.0
"""Seconds for a worker to send a chunk, or to get on with hashing a model.

Less than receivers wait for it.
"""
MODELS_MAX = 32  # whose manifests are kept

Key = TypeVar("Key")
Reply = TypeVar("Reply")

log = logging.getLogger("shoal.models")


class RemoteModel:
    """A model that some workers have: ``holders``, by name."""

    def __init__(
        self, content: Manifest, sources: ModelSources, tasks: asyncio.TaskGroup
    ) -> None:
        self.manifest = content
        self._tasks = tasks
        self.holders: dict[str, int] = {}  # chunks that each was asked for last
        self._sources = sources
        self._requested = _Replies[tuple[str, int], ChunkSent]()
        self._reading: dict[int, asyncio.Task[bytes | str]] = {}

    async def read(self, chunk: int) -> bytes:
        """Return a chunk, which was checked.

        Two receivers that want it at the same time get it from one request.

        Raises Unavailable if no worker sends it.
        """
        reading = self._reading.get(chunk)
        if reading is None:
            reading = self._tasks.create_task(self._fetch(chunk))
            self._reading[chunk] = reading
            reading.add_done_callback(lambda _: self._reading.pop(chunk))
        data = await asyncio.shield(reading)
        if isinstance(data, str):
            raise Unavailable(data)
        return data

    async def reader(self, chunk: int) -> ReadInto:
        """Read a chunk, and return what copies it.  Raises Unavailable."""
        return partial(copied, await self.read(chunk))

    def receive(self, source: str, message: ChunkSent | ChunksRefused) -> None:
        """Process a message of a worker about this model."""
        if isinstance(message, ChunkSent):
            self._requested.reply((source, message.chunk), message)
        else:
            self.drop(source, message.reason)

    def drop(self, source: str, why: str) -> None:
        """Ask a worker for nothing more of this model."""
        if self.holders.pop(source, None) is not None:
            log.warning("dropped source=%r reason=%r", source, why)
        self._requested.fail(lambda key: key[0] == source)

    async def _fetch(self, chunk: int) -> bytes | str:
        """Return a chunk, or why there is none."""
        while self.holders:
            name = min(self.holders, key=self.holders.__getitem__)
            source = self._sources.named(name)
            request = ChunksRequest(self.manifest.root, [chunk])
            reply = self._requested.expect((name, chunk))
            self.holders[name] += 1
            try:
                if source is None or not source.send(request):
                    self.drop(name, "it has left")
                    continue
                async with asyncio.timeout(SILENCE_TIMEOUT):
                    sent = await reply
            except TimeoutError:
                self.drop(name, f"it sent nothing for {SILENCE_TIMEOUT:g} s")
                continue
            finally:
                self._requested.forget((name, chunk))
                if name in self.holders:
                    self.holders[name] -= 1
            if sent is None:
                continue
            data = bytes(sent.data)
            if await asyncio.to_thread(self.manifest.has_hash, chunk, data):
                return data
            self.drop(name, f"chunk {chunk} has another hash: it sends other bytes")
        return "no worker sends it any more"


def copied(data: bytes, into: memoryview) -> int:
    """Copy a chunk, as ``ReadInto``."""
    into[: len(data)] = data
    return len(data)


class RemoteModels:
    """The models of all workers among ``sources`` that were asked for."""

    def __init__(self, sources: ModelSources, tasks: asyncio.TaskGroup) -> None:
        self._sources = sources
        self._tasks = tasks
        self._asked = _Replies[tuple[str, str], ManifestAnswer]()
        self._models: OrderedDict[bytes, RemoteModel] = OrderedDict()
        # By worker and model, while it is asked; with the bytes that it has hashed.
        self._asking: dict[tuple[str, str], asyncio.Task[RemoteModel | None]] = {}
        self._hashed: dict[tuple[str, str], int] = {}

    def hashed(self, model: str) -> int:
        """Return the bytes that workers have hashed that were asked for a model."""
        return sum(count for (_, name), count in self._hashed.items() if name == model)

    def get(self, root: bytes) -> RemoteModel | None:
        """Return a model that was found, by its address."""
        return self._models.get(root)

    async def find(self, model: str, besides: str) -> RemoteModel | None:
        """Ask all workers but ``besides`` for a model; return the first one's.

        Others that have the same are its sources, too, once they have answered.
        """
        among = [
            each
            for each in self._sources.all
            if each.passed_on and each.name != besides
        ]
        having = [each.source for each in await self._sources.find(model, among)]
        asked = [self._asked_for(each, model) for each in having]
        for answered in asyncio.as_completed(asked):
            if (found := await answered) is not None:
                return found
        return None

    def receive(
        self,
        source: str,
        message: HashingModel | ManifestAnswer | ChunkSent | ChunksRefused,
    ) -> None:
        """Process a message of a worker; ignore one about nothing that was asked."""
        if isinstance(message, HashingModel):
            if (key := (source, message.model)) in self._hashed:
                self._hashed[key] = max(self._hashed[key], message.hashed)
        elif isinstance(message, ManifestAnswer):
            self._asked.reply((source, message.model), message)
        elif (model := self._models.get(message.root)) is not None:
            model.receive(source, message)

    def on_source_left(self, name: str) -> None:
        """Ask others for what a worker owes that has left."""
        self._asked.fail(lambda key: key[0] == name)
        for model in self._models.values():
            if name in model.holders:
                model.drop(name, "it has left")

    def close(self) -> None:
        """Expect nothing more of any worker."""
        self._asked.fail(lambda key: True)
        for model in self._models.values():
            for name in [*model.holders]:
                model.drop(name, "this program ends")

    def _asked_for(
        self, source: ModelSource, model: str
    ) -> "asyncio.Task[RemoteModel | None]":
        """Ask a worker for a model, or wait with those who have asked already."""
        key = (source.name, model)
        if (asking := self._asking.get(key)) is None:
            asking = self._tasks.create_task(self._ask(source, model))
            self._asking[key] = asking
            asking.add_done_callback(lambda _: self._asking.pop(key))
        return asking

    async def _ask(self, source: ModelSource, model: str) -> RemoteModel | None:
        """Return the model of a worker; None: it does not say which it is."""
        key = (source.name, model)
        reply = self._asked.expect(key)
        before, self._hashed[key] = -1, 0
        source.send(ManifestRequest(model))
        try:
            while not reply.done() and self._hashed[key] > before:
                before = self._hashed[key]
                await asyncio.wait((reply,), timeout=SILENCE_TIMEOUT)
        finally:
            del self._hashed[key]
        answer = reply.result() if reply.done() else None
        if answer is None or not answer.manifest or answer.held:
            return None
        try:
            content = manifest.decode(answer.manifest)
        except PeerError as error:
            log.warning("dropped source=%r reason=%r", source.name, str(error))
            return None
        found = self._models.pop(content.root, None)
        if found is None:
            found = RemoteModel(content, self._sources, self._tasks)
        self._models[content.root] = found
        if len(self._models) > MODELS_MAX:
            self._models.popitem(last=False)
        found.holders.setdefault(source.name, 0)
        return found


class _Replies(Generic[Key, Reply]):
    """Replies that are expected, by what they are about; None: there is none."""

    def __init__(self) -> None:
        self._expected: dict[Key, asyncio.Future[Reply | None]] = {}

    def expect(self, key: Key) -> "asyncio.Future[Reply | None]":
        """Return the future reply, also if it is expected already."""
        if key not in self._expected or self._expected[key].done():
            self._expected[key] = asyncio.get_running_loop().create_future()
        return self._expected[key]

    def forget(self, key: Key) -> None:
        """Expect a reply no longer."""
        self._expected.pop(key, None)

    def reply(self, key: Key, reply: Reply | None) -> None:
        """Record a reply; ignore one that is not expected."""
        future = self._expected.pop(key, None)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail(self, concerns: Callable[[Key], bool]) -> None:
        """Record that some replies do not come."""
        for key in [each for each in self._expected if concerns(each)]:
            self.reply(key, None)
