"""Models that a coordinator passes on from its workers, without a wire."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.serving import eventually
from models.transfer_pair import RecordingPeer, TransferPair, files
from shoal.domain.errors import Unavailable
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelMessage,
    ModelPull,
    ModelQuery,
    ModelRequest,
)
from shoal.models.download import DownloadRequest
from shoal.models.forwarding import (
    BUFFER_MAX,
    FORWARDED_MAX,
    ForwardedTransfers,
    Receiver,
)
from shoal.models.library import CHUNK, Library
from shoal.models.library_server import LibraryServer
from shoal.models.sources import ModelSource

BIG = bytes(range(256)) * (6 * CHUNK // 256) + b"the end"


async def anytime() -> None:
    """Wait for room that is always there."""


@dataclass
class Worker:
    """A worker's library, joined to a coordinator's; ``sent`` is what it has sent."""

    coordinator: LibraryServer
    library: LibraryServer
    name: str = "wire:w"
    passed_on: bool = True
    ignores: type[ModelMessage] | None = None
    sent: list[ModelMessage] = field(default_factory=list)
    received: list[ModelMessage] = field(default_factory=list)

    def join(self) -> "Worker":
        self.coordinator.on_peer_joined(
            self.name, self._to_worker, passed_on=self.passed_on
        )
        return self

    def _to_worker(self, message: ModelMessage) -> bool:
        self.received.append(message)
        if self.ignores is not None and isinstance(message, self.ignores):
            return True
        self.library.on_message("coordinator", message, self.send, anytime)
        return True

    def send(self, message: ModelMessage) -> bool:
        self.sent.append(message)
        self.coordinator.on_message(self.name, message, self._to_worker, anytime)
        return True

    @property
    def sent_bytes(self) -> int:
        chunks = [each for each in self.sent if isinstance(each, ModelChunk)]
        return sum(len(each.data) for each in chunks)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "big"
    model.mkdir()
    (model / "config.json").write_bytes(b"{}")
    (model / "model.safetensors").write_bytes(BIG)
    (model / "empty").touch()
    return model


@asynccontextmanager
async def a_pool(folder: Path) -> AsyncIterator[Worker]:
    """Run a coordinator without models and a worker with one."""
    async with (
        LibraryServer(Library({})) as coordinator,
        LibraryServer(Library({"org/big": folder})) as library,
    ):
        yield Worker(coordinator, library).join()


def request(worker: Worker, peer: RecordingPeer, name: str = "peer") -> None:
    sharing = worker.coordinator
    message = ModelRequest("id", "org/big")
    sharing.on_message(name, message, peer.send, peer.room)


async def test_a_workers_model_is_copied_from_the_coordinator(
    folder: Path, tmp_path: Path
) -> None:
    async with a_pool(folder) as worker:
        wanted = DownloadRequest("org/big", tmp_path / "copies")
        copied = await TransferPair(worker.coordinator, wanted).fetch().run()

    assert files(copied.path) == files(folder)
    assert copied.size == len(BIG) + 2


async def test_a_source_sends_no_more_than_the_receiver_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.models.forwarding.WINDOW", 2 * CHUNK)
    slow = RecordingPeer(pieces=3)
    async with a_pool(folder) as worker:
        request(worker, slow)
        # config.json and empty, which count nearly nothing, and one chunk.
        await slow.until(3)
        await eventually(lambda: worker.sent_bytes >= 3 * CHUNK)
        for _ in range(1000):
            await asyncio.sleep(0)
        ahead = worker.sent_bytes - CHUNK

        slow.read(100)
        await eventually(lambda: is_complete(slow))

    assert ahead <= 3 * CHUNK
    chunks = [each for each in slow.received if isinstance(each, ModelChunk)]
    assert {each.transfer_id for each in chunks} == {"id"}
    weights = [each.data for each in chunks if each.file_name == "model.safetensors"]
    assert b"".join(weights) == BIG


async def test_a_silent_source_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shoal.models.forwarding.SILENCE_TIMEOUT", 0.01)
    peer = RecordingPeer()
    async with a_pool(folder) as worker:
        worker.ignores = ModelRequest
        request(worker, peer)
        await peer.until(1)

    assert peer.received == [ModelAnswer("org/big", available=False)]
    assert "wire:w sent nothing for 0.01 s" in caplog.text


async def test_a_source_stops_when_the_receiver_leaves(folder: Path) -> None:
    peer = RecordingPeer(pieces=3)
    async with a_pool(folder) as worker:
        request(worker, peer)
        await peer.until(3)

        worker.coordinator.on_peer_left("peer")

        (asked,) = (m for m in worker.received if isinstance(m, ModelRequest))
        end = ModelPull(asked.transfer_id, 0)
        await eventually(lambda: end in worker.received)
        await eventually(lambda: not worker.library._sending)
    assert not is_complete(peer)


@pytest.mark.parametrize("why", ["left", "changed", "flood"])
async def test_a_receiver_learns_that_the_source_fails(folder: Path, why: str) -> None:
    peer = RecordingPeer(pieces=3)
    async with a_pool(folder) as worker:
        request(worker, peer)
        await peer.until(3)
        (asked,) = (m for m in worker.received if isinstance(m, ModelRequest))

        if why == "left":
            worker.coordinator.on_peer_left(worker.name)
        elif why == "changed":
            worker.send(ModelAnswer("org/big", available=False))
        else:
            piece = ModelChunk(asked.transfer_id, "x", 0, bytes(CHUNK))
            for _ in range(BUFFER_MAX // CHUNK + 1):
                worker.send(piece)
        peer.read(1)

        await eventually(lambda: ModelAnswer("org/big", False) in peer.received)
        await eventually(lambda: not worker.coordinator._sending)


async def test_a_source_that_has_left_since_its_answer_is_unavailable() -> None:
    peer = RecordingPeer()
    gone = ModelSource("wire:w", lambda message: False, passed_on=True)
    transfers = ForwardedTransfers()

    with pytest.raises(Unavailable, match="wire:w has left"):
        await transfers.forward(
            gone, ModelRequest("id", "m"), Receiver("peer", peer.send, peer.room)
        )

    assert not transfers.is_busy(gone)


async def test_models_of_other_peers_are_not_passed_on(folder: Path) -> None:
    peer = RecordingPeer()
    async with a_pool(folder) as worker:
        worker.passed_on = False
        worker.join()

        message = ModelQuery("org/big")
        worker.coordinator.on_message("peer", message, peer.send, peer.room)
        request(worker, peer)
        await peer.until(2)

    assert peer.received == [ModelAnswer("org/big", False)] * 2
    assert worker.received == []


async def test_a_worker_is_not_asked_for_its_own_question(folder: Path) -> None:
    async with a_pool(folder) as worker:
        worker.send(ModelQuery("org/big"))

        await eventually(lambda: bool(worker.received))

    assert worker.received == [ModelAnswer("org/big", False)]


async def test_a_source_sends_few_models_at_a_time(folder: Path) -> None:
    peers = [RecordingPeer(pieces=0) for _ in range(FORWARDED_MAX + 1)]
    async with a_pool(folder) as worker:
        for number, peer in enumerate(peers):
            request(worker, peer, f"peer{number}")
        await eventually(lambda: any(peer.received for peer in peers))

        refused = [peer for peer in peers if peer.received]
        assert [peer.received for peer in refused] == [[ModelAnswer("org/big", False)]]
        for peer in peers:
            peer.read(100)
        served = [peer for peer in peers if peer not in refused]
        await eventually(lambda: all(is_complete(peer) for peer in served))


def is_complete(peer: RecordingPeer) -> bool:
    return any(isinstance(each, ModelDone) for each in peer.received)
