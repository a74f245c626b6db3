"""Chunks are sent at the pace of the peer, and within a rate."""

import asyncio
from functools import partial

import pytest

from gateway.serving import eventually
from models.manifests import chunk_of, manifest_of
from models.transfer_pair import RecordingPeer
from shoal.domain.errors import Unavailable
from shoal.domain.model_messages import ChunkSent, ChunksRefused
from shoal.models import chunk_senders
from shoal.models.bulk_connection import ReadInto
from shoal.models.chunk_senders import ByteRate, ChunkSenders, Receiver
from shoal.models.manifest import CHUNK, Manifest
from shoal.models.remote_models import copied
from shoal.transports.clock import LoopClock

CONTENT = {"a": b"a" * CHUNK, "b": b"b" * CHUNK, "c": b"c" * (CHUNK + 1)}


class Model:
    """A model in memory, whose third chunk cannot be read; ``read_`` are the others."""

    def __init__(self) -> None:
        self.read_: list[int] = []

    @property
    def manifest(self) -> Manifest:
        return manifest_of(CONTENT)

    async def reader(self, chunk: int) -> ReadInto:
        if chunk == 2:
            raise Unavailable("the disk is gone")
        self.read_.append(chunk)
        return partial(copied, chunk_of(CONTENT, self.manifest, chunk))


def receiver(peer: RecordingPeer, name: str = "peer") -> Receiver:
    return Receiver(name, peer.send, peer.room)


async def test_chunks_wait_for_the_peer_to_read() -> None:
    peer, model = RecordingPeer(pieces=0), Model()
    async with asyncio.TaskGroup() as tasks:
        senders = ChunkSenders(tasks, ByteRate())
        assert senders.request(receiver(peer), model, [0, 1, 3]) is None
        await eventually(lambda: len(model.read_) == chunk_senders.AT_ONCE)
        assert peer.received == []
        peer.read(3)
        await peer.until(3)

    sent = {e.chunk: e.data for e in peer.received if isinstance(e, ChunkSent)}
    assert sent == {0: CONTENT["a"], 1: CONTENT["b"], 3: b"c"}


async def test_a_chunk_that_cannot_be_read_is_refused_with_its_reason() -> None:
    peer, model = RecordingPeer(), Model()
    async with asyncio.TaskGroup() as tasks:
        ChunkSenders(tasks, ByteRate()).request(receiver(peer), model, [2])

    refused = ChunksRefused(model.manifest.root, "the disk is gone")
    assert peer.received == [refused]


async def test_a_peer_that_reads_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chunk_senders, "STALL_TIMEOUT", 0.01)
    peer = RecordingPeer(pieces=0)
    async with asyncio.TaskGroup() as tasks:
        ChunkSenders(tasks, ByteRate()).request(receiver(peer), Model(), [0])

    assert peer.received == []
    assert "stopped peer='peer' reason='it reads nothing'" in caplog.text


async def test_a_peer_that_leaves_frees_what_it_requested() -> None:
    stuck, other = RecordingPeer(pieces=0), RecordingPeer()
    async with asyncio.TaskGroup() as tasks:
        senders = ChunkSenders(tasks, ByteRate())
        senders.request(receiver(stuck, "stuck"), Model(), [0, 1])
        senders.request(receiver(other, "other"), Model(), [0])
        await other.until(1)
        senders.on_peer_left("stuck")

    assert stuck.received == []


async def test_closing_ends_all() -> None:
    peer = RecordingPeer(pieces=0)
    async with asyncio.TaskGroup() as tasks:
        senders = ChunkSenders(tasks, ByteRate())
        senders.request(receiver(peer), Model(), [0, 1, 3])
        senders.close()


async def test_all_peers_share_one_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    clock = LoopClock()
    monkeypatch.setattr(clock, "now", lambda: 0.0)
    rate = ByteRate(2 * CHUNK, clock)

    for _ in range(4):
        await rate.take(CHUNK)

    assert waits == [0.5, 1.0, 1.5]
