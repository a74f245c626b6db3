"""Peers that fetch a model at the same time, and send each other what they have."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from gateway.serving import eventually
from models.chunk_hosts import ChunkHost
from models.test_fetch_chunks import CHUNKS, CONTENT, Hosts
from models.test_remote_models import Worker
from models.transfer_pair import RecordingPeer, files
from shoal.app.model_port import address_towards, model_port, port_towards
from shoal.domain.errors import ConfigError, Unavailable
from shoal.domain.model_messages import (
    ChunkSent,
    ManifestAnswer,
    ManifestRequest,
    ModelMessage,
    SeederAt,
)
from shoal.models import chunk_selection, fetch, manifest, seed_server
from shoal.models.chunk_senders import ByteRate, Receiver
from shoal.models.fetch import fetch_model
from shoal.models.library import Library
from shoal.models.library_server import LibraryServer
from shoal.models.manifest import CHUNK
from shoal.models.peer_connection import DialledPeer
from shoal.models.seed_server import Seeders
from shoal.peers.relay import ServeSession
from shoal.protocols.seam.peer_session import PeerMessage, PeerSession
from shoal.transports.clock import LoopClock
from shoal.transports.driver import ConnectionEnd, Driver
from shoal.transports.link import Link

PORT = partial(model_port, "127.0.0.1")


@dataclass
class CountedRate(ByteRate):
    """A rate without a limit; ``taken`` are the bytes that were sent within it."""

    taken: int = 0

    async def take(self, size: int) -> None:
        self.taken += size


async def test_receivers_send_each_other_what_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source sends nothing, and each of two has a half."""
    rate = CountedRate()
    monkeypatch.setattr(chunk_selection, "REPEAT_AFTER", 0.05)
    weights = CONTENT["weights.bin"]
    half = CHUNKS // 2 * CHUNK
    donors = [tmp_path / "first", tmp_path / "config", tmp_path / "second"]
    donors[0].write_bytes(weights[:half] + bytes(len(weights) - half))
    donors[1].write_bytes(CONTENT["config.json"])
    donors[2].write_bytes(bytes(half) + weights[half:])

    async with AsyncExitStack() as stack:
        host = await Hosts(tmp_path, stack).add()
        host.tamper = lambda message: (
            [] if isinstance(message, ChunkSent) else [message]
        )
        models = await asyncio.gather(
            *(
                fetch_model(
                    *("org/name", [host], tmp_path / f"ours{number}"),
                    donors=has,
                    open_port=PORT,
                    rate=rate,
                )
                for number, has in enumerate((donors[:2], donors[2:]))
            )
        )

    assert [files(each.path) for each in models] == [CONTENT] * 2
    assert host.chunks == []
    assert rate.taken >= len(weights) - CHUNK  # one is all zeros, which both have


async def test_a_machine_with_the_model_sends_it_to_others_of_its_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator, which would pass the model on, sends nothing."""
    monkeypatch.setattr(chunk_selection, "REPEAT_AFTER", 0.05)
    monkeypatch.setattr(seed_server, "LINGER", 0.2)
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name, data in CONTENT.items():
        (folder / name).write_bytes(data)
    closed: list[str] = []

    @asynccontextmanager
    async def port(passcode: str, serve: ServeSession) -> AsyncIterator[str]:
        async with PORT(passcode, serve) as url:
            yield url
        closed.append(url)

    library = LibraryServer(Library({"org/name": folder}), find_port=lambda: port)

    async with LibraryServer(Library({})) as coordinator, library:
        worker = Worker(coordinator, library).join()
        host = ChunkHost("http://203.0.113.1", coordinator)
        host.tamper = lambda message: (
            [] if isinstance(message, ChunkSent) else [message]
        )
        for number in (1, 2):
            got = await fetch_model(
                "org/name", [host], tmp_path / f"ours{number}", open_port=PORT
            )
            assert files(got.path) == CONTENT
            await eventually(partial(_has, closed, number))

    assert host.chunks == []
    sent = [each.url for each in worker.sent if isinstance(each, SeederAt)]
    assert sent == closed


def _has(items: list[str], count: int) -> bool:
    return len(items) == count


async def test_only_who_knows_the_passcode_gets_anything() -> None:
    received: list[PeerMessage] = []

    async def serve(wire: str, session: PeerSession, link: Link) -> ConnectionEnd:
        return await Driver(session, link, LoopClock(), received.append).run()

    async with PORT("a passcode", serve) as url:
        for passcode in ("", "another"):
            with pytest.raises(Unavailable, match=r"passcode|token"):
                async with DialledPeer(url, passcode=passcode).connect():
                    pass
        assert received == []
        async with DialledPeer(url, passcode="a passcode").connect():
            assert received


async def test_a_port_that_cannot_be_opened_is_not_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def closed(passcode: str, serve: object) -> object:
        raise ConfigError("no port is free")

    async with AsyncExitStack() as stack:
        host = await Hosts(tmp_path, stack).add()
        got = await fetch_model(
            "org/name",
            [host],
            tmp_path / "ours",
            open_port=closed,  # type: ignore[arg-type]
        )

    assert files(got.path) == CONTENT
    assert "others get nothing from here: no port is free" in caplog.text


async def test_seeders_elsewhere_are_not_dialled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled: list[str] = []
    monkeypatch.setattr(fetch, "DialledPeer", lambda url, passcode: dialled.append(url))

    def name_others(message: ModelMessage) -> list[ModelMessage]:
        if not isinstance(message, ChunkSent):
            return [message]
        odd = ("tcp://127.0.0.1:1", "https://127.0.0.1", "/", "")
        return [*(SeederAt(message.root, each, "x") for each in odd), message]

    async with AsyncExitStack() as stack:
        host = await Hosts(tmp_path, stack).add()
        host.tamper = name_others
        await fetch_model("org/name", [host], tmp_path / "ours", open_port=PORT)

    assert dialled == []


async def test_a_seeder_with_too_long_a_url_is_ignored(tmp_path: Path) -> None:
    sought: list[str] = []
    guest = RecordingPeer()
    library = Library({"org/name": tmp_path})
    (tmp_path / "config.json").write_bytes(b"{}")

    def find_port() -> None:
        sought.append("port")

    async with LibraryServer(library, find_port=find_port) as sharing:

        def answers() -> list[ManifestAnswer]:
            return [x for x in guest.received if isinstance(x, ManifestAnswer)]

        async def root_of_answer(number: int) -> bytes:
            ask("guest", ManifestRequest("org/name"), guest.send, guest.room)
            await eventually(lambda: len(answers()) == number)
            return manifest.decode(answers()[-1].manifest).root

        ask = sharing.on_message
        root = await root_of_answer(1)
        long = SeederAt(root, "http://" + 300 * "x", "secret")
        ask("guest", long, guest.send, guest.room)
        await root_of_answer(2)
        assert sought == []
        ask("guest", SeederAt(root, "http://x", "secret"), guest.send, guest.room)
        await eventually(lambda: sought == ["port"])


def test_seeders_of_one_model_hear_of_each_other() -> None:
    seeders, peers = Seeders(), [RecordingPeer() for _ in range(4)]

    def add(number: int, root: bytes, url: str) -> SeederAt:
        peer, seeder = peers[number], SeederAt(root, url, "secret")
        seeders.add(Receiver(f"p{number}", peer.send, peer.room), seeder)
        return seeder

    a, b = add(0, b"one", "http://a"), add(1, b"one", "http://b")
    add(2, b"two", "http://c")
    add(0, b"one", "http://a")  # again
    seeders.remove("p0")
    d = add(3, b"one", "http://d")
    add(3, b"one", "http://" + 300 * "x")

    assert peers[0].received == [b]
    assert peers[1].received == [a, d]
    assert peers[2].received == []
    assert peers[3].received == [b]


def test_a_chunk_is_sent_by_the_source_once_while_others_can_send_it() -> None:
    seeders, peer, root = Seeders(), RecordingPeer(), b"root"
    for name in ("a", "b"):
        seeder = SeederAt(root, f"http://{name}", "secret")
        seeders.add(Receiver(name, peer.send, peer.room), seeder)

    assert seeders.elsewhere("a", root, [1, 2]) == set()
    assert seeders.elsewhere("a", root, [1]) == set()  # again
    assert seeders.elsewhere("b", root, [1, 3]) == {1}
    assert seeders.elsewhere("b", root, [1]) == set()  # it could not get it
    assert seeders.elsewhere("b", b"another", [2]) == set()
    assert seeders.elsewhere("no seeder", root, [2]) == set()
    seeders.remove("a")
    assert seeders.elsewhere("b", root, [2]) == set()
    seeders.remove("b")
    assert seeders == Seeders()


def test_the_address_towards_a_peer_is_one_of_this_machine() -> None:
    assert address_towards("http://127.0.0.1:4010") == "127.0.0.1"
    assert port_towards("http://127.0.0.1:4010") is not None
    assert port_towards("http://no-such-host.invalid:1") is None
    assert port_towards("tcp://127.0.0.1:4010") is None  # of another program
    assert address_towards("http://no-such-host.invalid:1") == ""
    assert address_towards("http://[") == ""


ROOT = b"root"


async def _writable() -> None:
    pass


def peer(name: str, received: list[ModelMessage]) -> Receiver:
    def send(message: ModelMessage) -> bool:
        received.append(message)
        return True

    return Receiver(name, send, _writable)


def test_peer_that_sends_nothing_hears_of_others_that_do() -> None:
    seeders = Seeders()
    to_one, to_two, to_quiet = (list[ModelMessage]() for _ in range(3))
    one, two = (SeederAt(ROOT, f"http://{each}", "code") for each in ("one", "two"))

    seeders.add(peer("one", to_one), one)
    seeders.add(peer("quiet", to_quiet), SeederAt(ROOT, "", ""))
    seeders.add(peer("two", to_two), two)

    assert to_quiet == [one, two]
    assert to_one == [two]
    assert to_two == [one]


def test_chunks_of_a_peer_that_sends_nothing_are_not_elsewhere() -> None:
    seeders = Seeders()
    seeders.add(peer("quiet", []), SeederAt(ROOT, "", ""))
    seeders.add(peer("one", []), SeederAt(ROOT, "http://one", "code"))

    assert seeders.elsewhere("quiet", ROOT, [1]) == set()
    assert seeders.elsewhere("one", ROOT, [1, 2]) == set()
    assert seeders.elsewhere("quiet", ROOT, [1, 2]) == {1, 2}
