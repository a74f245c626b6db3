"""Sources that take a while to say what they have, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from models.chunk_hosts import ChunkHost
from models.test_fetch_chunks import CONTENT
from models.test_remote_models import Worker
from models.transfer_pair import RecordingPeer, files
from shoal.domain.errors import Unavailable
from shoal.domain.model_messages import (
    HashingModel,
    ManifestAnswer,
    ManifestRequest,
    ModelMessage,
)
from shoal.models.fetch import MANIFEST_TIMEOUT, fetch_model
from shoal.models.library import Library
from shoal.models.library_server import HASHING_INTERVAL, LibraryServer
from shoal.models.remote_models import SILENCE_TIMEOUT
from shoal.protocols.seam.peer_session import PeerMessage, ToPeer
from shoal.transports.driver import Driver
from simulation import virtual

SAID_EVERY = 30.0  # seconds
NAME = "org/name"


@dataclass
class SlowHost(ChunkHost):
    """A peer that says ``times`` that it hashes before it answers; None: it is silent.

    ``grows`` is by how much more it has hashed each time.
    """

    times: int | None = 0
    grows: int = 1000
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def _send(
        self, driver: Driver[PeerMessage, ToPeer], peer: str, reply: ModelMessage
    ) -> bool:
        if not isinstance(reply, ManifestAnswer):
            return super()._send(driver, peer, reply)
        if self.times is not None:
            answer = self._answer(driver, peer, reply, self.times)
            self.tasks.append(asyncio.create_task(answer))
        return True

    async def _answer(
        self,
        driver: Driver[PeerMessage, ToPeer],
        peer: str,
        reply: ManifestAnswer,
        times: int,
    ) -> None:
        for number in range(times):
            await asyncio.sleep(SAID_EVERY)
            said = HashingModel(NAME, 1000 + self.grows * number)
            driver.send(ToPeer(peer, said))
        driver.send(ToPeer(peer, reply))


@dataclass
class Stage:
    folder: Path
    stack: AsyncExitStack
    reports: list[tuple[int, int | None]] = field(default_factory=list)

    async def host(self, name: str, times: int | None, grows: int = 1000) -> SlowHost:
        folder = self.folder / name
        folder.mkdir()
        for file, data in CONTENT.items():
            (folder / file).write_bytes(data)
        sharing = LibraryServer(Library({NAME: folder}))
        await self.stack.enter_async_context(sharing)
        return SlowHost(f"http://{name}", sharing, times=times, grows=grows)

    async def fetch(self, *hosts: SlowHost) -> Path:
        def note(held: int, size: int | None) -> None:
            self.reports.append((held, size))

        ours = self.folder / "ours"
        return (await fetch_model(NAME, hosts, ours, progress=note)).path


def play(folder: Path, script: Callable[[Stage], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            await script(Stage(folder, stack))

    virtual.run(scenario())


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_silent_source_is_given_up(tmp_path: Path) -> None:
    async def script(its: Stage) -> None:
        silent = await its.host("silent", None)
        with pytest.raises(Unavailable, match="sent nothing of the model for 100 s"):
            await its.fetch(silent)
        assert MANIFEST_TIMEOUT <= now() < MANIFEST_TIMEOUT + 20.0

    play(tmp_path, script)


def test_a_source_that_goes_on_hashing_is_waited_for(tmp_path: Path) -> None:
    async def script(its: Stage) -> None:
        slow = await its.host("slow", 60)
        path = await its.fetch(slow)
        assert files(path) == files(tmp_path / "slow")
        assert its.reports[:60] == [(0, None)] * 60, "who waits sees that it goes on"
        assert now() >= 60 * SAID_EVERY

    play(tmp_path, script)


def test_a_source_that_is_stuck_is_given_up(tmp_path: Path) -> None:
    async def script(its: Stage) -> None:
        stuck = await its.host("stuck", 1000, grows=0)
        with pytest.raises(Unavailable, match="sent nothing of the model"):
            await its.fetch(stuck)
        assert now() < 3 * MANIFEST_TIMEOUT

    play(tmp_path, script)


def test_others_are_used_meanwhile(tmp_path: Path) -> None:
    async def script(its: Stage) -> None:
        hosts = [await its.host("silent", None), await its.host("quick", 0)]
        path = await its.fetch(*hosts)
        assert files(path) == files(tmp_path / "quick")
        assert now() < MANIFEST_TIMEOUT

    play(tmp_path, script)


@pytest.mark.parametrize(("minutes", "answers"), [(30, True), (0, False)])
def test_a_coordinator_passes_on_that_its_worker_hashes(
    tmp_path: Path, minutes: int, answers: bool
) -> None:
    (tmp_path / "model").write_bytes(b"model")

    async def scenario() -> None:
        async with (
            LibraryServer(Library({})) as coordinator,
            LibraryServer(Library({NAME: tmp_path / "model"})) as library,
        ):
            worker = Worker(coordinator, library, ignores=ManifestRequest).join()
            peers = {name: RecordingPeer() for name in ("one", "two")}
            for name, peer in peers.items():
                asked = ManifestRequest(NAME)
                coordinator.on_message(name, asked, peer.send, peer.room)
            for minute in range(minutes):
                await asyncio.sleep(60.0)
                worker.send(HashingModel(NAME, 1000 * (minute + 1)))
            if answers:
                worker.ignores = None
                worker._to_worker(ManifestRequest(NAME))
            begun = now()
            for peer in peers.values():
                await peer.until(minutes + 1)
                *said, last = peer.received
                assert isinstance(last, ManifestAnswer)
                assert bool(last.manifest) == answers
                counts = [each.hashed for each in said]  # type: ignore[attr-defined]
                assert counts == [1000 * (each + 1) for each in range(minutes)]
            assert now() - begun < SILENCE_TIMEOUT + HASHING_INTERVAL
            asked_worker = [
                each for each in worker.received if isinstance(each, ManifestRequest)
            ]
            assert len(asked_worker) == 1 + answers, "both wait for one answer"

    virtual.run(scenario())
