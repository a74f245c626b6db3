"""Models that a coordinator passes on from its workers, without a wire."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.serving import eventually
from models.transfer_pair import RecordingPeer, TransferPair, files
from shoal.domain.model_messages import (
    ChunkSent,
    ChunksRefused,
    ChunksRequest,
    ManifestAnswer,
    ManifestRequest,
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelMessage,
    ModelQuery,
    ModelRequest,
    SeederAt,
)
from shoal.models.download import DownloadRequest
from shoal.models.library import CHUNK, Library
from shoal.models.library_server import LibraryServer
from shoal.models.manifest import decode

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
    spoils: bool = False  # a byte of each chunk
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
        self.library.on_message("coordinator", message, self._send, anytime)
        return True

    def _send(self, message: ModelMessage) -> bool:
        if self.spoils and isinstance(message, ChunkSent):
            message = replace(message, data=b"!" + bytes(message.data)[1:])
        return self.send(message)

    def send(self, message: ModelMessage) -> bool:
        self.sent.append(message)
        self.coordinator.on_message(self.name, message, self._to_worker, anytime)
        return True

    @property
    def is_known(self) -> bool:
        """Whether the coordinator knows which model it has."""
        return any(isinstance(each, ManifestAnswer) for each in self.sent)

    @property
    def sent_chunks(self) -> list[int]:
        return [each.chunk for each in self.sent if isinstance(each, ChunkSent)]


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


async def another_worker(worker: Worker, folder: Path, stack: AsyncExitStack) -> Worker:
    """Join a second worker that has the model."""
    library = LibraryServer(Library({"org/big": folder}))
    await stack.enter_async_context(library)
    return Worker(worker.coordinator, library, "wire:x").join()


def copied(peer: RecordingPeer) -> bytes:
    """Return the weights that a peer of another program has received."""
    chunks = [each for each in peer.received if isinstance(each, ModelChunk)]
    return b"".join(e.data for e in chunks if e.file_name == "model.safetensors")


async def test_a_peer_of_another_program_gets_all_files_of_a_worker(
    folder: Path,
) -> None:
    peer = RecordingPeer()
    async with a_pool(folder) as worker:
        request(worker, peer)
        await eventually(lambda: is_complete(peer))

    chunks = [each for each in peer.received if isinstance(each, ModelChunk)]
    assert {each.file_name for each in chunks} == {
        *("config.json", "empty", "model.safetensors")
    }
    assert {each.transfer_id for each in chunks} == {"id"}
    assert copied(peer) == BIG


async def test_a_worker_is_asked_only_for_what_the_receiver_reads(folder: Path) -> None:
    slow = RecordingPeer(pieces=3)
    async with a_pool(folder) as worker:
        request(worker, slow)
        await slow.until(3)
        for _ in range(1000):
            await asyncio.sleep(0)
        ahead = len(worker.sent_chunks)
        slow.read(100)
        await eventually(lambda: is_complete(slow))

    assert ahead <= 3
    assert copied(slow) == BIG


async def test_receivers_of_one_chunk_share_a_request(folder: Path) -> None:
    async with a_pool(folder) as worker:
        root = await manifest_of_worker(worker)
        peers = [RecordingPeer() for _ in range(4)]
        for number, peer in enumerate(peers):
            message = ChunksRequest(root, [2])
            worker.coordinator.on_message(f"p{number}", message, peer.send, peer.room)
        for peer in peers:
            await peer.until(1)

    assert worker.sent_chunks == [2]
    assert [len(each.received) for each in peers] == [1] * 4


async def test_a_chunk_that_does_not_exist_is_refused(folder: Path) -> None:
    async with a_pool(folder) as worker:
        root = await manifest_of_worker(worker)
        for wanted in ([-1], [8], [0] * 300):
            peer = RecordingPeer()
            message = ChunksRequest(root, wanted)
            worker.coordinator.on_message("peer", message, peer.send, peer.room)
            await peer.until(1)
            assert isinstance(peer.received[0], ChunksRefused), wanted


async def test_nothing_is_noted_of_chunks_that_do_not_exist(folder: Path) -> None:
    peers = {"a": RecordingPeer(), "b": RecordingPeer()}
    async with a_pool(folder) as worker:
        root = await manifest_of_worker(worker)
        for name, peer in peers.items():
            seeder = SeederAt(root, f"http://{name}", "secret")
            worker.coordinator.on_message(name, seeder, peer.send, peer.room)
        await peers["a"].until(1)  # hears of the other
        await peers["b"].until(1)
        for name, peer in peers.items():
            message = ChunksRequest(root, [8])
            worker.coordinator.on_message(name, message, peer.send, peer.room)
            await peer.until(2)

    refused = [each.received[1:] for each in peers.values()]
    assert (
        refused[0] == refused[1] == [ChunksRefused(root, "the model has no such chunk")]
    )


@pytest.mark.parametrize("how", ["lies", "leaves", "is silent", "refuses"])
async def test_another_worker_sends_what_one_does_not(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if how == "is silent":
        # Longer than the other one takes, also on a busy machine.
        monkeypatch.setattr("shoal.models.remote_models.SILENCE_TIMEOUT", 2.0)
    peer = RecordingPeer(pieces=3)
    same = tmp_path / "same"
    shutil.copytree(folder, same)
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(a_pool(folder))
        other = await another_worker(worker, same, stack)
        request(worker, peer)
        await peer.until(3)
        await eventually(lambda: worker.is_known and other.is_known)

        if how == "lies":
            worker.spoils = True
        elif how == "leaves":
            worker.coordinator.on_peer_left(worker.name)
        elif how == "is silent":
            worker.ignores = ChunksRequest
        else:
            (folder / "model.safetensors").write_bytes(b"else")
        peer.read(100)
        await eventually(lambda: is_complete(peer))

    assert copied(peer) == BIG


async def test_a_receiver_learns_that_no_worker_sends_it(folder: Path) -> None:
    peer = RecordingPeer(pieces=3)
    async with a_pool(folder) as worker:
        request(worker, peer)
        await peer.until(3)

        worker.coordinator.on_peer_left(worker.name)
        peer.read(1)

        await eventually(lambda: ModelAnswer("org/big", False) in peer.received)
        await eventually(lambda: not worker.coordinator._sending)


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


async def manifest_of_worker(worker: Worker) -> bytes:
    """Let the coordinator find the worker's model; return its address."""
    peer = RecordingPeer()
    message = ManifestRequest("org/big")
    worker.coordinator.on_message("peer", message, peer.send, peer.room)
    await peer.until(1)
    (answer,) = peer.received
    assert isinstance(answer, ManifestAnswer)
    return decode(answer.manifest).root


def is_complete(peer: RecordingPeer) -> bool:
    return any(isinstance(each, ModelDone) for each in peer.received)
