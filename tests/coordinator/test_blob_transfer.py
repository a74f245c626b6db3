"""Large values: kept, pinned, given once, and taken from those who have them."""

import hashlib
from collections.abc import Iterable

import pytest

from shoal.coordinator.blob_transfer import COMING_MAX, BlobTransfer
from shoal.domain.errors import InvalidRequest, NotFound
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.vocabulary import Command, RunJob, SendBlob
from shoal.domain.work import Call
from shoal.store.blobs import MemoryBlobs

DATA = b"large"
DIGEST = hashlib.sha256(DATA).digest()


class Peer:
    """A worker that notes what it was given."""

    def __init__(self, accepts: Iterable[type] = (SendBlob, RunJob)) -> None:
        self.accepts: frozenset[type] = frozenset(accepts)
        self.given: list[Command] = []

    def send(self, message: Command) -> bool:
        self.given.append(message)
        return True

    def disconnect(self, reason: str, code: int, text: str) -> None:
        raise AssertionError("nobody has a reason to")


class Pins(MemoryBlobs):
    """Notes what is pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[bytes] = []

    def pin(self, digest: bytes) -> None:
        self.pinned.append(digest)

    def unpin(self, digest: bytes) -> None:
        self.pinned.remove(digest)


async def test_a_worker_is_given_a_value_once_for_each_connection() -> None:
    blobs = BlobTransfer(MemoryBlobs())
    await blobs.keep(DATA)
    one, other = Peer(), Peer()

    for peer in (one, one, other):
        blobs.send(peer, (DIGEST, DIGEST))
    assert (one.given, other.given) == ([SendBlob(DIGEST, memoryview(DATA))],) * 2

    blobs.resend(one, DIGEST)
    assert len(one.given) == 2


async def test_a_wire_that_cannot_carry_values_is_given_none() -> None:
    blobs = BlobTransfer(MemoryBlobs())
    await blobs.keep(DATA)
    peer = Peer([RunJob])

    blobs.send(peer, (DIGEST,))

    assert peer.given == []


async def test_a_value_that_is_gone_is_not_given_and_that_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peer = Peer()

    BlobTransfer(MemoryBlobs()).send(peer, (DIGEST,))

    assert peer.given == []
    assert DIGEST.hex() in caplog.text


async def test_what_an_open_job_needs_is_pinned() -> None:
    pins = Pins()
    blobs = BlobTransfer(pins)
    job = Job(JobId("j"), Call("f", b"", b"", blobs=(DIGEST,)))

    blobs.pin(job)
    assert pins.pinned == [DIGEST]

    blobs.unpin(job.id)
    blobs.unpin(job.id)
    assert pins.pinned == []


async def test_whoever_reads_what_is_just_coming_waits_for_it() -> None:
    blobs = BlobTransfer(MemoryBlobs())

    blobs.receive(SendBlob(DIGEST, DATA))
    blobs.receive(SendBlob(DIGEST, DATA))
    assert blobs.missing([DIGEST]) == []

    assert bytes(await blobs.read(DIGEST)) == DATA


async def test_what_comes_under_a_wrong_name_is_not_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blobs = BlobTransfer(MemoryBlobs())

    blobs.receive(SendBlob(DIGEST, b"something else"))
    with pytest.raises(InvalidRequest):
        await blobs.read(DIGEST)

    assert blobs.missing([DIGEST]) == [DIGEST]
    assert "cannot keep" in caplog.text
    with pytest.raises(NotFound):
        await blobs.read(DIGEST)


async def test_what_comes_at_once_has_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert COMING_MAX >= 256 << 20
    monkeypatch.setattr("shoal.coordinator.blob_transfer.COMING_MAX", 1)
    blobs = BlobTransfer(MemoryBlobs())

    blobs.receive(SendBlob(DIGEST, DATA))

    assert blobs.missing([DIGEST]) == [DIGEST]
    assert "too many come at once" in caplog.text
