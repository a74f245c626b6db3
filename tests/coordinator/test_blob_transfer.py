"""Large values: stored, pinned, sent once, and received."""

import asyncio
import hashlib
from collections.abc import Iterable

import pytest

from gateway.serving import eventually
from shoal.coordinator.blob_transfer import COMING_MAX, BlobTransfer
from shoal.domain.errors import InvalidRequest, NotFound
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.vocabulary import Command, RunJob, SendBlob
from shoal.domain.work import Call
from shoal.store.blobs import MemoryBlobs

DATA = b"large"
DIGEST = hashlib.sha256(DATA).digest()


class RecordingWorker:
    """A worker that records its commands."""

    def __init__(self, accepts: Iterable[type] = (SendBlob, RunJob)) -> None:
        self.accepts: frozenset[type] = frozenset(accepts)
        self.given: list[Command] = []

    def send(self, message: Command) -> bool:
        self.given.append(message)
        return True

    def disconnect(self, reason: str, code: int, text: str) -> None:
        raise AssertionError("unexpected disconnect")


class RecordingPins(MemoryBlobs):
    """Records pinned digests."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[bytes] = []

    def pin(self, digest: bytes) -> None:
        self.pinned.append(digest)

    def unpin(self, digest: bytes) -> None:
        self.pinned.remove(digest)


async def test_value_is_sent_once_per_connection() -> None:
    blobs = BlobTransfer(MemoryBlobs())
    await blobs.keep(DATA)
    one, other = RecordingWorker(), RecordingWorker()

    for peer in (one, one, other):
        blobs.send(peer, (DIGEST, DIGEST))
    assert (one.given, other.given) == ([SendBlob(DIGEST, memoryview(DATA))],) * 2

    blobs.resend(one, DIGEST)
    assert len(one.given) == 2


async def test_value_is_not_sent_on_a_wire_without_blobs() -> None:
    blobs = BlobTransfer(MemoryBlobs())
    await blobs.keep(DATA)
    peer = RecordingWorker([RunJob])

    blobs.send(peer, (DIGEST,))

    assert peer.given == []


class Afar(MemoryBlobs):
    """Values on another machine."""

    def is_near(self, digest: bytes) -> bool:
        return False


async def test_value_of_another_machine_is_sent_once_it_has_come() -> None:
    blobs = BlobTransfer(Afar())
    await blobs.keep(DATA)
    peer = RecordingWorker()

    blobs.send(peer, (DIGEST,))
    blobs.send(peer, (DIGEST,))
    assert peer.given == []

    await eventually(lambda: bool(peer.given))
    assert peer.given == [SendBlob(DIGEST, memoryview(DATA))]
    assert await blobs.read(DIGEST) == memoryview(DATA)


async def test_missing_value_is_logged_and_not_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peer = RecordingWorker()

    BlobTransfer(MemoryBlobs()).send(peer, (DIGEST,))

    assert peer.given == []
    assert DIGEST.hex() in caplog.text


async def test_values_of_open_jobs_are_pinned() -> None:
    pins = RecordingPins()
    blobs = BlobTransfer(pins)
    job = Job(JobId("j"), Call("f", b"", b"", blobs=(DIGEST,)))

    blobs.pin(job)
    assert pins.pinned == [DIGEST]

    blobs.unpin(job.id)
    blobs.unpin(job.id)
    assert pins.pinned == []


async def test_reader_waits_for_a_value_in_transfer() -> None:
    blobs = BlobTransfer(MemoryBlobs())

    blobs.receive(SendBlob(DIGEST, DATA))
    blobs.receive(SendBlob(DIGEST, DATA))
    assert blobs.missing([DIGEST]) == []

    assert bytes(await blobs.read(DIGEST)) == DATA


async def test_value_with_a_wrong_digest_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blobs = BlobTransfer(MemoryBlobs())

    blobs.receive(SendBlob(DIGEST, b"something else"))
    with pytest.raises(InvalidRequest):
        await blobs.read(DIGEST)
    await asyncio.sleep(0)  # what follows a future that is done comes in the next turn

    assert blobs.missing([DIGEST]) == [DIGEST]
    assert "cannot store a value" in caplog.text
    with pytest.raises(NotFound):
        await blobs.read(DIGEST)


async def test_concurrent_transfers_are_limited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert COMING_MAX >= 256 << 20
    monkeypatch.setattr("shoal.coordinator.blob_transfer.COMING_MAX", 1)
    blobs = BlobTransfer(MemoryBlobs())

    blobs.receive(SendBlob(DIGEST, DATA))

    assert blobs.missing([DIGEST]) == [DIGEST]
    assert "too many at once" in caplog.text
