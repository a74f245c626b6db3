"""Copying a model over a wire: both ends are the real ones, only the cable is not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from models.tied import files
from protocols.settings import setting
from shoal.domain.errors import PeerError, Unavailable, UnknownModel
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.sharing import ModelAnswer, ModelChunk, ModelQuery, ModelWord
from shoal.domain.vocabulary import Rejected, RunJob
from shoal.domain.work import Chat
from shoal.domain.worker import Model
from shoal.ledger.keys import Signer
from shoal.models.fetching import Got, Wanted
from shoal.models.library import CHUNK, Library
from shoal.models.sharing import Sharing
from shoal.models.visiting import fetch
from shoal.protocols import Protocol, discover
from shoal.protocols.crowd import From, Listener, Met, Security, To
from shoal.protocols.session import Member
from shoal.runtime.clock import LoopClock
from shoal.runtime.driver import Driver
from shoal.runtime.local_link import LocalLink, local_links

CONTENT = {"config.json": b"{}", "empty": b"", "weights.bin": b"weights" * CHUNK}
GUEST = Member(
    "guest",
    Model(""),
    0,
    identity=Signer.from_seed(bytes(32)),
    draw=lambda size: bytes(range(1, size + 1)),
)

pytestmark = pytest.mark.parametrize(
    "wire",
    [protocol for protocol in discover().values() if protocol.peering is not None],
    ids=lambda protocol: str(protocol.name),
)


@dataclass
class Host:
    """A peer with a library, on a connection; ``also`` sees what is said to it."""

    driver: Driver[From, To]
    link: LocalLink  # the guest's end
    wire: Protocol
    wanted: Wanted
    heard: list[From] = field(default_factory=list)
    also: Callable[[From], None] = lambda heard: None

    async def visit(self, passcode: str = "") -> Got:
        """Get the model, as a guest with this passcode."""
        clock = LoopClock()
        assert self.wire.peering is not None
        guest = replace(GUEST, passcode=passcode)
        outgoing = self.wire.peering("tcp://127.0.0.1:4000", guest)
        session = outgoing.open(clock.now())
        return await fetch(session, self.link, clock, self.wanted)


@asynccontextmanager
async def hosted(
    wire: Protocol, folder: Path, passcode: str = ""
) -> AsyncIterator[Host]:
    """Run a peer that shares CONTENT as org/name, until the block ends."""
    clock = LoopClock()
    theirs = folder / "theirs"
    theirs.mkdir()
    for name, content in CONTENT.items():
        (theirs / name).write_bytes(content)
    config = wire.config(passcode=passcode)
    (listener,) = [
        endpoint
        for endpoint in wire.endpoints(config, setting())
        if isinstance(endpoint, Listener) and endpoint.security is Security.NONE
    ]
    ours, guests = local_links("host", "guest")
    async with Sharing(Library({"org/name": theirs})) as sharing:

        def told(message: From) -> None:
            host.heard.append(message)
            host.also(message)
            if isinstance(message.word, ModelWord):
                sharing.share(message.peer, message.word, say(message.peer), room)

        def say(peer: str) -> Callable[[ModelWord], bool]:
            return lambda word: driver.issue(To(peer, word))

        session = listener.accept("127.0.0.1", clock.now())
        driver = Driver(session, ours, clock, told)
        room = driver.room
        host = Host(driver, guests, wire, Wanted("org/name", folder / "ours"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(driver.run())
            yield host
            driver.hang_up("done")


async def test_model_is_copied(wire: Protocol, tmp_path: Path) -> None:
    async with hosted(wire, tmp_path) as host:
        got = await host.visit()

    assert got.path == tmp_path / "ours" / "org" / "name"
    assert files(got.path) == CONTENT
    assert isinstance(host.heard[0].word, Met)


async def test_passcode_opens_the_door(wire: Protocol, tmp_path: Path) -> None:
    async with hosted(wire, tmp_path, "cod") as host:
        got = await host.visit("cod")

    assert files(got.path) == CONTENT


async def test_wrong_passcode_is_said_to_be_the_reason(
    wire: Protocol, tmp_path: Path
) -> None:
    async with hosted(wire, tmp_path, "cod") as host:
        with pytest.raises(Unavailable, match="passcode"):
            await host.visit("herring")

    assert host.heard == []
    assert not (tmp_path / "ours").exists()


async def test_peer_that_hangs_up_without_a_word_may_want_a_passcode(
    wire: Protocol, tmp_path: Path
) -> None:
    async with hosted(wire, tmp_path) as host:
        ours, host.link = local_links("no host of ours", "guest")
        await ours.close(1000, "")
        with pytest.raises(Unavailable, match="has a passcode wants it from us"):
            await host.visit()


async def test_port_of_something_else_is_said_to_be_one(
    wire: Protocol, tmp_path: Path
) -> None:
    async with hosted(wire, tmp_path) as host:
        ours, host.link = local_links("web server", "guest")
        await ours.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(Unavailable, match="something else answers there"):
            await host.visit()


async def test_model_that_is_not_shared_is_not_there(
    wire: Protocol, tmp_path: Path
) -> None:
    async with hosted(wire, tmp_path) as host:
        host.wanted = replace(host.wanted, model="theirs")
        with pytest.raises(UnknownModel, match="does not share theirs"):
            await host.visit()


async def test_host_that_goes_away_leaves_nothing_behind(
    wire: Protocol, tmp_path: Path
) -> None:
    async with hosted(wire, tmp_path) as host:

        def leave(message: From) -> None:
            if not isinstance(message.word, (Met, ModelQuery)):
                asyncio.get_running_loop().call_soon(host.driver.hang_up, "killed")

        host.also = leave
        with pytest.raises(Unavailable, match="the connection ended"):
            await host.visit()

    assert files(tmp_path / "ours") == {}


async def test_guest_is_asked_in_vain(wire: Protocol, tmp_path: Path) -> None:
    chat = Chat("any", ({"role": "user", "content": "hi"},))
    async with hosted(wire, tmp_path) as host:

        def ask(message: From) -> None:
            if isinstance(message.word, ModelQuery):
                host.driver.issue(To(message.peer, ModelQuery("yours")))
                job = RunJob(JobId("job"), LeaseNumber(1), chat)
                host.driver.issue(To(message.peer, job))

        host.also = ask
        await host.visit()

    said = [heard.word for heard in host.heard]
    assert ModelAnswer("yours", available=False) in said
    assert [word.job_id for word in said if isinstance(word, Rejected)] == ["job"]


async def test_host_that_sends_what_is_no_file_gets_nowhere(
    wire: Protocol, tmp_path: Path
) -> None:
    async with hosted(wire, tmp_path) as host:

        def climb(message: From) -> None:
            number = getattr(message.word, "transfer_id", None)
            if number is not None:
                # The wire itself does not let this one through.
                up = ModelChunk(number, "../../../escaped", 0, b"!")
                device = ModelChunk(number, "CON", 0, b"!")
                host.driver.issue(To(message.peer, up))
                host.driver.issue(To(message.peer, device))

        host.also = climb
        with pytest.raises(PeerError, match="'CON' cannot be the name of a model's"):
            await host.visit()

    assert set(files(tmp_path)) == {f"theirs/{name}" for name in CONTENT}
