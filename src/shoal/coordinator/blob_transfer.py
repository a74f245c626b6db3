"""Large values in transit: stored, pinned by open jobs, sent to workers."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from weakref import WeakKeyDictionary

from shoal.coordinator.connections import WorkerConnection
from shoal.domain.errors import ClientError, NotFound, StoreError
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.vocabulary import SendBlob
from shoal.domain.work import Call
from shoal.store.blobs import BlobStore

COMING_MAX = 1 << 30  # bytes received from workers and not stored yet

log = logging.getLogger("shoal.coordinator")


class BlobTransfer:
    """What calls refer to by SHA-256 digests of 32 bytes.

    A worker is given each once for each of its connections, before the first job that
    needs it.
    """

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._pinned: dict[JobId, tuple[bytes, ...]] = {}
        self._given: WeakKeyDictionary[WorkerConnection, set[bytes]] = (
            WeakKeyDictionary()
        )
        self._coming: dict[bytes, asyncio.Future[bytes]] = {}
        self._coming_size = 0

    # For clients and peers.

    def missing(self, digests: Iterable[bytes]) -> list[bytes]:
        """Return the digests whose values are missing."""
        return [
            each
            for each in digests
            if each not in self._coming and not self._store.has(each)
        ]

    async def read(self, digest: bytes) -> memoryview:
        """Return a value; wait for it if it is being received.

        Raises NotFound, StoreError, or InvalidRequest for a value that does not match.
        """
        if (coming := self._coming.get(digest)) is not None:
            await asyncio.shield(coming)
        if self._store.is_near(digest):
            return self._store.read(digest)
        return await asyncio.to_thread(self._store.read, digest)

    async def keep(
        self, data: bytes | memoryview, expected: bytes | None = None, owner: str = ""
    ) -> bytes:
        """Store a value of an owner; return its digest.

        Raises InvalidRequest if it is not the ``expected`` one, StoreError.
        """
        return await asyncio.to_thread(self._store.keep, data, expected, owner)

    # For the hub.

    def pin(self, job: Job) -> None:
        """Keep the blobs of a job while it is open."""
        if isinstance(job.work, Call) and job.work.blobs:
            self.pin_digests(job.id, job.work.blobs)

    def unpin(self, job_id: JobId) -> None:
        """Release the blobs of a job that has ended."""
        for digest in self._pinned.pop(job_id, ()):
            self._store.unpin(digest)

    def pin_digests(self, job_id: JobId, digests: tuple[bytes, ...]) -> None:
        """Pin further blobs for a job."""
        for digest in digests:
            self._store.pin(digest)
        self._pinned[job_id] = self._pinned.get(job_id, ()) + digests

    def send(self, peer: WorkerConnection, digests: tuple[bytes, ...]) -> None:
        """Send a worker the blobs that it does not have yet, before their job."""
        if not digests or SendBlob not in peer.accepts:
            return
        given = self._given.setdefault(peer, set())
        for digest in digests:
            if digest in given:  # No secret: a digest of a value.
                continue
            given.add(digest)
            if self._store.has(digest) and not self._store.is_near(digest):
                # The job waits for it at the worker, as for one that it has dropped.
                self._fetch(peer, digest)
            else:
                self._give(peer, digest, partial(self._store.read, digest))

    def _fetch(self, peer: WorkerConnection, digest: bytes) -> None:
        """Send a value once it has come from another machine."""

        def give(reading: asyncio.Future[memoryview]) -> None:
            if not reading.cancelled():
                self._give(peer, digest, reading.result)

        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(None, self._store.read, digest)
        reading.add_done_callback(give)

    def _give(
        self, peer: WorkerConnection, digest: bytes, read: Callable[[], memoryview]
    ) -> None:
        try:
            peer.send(SendBlob(digest, read()))
        except (NotFound, StoreError) as error:
            log.warning("cannot send a value: %s", error)
            self._given.get(peer, set()).discard(digest)

    def resend(self, peer: WorkerConnection, digest: bytes) -> None:
        """Send a blob again to a worker that has dropped it."""
        self._given.get(peer, set()).discard(digest)
        self.send(peer, (digest,))

    def receive(self, given: SendBlob) -> None:
        """Store a blob from a peer; readers wait until it is on disk."""
        digest, size = given.digest, len(given.data)
        # No secret: a digest of a value.
        if digest in self._coming or self._store.has(digest):
            return
        if self._coming_size + size > COMING_MAX:
            log.warning("dropped a value of %d bytes: too many at once", size)
            return
        loop = asyncio.get_running_loop()
        self._coming_size += size
        keeping = loop.run_in_executor(None, self._store.keep, given.data, digest)
        self._coming[digest] = keeping
        keeping.add_done_callback(lambda done: self._came(digest, size, done))

    def _came(self, digest: bytes, size: int, done: asyncio.Future[bytes]) -> None:
        del self._coming[digest]
        self._coming_size -= size
        if not done.cancelled():
            error = done.exception()
            if isinstance(error, ClientError | StoreError):
                log.warning("cannot store a value from a peer: %s", error)
            elif error is not None:
                raise error
