"""Answers and transfers to peers."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.serving import eventually
from models.transfer_pair import RecordingPeer
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelQuery,
    ModelRequest,
)
from shoal.models.library import CHUNK, Library
from shoal.models.library_server import (
    QUERIES_MAX,
    SENDING_MAX,
    SENDING_TO_PEER_MAX,
    LibraryServer,
)

BIG = b"big" * CHUNK  # of three pieces


async def settled() -> None:
    """Let the callbacks of ended tasks run."""
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.fixture
async def sharing(tmp_path: Path) -> AsyncIterator[LibraryServer]:
    (tmp_path / "small").write_bytes(b"small")
    (tmp_path / "big").write_bytes(BIG)
    (tmp_path / "gone").touch()
    names = ("small", "big", "gone")
    library = Library({name: tmp_path / name for name in names})
    (tmp_path / "gone").unlink()
    async with LibraryServer(library) as sharing:
        yield sharing


async def test_query_returns_the_models_size(
    sharing: LibraryServer,
) -> None:
    peer = RecordingPeer()

    for name in ("small", "", "../small", "gone"):
        sharing.on_message("peer", ModelQuery(name), peer.send, peer.room)
    await peer.until(4)

    assert set(peer.received) == {
        ModelAnswer("small", True, 5),
        ModelAnswer("", False),
        ModelAnswer("../small", False),
        ModelAnswer("gone", False),
    }


async def test_model_is_sent_piece_by_piece_and_ended(sharing: LibraryServer) -> None:
    peer = RecordingPeer()

    sharing.on_message("peer", ModelRequest("id", "big"), peer.send, peer.room)
    await peer.until(4)

    *chunks, done = peer.received
    assert done == ModelDone("id", "big")
    sent = [(c.offset, c.last) for c in chunks if isinstance(c, ModelChunk)]
    assert sent == [(0, False), (CHUNK, False), (2 * CHUNK, True)]


@pytest.mark.parametrize("name", ["none", "..", "gone"])
async def test_unknown_model_is_refused_explicitly(
    sharing: LibraryServer, name: str
) -> None:
    peer = RecordingPeer()

    sharing.on_message("peer", ModelRequest("id", name), peer.send, peer.room)
    await peer.until(1)

    assert peer.received == [ModelAnswer(name, False)]


async def test_slow_reader_gets_no_more_pieces(sharing: LibraryServer) -> None:
    peer, other = RecordingPeer(pieces=1), RecordingPeer()

    sharing.on_message("slow", ModelRequest("id", "big"), peer.send, peer.room)
    await peer.until(1)
    sharing.on_message("other", ModelRequest("id", "big"), other.send, other.room)
    await other.until(4)
    assert len(peer.received) == 1

    peer.read(2)
    await peer.until(4)
    assert isinstance(peer.received[-1], ModelDone)


async def test_stalled_peer_does_not_block_others(
    sharing: LibraryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.models.library_server.STALL_TIMEOUT", 0.01)
    peer = RecordingPeer(pieces=1)

    sharing.on_message("peer", ModelRequest("1", "big"), peer.send, peer.room)
    await peer.until(2)

    assert peer.received[-1] == ModelAnswer("big", False)
    await settled()
    assert not sharing._sending


async def test_transfers_of_one_peer_are_limited(
    sharing: LibraryServer,
) -> None:
    peer = RecordingPeer(pieces=0)

    for number in range(SENDING_TO_PEER_MAX + 1):
        request = ModelRequest(f"id{number}", "big")
        sharing.on_message("peer", request, peer.send, peer.room)
    await peer.until(1)
    assert peer.received == [ModelAnswer("big", False)]

    peer.read(3 * SENDING_TO_PEER_MAX)
    await peer.until(1 + 4 * SENDING_TO_PEER_MAX)
    await settled()
    sharing.on_message("peer", ModelRequest("again", "small"), peer.send, peer.room)
    peer.read(1)
    await peer.until(3 + 4 * SENDING_TO_PEER_MAX)
    assert peer.received[-1] == ModelDone("again", "small")


async def test_transfers_of_all_peers_are_limited(sharing: LibraryServer) -> None:
    peer, late = RecordingPeer(pieces=0), RecordingPeer()

    for number in range(SENDING_MAX):
        request = ModelRequest("id", "big")
        sharing.on_message(f"peer{number}", request, peer.send, peer.room)
    sharing.on_message("late", ModelRequest("id", "big"), late.send, late.room)

    assert late.received == [ModelAnswer("big", False)]
    peer.read(3 * SENDING_MAX)
    await peer.until(4 * SENDING_MAX)


@pytest.mark.parametrize("number", ["same", "x" * 65])
async def test_transfer_ids_are_chosen_by_peers(
    sharing: LibraryServer, number: str
) -> None:
    peer = RecordingPeer(pieces=0)
    sharing.on_message("peer", ModelRequest("same", "big"), peer.send, peer.room)

    sharing.on_message("peer", ModelRequest(number, "big"), peer.send, peer.room)

    assert peer.received == [ModelAnswer("big", False)]
    peer.read(3)
    await peer.until(5)


async def test_transfers_end_when_the_peer_leaves(sharing: LibraryServer) -> None:
    peer = RecordingPeer(pieces=1)
    sharing.on_message("peer", ModelRequest("id", "big"), peer.send, peer.room)
    await peer.until(1)

    sharing.on_peer_left("peer")
    peer.read(9)
    again = RecordingPeer()
    sharing.on_message("peer", ModelRequest("id2", "small"), again.send, again.room)
    await again.until(2)

    assert len(peer.received) == 1


async def test_transfers_end_with_their_connection(
    sharing: LibraryServer,
) -> None:
    peer, other = RecordingPeer(pieces=1), RecordingPeer()
    sharing.on_message("peer", ModelRequest("id", "big"), peer.send, peer.room)
    await peer.until(1)

    peer.connected = False
    peer.read(1)
    for number in range(SENDING_TO_PEER_MAX):
        request = ModelRequest(f"id{number}", "big")
        sharing.on_message("other", request, other.send, other.room)
    await other.until(4 * SENDING_TO_PEER_MAX)
    await eventually(lambda: not sharing._sending)

    assert len(peer.received) == 1


async def test_query_flood_is_dropped(
    sharing: LibraryServer, caplog: pytest.LogCaptureFixture
) -> None:
    peer = RecordingPeer()

    for _ in range(10 * QUERIES_MAX):
        sharing.on_message("peer", ModelQuery("small"), peer.send, peer.room)
    await peer.until(QUERIES_MAX)
    await settled()

    assert len(peer.received) == QUERIES_MAX
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "message",
    [ModelChunk("id", "../x", 0, b"1"), ModelDone("id", "../x"), ModelAnswer("", True)],
)
async def test_unrequested_messages_are_refused_and_logged_once(
    sharing: LibraryServer, caplog: pytest.LogCaptureFixture, message: ModelChunk
) -> None:
    peer = RecordingPeer()

    for _ in range(1000):
        sharing.on_message("peer", message, peer.send, peer.room)

    assert peer.received == []
    assert [each.levelno for each in caplog.records] == [logging.WARNING]


async def test_truncated_file_is_not_completed(
    sharing: LibraryServer, tmp_path: Path
) -> None:
    peer = RecordingPeer(pieces=1)
    sharing.on_message("peer", ModelRequest("id", "big"), peer.send, peer.room)
    await peer.until(1)
    (tmp_path / "big").write_bytes(b"")

    peer.read(9)
    while not isinstance(peer.received[-1], ModelAnswer):
        await peer.until(len(peer.received) + 1)

    assert peer.received[-1] == ModelAnswer("big", False)
    assert not any(isinstance(message, ModelDone) for message in peer.received)
