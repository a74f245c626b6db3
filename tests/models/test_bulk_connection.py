"""Chunks of fast sources come past the session: both ends, over real sockets."""

import asyncio
import secrets
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from app.test_websocket_router import Anyone
from gateway.serving import eventually
from models.transfer_pair import files
from protocols.contexts import protocol_context
from shoal.app.websocket_router import WebSocketRouter
from shoal.domain.errors import Unavailable
from shoal.domain.model_messages import ChunkSent, ModelMessage
from shoal.models import chunk_selection, library_server
from shoal.models.bulk_connection import (
    BUFFERS,
    OPEN_MAX,
    BulkChunk,
    BulkReceiver,
    BulkSender,
    BulkSenders,
    ReadInto,
    name_in,
)
from shoal.models.fetch import fetch_model
from shoal.models.library import Library
from shoal.models.library_server import LibraryServer
from shoal.models.manifest import CHUNK
from shoal.models.peer_connection import DialledPeer
from shoal.protocols.seam.peer_session import PeerMessage, PeerSession, ToPeer
from shoal.protocols.shoal import PROTOCOL, Config
from shoal.transports.blocking.bulk_socket import BulkSocket
from shoal.transports.clock import LoopClock
from shoal.transports.driver import ConnectionEnd, Driver
from shoal.transports.http_server import http_listener
from shoal.transports.link import Link, LinkClosed
from shoal.transports.strangers import Strangers
from shoal.transports.tls import fingerprint_of, self_signed_tls

CONTENT = {"config.json": b"{}", "weights.bin": secrets.token_bytes(40 * CHUNK + 1)}
PASSCODE = "a passcode of two pools"
KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def every_source_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_selection, "PROMPT", float("inf"))


@dataclass
class Source:
    """A pool that shares CONTENT: how many chunks went which way."""

    peer: DialledPeer
    over_sessions: int = 0
    over_bulk: int = 0
    sessions: int = 0
    on_bulk: Callable[[BulkSender], None] = field(default=lambda sender: None)


@asynccontextmanager
async def source(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    secure: bool = False,
    offers: bool = True,
) -> AsyncIterator[Source]:
    theirs = folder / "theirs"
    theirs.mkdir()
    for name, content in CONTENT.items():
        (theirs / name).write_bytes(content)
    strangers, app, sharing = (
        Strangers(),
        web.Application(),
        LibraryServer(Library({"org/name": theirs})),
    )
    send = BulkSender.send

    async def counted(sender: BulkSender, chunk: int, read: ReadInto) -> None:
        found.over_bulk += 1
        found.on_bulk(sender)
        await send(sender, chunk, read)

    async def serve(wire: str, session: PeerSession, link: Link) -> ConnectionEnd:
        found.sessions += 1
        key = str(found.sessions)

        def receive(received: PeerMessage) -> None:
            def answer(reply: ModelMessage) -> bool:
                found.over_sessions += isinstance(reply, ChunkSent)
                return driver.send(ToPeer(received.peer, reply))

            if isinstance(received.message, ModelMessage):
                room = driver.wait_for_bulk_room
                sharing.on_message(key, received.message, answer, room)

        driver = Driver(session, link, LoopClock(), receive)
        try:
            return await driver.run()
        finally:
            sharing.on_peer_left(key)

    monkeypatch.setattr(BulkSender, "send", counted)
    endpoints = PROTOCOL.endpoints(Config(passcode=PASSCODE), protocol_context(0.0))
    named = [("shoal", each) for each in endpoints]
    bulk = sharing.bulk if offers else BulkSenders()
    router = WebSocketRouter(LoopClock(), Anyone(), named, serve, strangers, bulk)
    app.router.add_get("/{path:.*}", router.handle)
    tls = self_signed_tls("localhost").context if secure else None
    async with (
        sharing,
        asyncio.TaskGroup() as tasks,
        http_listener(app, "127.0.0.1", 0, tls, strangers) as bound,
    ):
        scheme = "https" if secure else "http"
        url = f"{scheme}://127.0.0.1:{bound.port}"
        fingerprint = None
        if secure:
            where = ("127.0.0.1", bound.port)
            shown = await asyncio.to_thread(ssl.get_server_certificate, where)
            fingerprint = fingerprint_of(shown)
        peer = DialledPeer(url, passcode=PASSCODE, fingerprint=fingerprint)
        found = Source(peer)
        router.open(tasks)
        yield found
        await router.close()


def bulk_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "bulk"]


@pytest.mark.parametrize("secure", [False, True])
async def test_chunks_of_a_fast_source_come_past_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    async with source(tmp_path, monkeypatch, secure=secure) as found:
        model = await fetch_model("org/name", [found.peer], tmp_path / "ours")

    assert files(model.path) == CONTENT
    assert found.over_bulk > 0
    assert found.over_bulk + found.over_sessions == 42
    assert found.sessions == 1
    assert not bulk_threads()


async def test_a_refused_connection_leaves_the_chunks_to_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with source(tmp_path, monkeypatch, offers=False) as found:
        model = await fetch_model("org/name", [found.peer], tmp_path / "ours")

    assert files(model.path) == CONTENT
    assert (found.over_bulk, found.sessions) == (0, 1)


async def test_a_fetch_goes_on_after_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(sender: BulkSender) -> None:
        if found.over_bulk % 3 == 0:
            sender.close()

    async with source(tmp_path, monkeypatch) as found:
        found.on_bulk = cut
        model = await fetch_model("org/name", [found.peer], tmp_path / "ours")

    assert files(model.path) == CONTENT
    assert found.sessions > 1
    assert not bulk_threads()


async def test_a_source_that_sends_other_bytes_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros(*_: object) -> int:
        return CHUNK

    def change(sender: BulkSender) -> None:
        monkeypatch.setattr(library_server, "read_chunk", zeros)

    async with source(tmp_path, monkeypatch) as found:
        found.on_bulk = change
        with pytest.raises(Unavailable, match="another hash"):
            await fetch_model("org/name", [found.peer], tmp_path / "ours")


async def test_a_cancelled_fetch_ends_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with source(tmp_path, monkeypatch) as found:
        begun = asyncio.Event()
        found.on_bulk = lambda sender: begun.set()
        fetch = fetch_model("org/name", [found.peer], tmp_path / "ours")
        fetching = asyncio.create_task(fetch)
        await begun.wait()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching

        assert not bulk_threads()


class Recorded(BulkSocket):
    """Messages that arrived, as a receiver reads them."""

    def __init__(self, messages: list[bytes]) -> None:
        super().__init__("ws://localhost")
        self._rest = iter(messages)

    def connect(self) -> bool:
        return True

    def receive_into(self, buffer: memoryview) -> int:
        if (message := next(self._rest, None)) is None:
            raise LinkClosed("no more")
        buffer[: len(message)] = message
        return len(message)


def message(number: int, chunk: int, data: bytes) -> bytes:
    """Return a message in the form of docs/protocols/shoal.md."""
    head, nonce = chunk.to_bytes(4), number.to_bytes(12)
    return head + AESGCM(KEY).encrypt(nonce, data, head)


async def received(messages: list[bytes]) -> tuple[list[tuple[int, bytes]], str]:
    """Return the chunks that a receiver takes, and why it ends."""
    chunks: list[tuple[int, bytes]] = []
    ended: list[str] = []

    def on_chunk(arrived: BulkChunk) -> None:
        chunks.append((arrived.chunk, bytes(arrived.data)))
        arrived.release()

    receiver = BulkReceiver(
        *(Recorded(messages), KEY, lambda chunk, data: True, on_chunk, ended.append)
    )
    await eventually(lambda: bool(ended))
    await receiver.close()
    return chunks, ended[0]


def damaged() -> Iterator[list[bytes]]:
    first, second = message(0, 7, b"seven"), message(1, 8, b"")
    yield [first, first]
    yield [second]
    yield [first, second[:-1]]
    yield [first, b""]
    yield [first, second, message(2, 9, b"nine")[:4]]
    for place in range(len(second)):
        changed = bytearray(second)
        changed[place] ^= 1
        yield [first, bytes(changed)]


async def test_messages_arrive_in_their_order() -> None:
    messages = [message(n, 3 * n, bytes([n])) for n in range(3 * BUFFERS)]

    chunks, why = await received(messages)

    assert chunks == [(3 * n, bytes([n])) for n in range(3 * BUFFERS)]
    assert why == "no more"


async def test_messages_that_the_source_did_not_send_so_end_the_connection() -> None:
    for messages in damaged():
        chunks, why = await received(messages)

        assert "not genuine" in why
        assert chunks == [(7, b"seven"), (8, b"")][: len(messages) - 1]


async def test_a_connection_is_opened_once_and_ends_with_its_peer() -> None:
    senders = BulkSenders()
    first = name_in(senders.offer("peer", b"root"))
    second = name_in(senders.offer("peer", b"root"))
    other = name_in(senders.offer("other", b"root"))

    assert senders.open(first) is None, "the second is in its place"
    assert senders.open(second) is not None
    assert senders.open(second) is None
    senders.on_peer_left("other")
    assert senders.open(other) is None
    assert senders.open("") is None


async def test_a_source_has_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BulkSender, "is_open", True)
    senders = BulkSenders()
    names = [name_in(senders.offer(str(n), b"root")) for n in range(OPEN_MAX)]

    assert senders.open(names[0]) is None
    senders.on_peer_left("1")
    assert senders.open(names[0]) is not None
