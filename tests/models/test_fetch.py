"""Downloads over a wire: both ends are real, only the link is in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from models.transfer_pair import files
from protocols.contexts import protocol_context
from shoal.domain.errors import PeerError, TimedOut, Unavailable, UnknownModel
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.model_messages import (
    ChunksRequest,
    ManifestAnswer,
    ManifestRequest,
    ModelAnswer,
    ModelChunk,
    ModelMessage,
    ModelQuery,
    ModelRequest,
)
from shoal.domain.vocabulary import Rejected, RunJob
from shoal.domain.work import Chat
from shoal.domain.worker import ServedModel
from shoal.ledger.keys import Signer
from shoal.models import chunk_selection, download, fetch
from shoal.models.download import DownloadedModel, DownloadRequest
from shoal.models.fetch import fetch_model
from shoal.models.library import CHUNK, Library
from shoal.models.library_server import LibraryServer
from shoal.models.manifest import FileEntry, Manifest
from shoal.models.peer_connection import PeerConnection, over_link
from shoal.protocols import discover
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.endpoints import (
    Listener,
    ListenerTls,
    UpgradeRequest,
    WebSocketRoute,
)
from shoal.protocols.seam.peer_session import (
    PeerJoined,
    PeerMessage,
    PeerSession,
    ToPeer,
)
from shoal.protocols.seam.protocol import AnyWireProtocol, Endpoint
from shoal.protocols.shoal.session import ShoalSession
from shoal.transports.clock import LoopClock
from shoal.transports.driver import Driver
from shoal.transports.local_link import LocalLink, local_links

CONTENT = {"config.json": b"{}", "empty": b"", "weights.bin": b"weights" * CHUNK}
GUEST = WorkerProfile(
    "guest",
    ServedModel(""),
    0,
    identity=Signer.from_seed(bytes(32)),
    random_bytes=lambda size: bytes(range(1, size + 1)),
)

pytestmark = pytest.mark.parametrize(
    "wire",
    [protocol for protocol in discover().values() if protocol.peering is not None],
    ids=lambda protocol: str(protocol.name),
)


@dataclass
class LinkedPeer:
    """A source at the other end of a link, which can be connected once."""

    session: PeerSession
    link: LocalLink
    clock: LoopClock
    url: str = "link"

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[PeerConnection]:
        try:
            async with over_link(self.session, self.link, self.clock) as connection:
                yield connection
        finally:
            await self.link.close(1000, "")


@dataclass
class Host:
    """A peer with a library, on a connection; ``also`` sees its messages."""

    driver: Driver[PeerMessage, ToPeer]
    link: LocalLink  # the guest's end
    wire: AnyWireProtocol
    wanted: DownloadRequest
    received: list[PeerMessage] = field(default_factory=list)
    also: Callable[[PeerMessage], None] = lambda received: None
    shares: bool = True  # else it answers queries, and sends nothing

    async def visit(self, passcode: str = "") -> DownloadedModel:
        """Download the model with this passcode."""
        clock = LoopClock()
        assert self.wire.peering is not None
        profile = replace(GUEST, passcode=passcode)
        scheme = "http" if self.wire.preferred else "tcp"
        outgoing = self.wire.peering(f"{scheme}://127.0.0.1:4000", profile)
        session = outgoing.new_session(clock.now())
        source = LinkedPeer(session, self.link, clock)
        wanted = self.wanted
        return await fetch_model(wanted.model, [source], wanted.folder, whole=wanted)


def accepted(endpoints: Sequence[Endpoint], now: float) -> PeerSession:
    """Return the host's session, at its port, or the path for pools."""
    for each in endpoints:
        if isinstance(each, Listener) and each.security is ListenerTls.NONE:
            return each.accept("127.0.0.1", now)
        request = UpgradeRequest("/shoal/pool", address="127.0.0.1")
        if isinstance(each, WebSocketRoute) and each.claims(request):
            return each.accept(request, now).session
    raise AssertionError("no endpoint is for peers")


@asynccontextmanager
async def hosted(
    wire: AnyWireProtocol, folder: Path, passcode: str = ""
) -> AsyncIterator[Host]:
    """Run a peer that shares CONTENT as org/name, until the block ends."""
    clock = LoopClock()
    remote = folder / "theirs"
    remote.mkdir()
    for name, content in CONTENT.items():
        (remote / name).write_bytes(content)
    config = wire.config(passcode=passcode)
    endpoints = wire.endpoints(config, protocol_context())
    host_end, guests = local_links("host", "guest")
    async with LibraryServer(Library({"org/name": remote})) as sharing:

        def receive(message: PeerMessage) -> None:
            host.received.append(message)
            host.also(message)
            asked = isinstance(message.message, ModelRequest | ChunksRequest)
            withheld = asked and not host.shares
            if isinstance(message.message, ModelMessage) and not withheld:
                sharing.on_message(
                    message.peer, message.message, sender(message.peer), room
                )

        def sender(peer: str) -> Callable[[ModelMessage], bool]:
            return lambda message: driver.send(ToPeer(peer, message))

        session = accepted(endpoints, clock.now())
        driver = Driver(session, host_end, clock, receive)
        room = driver.wait_for_bulk_room
        host = Host(driver, guests, wire, DownloadRequest("org/name", folder / "ours"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(driver.run())
            yield host
            driver.disconnect("done")


async def test_model_is_downloaded(wire: AnyWireProtocol, tmp_path: Path) -> None:
    async with hosted(wire, tmp_path) as host:
        got = await host.visit()

    assert got.path == tmp_path / "ours" / "org" / "name"
    assert files(got.path) == CONTENT
    assert isinstance(host.received[0].message, PeerJoined)


async def test_correct_passcode_is_admitted(
    wire: AnyWireProtocol, tmp_path: Path
) -> None:
    async with hosted(wire, tmp_path, "cod") as host:
        got = await host.visit("cod")

    assert files(got.path) == CONTENT


async def test_wrong_passcode_is_the_reported_reason(
    wire: AnyWireProtocol, tmp_path: Path
) -> None:
    async with hosted(wire, tmp_path, "cod") as host:
        with pytest.raises(Unavailable, match="passcode"):
            await host.visit("herring")

    assert host.received == []
    assert not (tmp_path / "ours").exists()


async def test_silent_disconnect_suggests_a_passcode(
    wire: AnyWireProtocol, tmp_path: Path
) -> None:
    async with hosted(wire, tmp_path) as host:
        host_end, host.link = local_links("no host of ours", "guest")
        await host_end.close(1000, "")
        with pytest.raises(Unavailable, match="may require a passcode"):
            await host.visit()


async def test_port_of_another_protocol_is_reported(
    wire: AnyWireProtocol, tmp_path: Path
) -> None:
    async with hosted(wire, tmp_path) as host:
        host_end, host.link = local_links("web server", "guest")
        await host_end.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(Unavailable, match="serves another protocol"):
            await host.visit()


async def test_unshared_model_is_unknown(wire: AnyWireProtocol, tmp_path: Path) -> None:
    async with hosted(wire, tmp_path) as host:
        host.wanted = replace(host.wanted, model="theirs")
        with pytest.raises(UnknownModel, match="does not share theirs"):
            await host.visit()


async def test_disconnected_host_leaves_no_model(
    wire: AnyWireProtocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "RETRY_FIRST", 0.0)
    async with hosted(wire, tmp_path) as host:

        def leave(message: PeerMessage) -> None:
            if isinstance(message.message, ModelRequest | ChunksRequest):
                asyncio.get_running_loop().call_soon(host.driver.disconnect, "killed")

        host.also = leave
        with pytest.raises(Unavailable, match="closed by peer"):
            await host.visit()

    assert not (tmp_path / "ours" / "org").exists()


async def test_downloading_peer_declines_queries_and_jobs(
    wire: AnyWireProtocol, tmp_path: Path
) -> None:
    chat = Chat("any", ({"role": "user", "content": "hi"},))
    async with hosted(wire, tmp_path) as host:

        def query(message: PeerMessage) -> None:
            if isinstance(message.message, ModelQuery | ManifestRequest):
                host.driver.send(ToPeer(message.peer, ModelQuery("yours")))
                job = RunJob(JobId("job"), LeaseNumber(1), chat)
                host.driver.send(ToPeer(message.peer, job))

        host.also = query
        await host.visit()

    answers = [received.message for received in host.received]
    sizes = None, 0  # of what there is not
    assert any(ModelAnswer("yours", available=False, size=n) in answers for n in sizes)
    assert [message.job_id for message in answers if isinstance(message, Rejected)] == [
        "job"
    ]


async def test_host_with_invalid_files_fails(
    wire: AnyWireProtocol, tmp_path: Path
) -> None:
    async with hosted(wire, tmp_path) as host:

        def climb(message: PeerMessage) -> None:
            number = getattr(message.message, "transfer_id", None)
            if number is not None:
                # Some wires do not let this one through.
                up = ModelChunk(number, "../../../escaped", 0, b"!")
                device = ModelChunk(number, "CON", 0, b"!")
                host.driver.send(ToPeer(message.peer, up))
                host.driver.send(ToPeer(message.peer, device))
            elif isinstance(message.message, ManifestRequest):
                bad = Manifest((FileEntry("../escaped", 0, bytes(32), b""),))
                answer = ManifestAnswer("org/name", bad.encoded)
                host.driver.send(ToPeer(message.peer, answer))

        host.also = climb
        with pytest.raises(PeerError, match="is not a valid name of a model's"):
            await host.visit()

    assert set(files(tmp_path)) == {f"theirs/{name}" for name in CONTENT}


async def test_older_release_sends_the_whole_model(
    wire: AnyWireProtocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On the other wire, no release sends chunks.
    hello = ShoalSession._hello
    monkeypatch.setattr(
        ShoalSession,
        "_hello",
        lambda session: msgspec.structs.replace(hello(session), chunks=False),
    )
    async with hosted(wire, tmp_path) as host:
        got = await host.visit()

    assert files(got.path) == CONTENT
    asked = [type(each.message) for each in host.received]
    assert ModelRequest in asked
    assert ManifestRequest not in asked


async def test_silent_host_is_the_reported_reason(
    wire: AnyWireProtocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_selection, "SILENCE_TIMEOUT", 0.2)
    monkeypatch.setattr(download, "SILENCE_TIMEOUT", 0.2)
    kind, why = (
        (PeerError, r"sent nothing for 0\.2 s")
        if wire.preferred
        else (TimedOut, r"nothing for 0\.2 s: other programs cannot send a model with")
    )
    async with hosted(wire, tmp_path) as host:
        host.shares = False
        with pytest.raises(kind, match=why):
            await host.visit()
