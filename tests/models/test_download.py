"""Downloads from peers, also faulty and hostile ones."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from harness.speed import scaled
from models.transfer_pair import Tamper, TransferPair, files
from shoal.domain.errors import (
    ConfigError,
    PeerError,
    TimedOut,
    Unavailable,
    UnknownModel,
)
from shoal.domain.model_messages import (
    ModelAnswer,
    ModelChunk,
    ModelDone,
    ModelMessage,
    ModelQuery,
    ModelRequest,
)
from shoal.models import chunk_selection, download, remote_models
from shoal.models.download import DownloadRequest
from shoal.models.library import CHUNK, Library
from shoal.models.library_server import LibraryServer

CONTENT = {"config.json": b"{}", "empty": b"", "weights.bin": b"weights" * CHUNK}


@pytest.fixture
async def tied(tmp_path: Path) -> AsyncIterator[TransferPair]:
    remote = tmp_path / "theirs"
    remote.mkdir()
    for name, content in CONTENT.items():
        (remote / name).write_bytes(content)
    library = Library({"org/name": remote})
    async with LibraryServer(library) as sharing:
        yield TransferPair(sharing, DownloadRequest("org/name", tmp_path / "ours"))


async def test_downloaded_model_is_identical(
    tied: TransferPair, tmp_path: Path
) -> None:
    got = await tied.fetch().run()

    assert got.path == tmp_path / "ours" / "org" / "name"
    assert (got.size, got.files) == (sum(map(len, CONTENT.values())), 3)
    assert files(got.path) == CONTENT
    assert [type(message) for message in tied.sent] == [ModelQuery, ModelRequest]
    assert not (tmp_path / "ours" / ".incoming").exists()


async def test_progress_is_reported(tied: TransferPair) -> None:
    seen: list[tuple[int, int | None]] = []
    fetch = tied.fetch()
    fetch._progress = lambda received, size: seen.append((received, size))

    got = await fetch.run()

    assert seen[-1] == (got.size, got.size)
    assert [received for received, _ in seen] == sorted(r for r, _ in seen)


async def test_model_that_the_peer_lacks_is_unknown(
    tied: TransferPair, tmp_path: Path
) -> None:
    tied.wanted = replace(tied.wanted, model="another")

    with pytest.raises(UnknownModel, match="the peer does not share another"):
        await tied.fetch().run()

    assert not (tmp_path / "ours").exists()


async def test_existing_model_is_not_requested(
    tied: TransferPair, tmp_path: Path
) -> None:
    (tmp_path / "ours" / "org" / "name").mkdir(parents=True)

    with pytest.raises(ConfigError, match="exists already"):
        await tied.fetch().run()

    assert [type(message) for message in tied.sent] == [ModelQuery]


def changed(**how: object) -> Tamper:
    """Change the second piece of the file in pieces."""

    def tamper(message: ModelMessage) -> list[ModelMessage]:
        if isinstance(message, ModelChunk) and message.offset == CHUNK:
            return [structs.replace(message, **how)]
        return [message]

    return tamper


def repeat(message: ModelMessage) -> list[ModelMessage]:
    return (
        [message, message]
        if isinstance(message, ModelChunk) and message.data
        else [message]
    )


def drop_a_piece(message: ModelMessage) -> list[ModelMessage]:
    return (
        [] if isinstance(message, ModelChunk) and message.offset == CHUNK else [message]
    )


def drop_the_last_piece(message: ModelMessage) -> list[ModelMessage]:
    return [] if isinstance(message, ModelChunk) and message.last else [message]


def drop_a_file(message: ModelMessage) -> list[ModelMessage]:
    dropped = isinstance(message, ModelChunk) and message.file_name == "config.json"
    return [] if dropped else [message]


def understate(message: ModelMessage) -> list[ModelMessage]:
    return [
        structs.replace(message, size=10)
        if isinstance(message, ModelAnswer)
        else message
    ]


def end_another(message: ModelMessage) -> list[ModelMessage]:
    return [
        structs.replace(message, model="../x")
        if isinstance(message, ModelDone)
        else message
    ]


DEFECTS = {
    "repeated": (repeat, "chunk at 0, expected 2"),
    "gap": (drop_a_piece, "chunk at 2097152, expected 1048576"),
    "cut": (drop_the_last_piece, "ended after"),
    "lost file": (drop_a_file, "ended after"),
    "too much": (understate, "exceeds the limit of 10"),
    "moved": (changed(offset=7), "chunk at 7, expected 1048576"),
    "other file": (changed(file_name="../../x"), "'../../x' is not a valid name"),
    "absolute": (changed(file_name="/tmp/x"), "'/tmp/x' is not a valid name"),
    "longer": (changed(data=b"x" * (CHUNK + 1)), "chunk at 2097152, expected 2097153"),
    "another model": (end_another, "'../x'; expected"),
}


@pytest.mark.parametrize("defect", DEFECTS)
async def test_defective_transfer_leaves_no_files(
    tied: TransferPair, tmp_path: Path, defect: str
) -> None:
    tied.tamper, why = DEFECTS[defect]

    with pytest.raises(PeerError, match=why):
        await tied.fetch().run()

    assert files(tmp_path / "ours") == {}
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "ours" / "org").exists()


async def test_model_of_unannounced_size_is_limited(
    tied: TransferPair, tmp_path: Path
) -> None:
    def withhold(message: ModelMessage) -> list[ModelMessage]:
        if isinstance(message, ModelAnswer):
            return [structs.replace(message, size=None)]
        return [message]

    tied.tamper = withhold
    tied.wanted = replace(tied.wanted, unannounced_max=CHUNK)

    with pytest.raises(PeerError, match="raise --unannounced-max"):
        await tied.fetch().run()

    assert files(tmp_path / "ours") == {}


async def test_pieces_of_other_transfers_are_ignored(tied: TransferPair) -> None:
    def intrude(message: ModelMessage) -> list[ModelMessage]:
        if isinstance(message, ModelChunk):
            return [
                structs.replace(message, transfer_id="other", file_name="../x"),
                message,
            ]
        if isinstance(message, ModelDone):
            return [structs.replace(message, transfer_id="other"), message]
        return [message]

    tied.tamper = intrude

    assert files((await tied.fetch().run()).path) == CONTENT


async def test_capitalized_transfer_ids_match(tied: TransferPair) -> None:
    def capitals(message: ModelMessage) -> list[ModelMessage]:
        if isinstance(message, (ModelChunk, ModelDone)):
            return [structs.replace(message, transfer_id=message.transfer_id.upper())]
        return [message]

    tied.tamper = capitals

    assert files((await tied.fetch().run()).path) == CONTENT


async def test_lost_query_is_repeated(
    tied: TransferPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "QUERY_TIMEOUT", scaled(0.1))
    lost: list[ModelMessage] = []

    def lose_one(message: ModelMessage) -> list[ModelMessage]:
        if isinstance(message, ModelAnswer) and not lost:
            lost.append(message)
            return []
        return [message]

    tied.tamper = lose_one

    assert files((await tied.fetch().run()).path) == CONTENT


async def test_silent_peer_times_out(
    tied: TransferPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "QUERY_TIMEOUT", 0.01)
    tied.tamper = lambda message: []

    with pytest.raises(TimedOut, match="may not support sharing"):
        await tied.fetch().run()

    assert len(tied.sent) == download.QUERIES_MAX


@pytest.mark.parametrize(
    ("after", "why"), [(0, "model with folders"), (CHUNK, "the peer sent nothing of")]
)
async def test_stalled_transfer_times_out(
    tied: TransferPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    why: str,
) -> None:
    monkeypatch.setattr(download, "SILENCE_TIMEOUT", scaled(0.2))

    def fall_silent(message: ModelMessage) -> list[ModelMessage]:
        silent = isinstance(message, ModelDone) or (
            isinstance(message, ModelChunk) and message.offset >= after
        )
        return [] if silent else [message]

    tied.tamper = fall_silent

    with pytest.raises(TimedOut, match=why):
        await tied.fetch().run()

    assert files(tmp_path / "ours") == {}


async def test_refusal_in_the_middle_ends_the_wait(
    tied: TransferPair, tmp_path: Path
) -> None:
    def refuse(message: ModelMessage) -> list[ModelMessage]:
        if isinstance(message, ModelChunk) and message.offset == CHUNK:
            return [ModelAnswer("org/name", available=False)]
        return [message]

    tied.tamper = refuse

    with pytest.raises(UnknownModel, match="cannot send org/name now"):
        await tied.fetch().run()

    assert files(tmp_path / "ours") == {}


async def test_broken_connection_leaves_no_files(
    tied: TransferPair, tmp_path: Path
) -> None:
    fetch = tied.fetch()

    def break_off(message: ModelMessage) -> list[ModelMessage]:
        if isinstance(message, ModelChunk) and message.offset == CHUNK:
            fetch.on_disconnect(Unavailable("the connection ended: reset"))
            return []
        return [message]

    tied.tamper = break_off

    with pytest.raises(Unavailable, match="reset"):
        await fetch.run()

    assert files(tmp_path / "ours") == {}


async def test_cancelled_download_leaves_no_files(
    tied: TransferPair, tmp_path: Path
) -> None:
    begun = asyncio.Event()

    def notice(message: ModelMessage) -> list[ModelMessage]:
        if isinstance(message, ModelChunk) and message.offset == CHUNK:
            begun.set()
        return [message]

    tied.tamper = notice
    async with asyncio.TaskGroup() as tasks:
        getting = tasks.create_task(tied.fetch().run())
        await begun.wait()
        getting.cancel()

    assert getting.cancelled()
    assert files(tmp_path / "ours") == {}


async def test_slow_disk_pauses_the_peer(tied: TransferPair) -> None:
    fetch = tied.fetch()
    had_room: list[bool] = []

    def in_one_go(message: ModelMessage) -> list[ModelMessage]:
        if isinstance(message, ModelAnswer):
            return [structs.replace(message, size=18 * CHUNK)]
        if isinstance(message, ModelDone):
            return [message]
        assert isinstance(message, ModelChunk)
        if message.file_name != "config.json":
            return []
        for piece in range(18):
            had_room.append(fetch._writable.is_set())
            fetch.receive(
                structs.replace(message, offset=piece * CHUNK, data=bytes(CHUNK))
            )
        return []

    tied.tamper = in_one_go
    got = await fetch.run()

    assert (got.size, had_room) == (18 * CHUNK, [True] * 17 + [False])
    await fetch.wait_for_room()


async def test_peer_that_ignores_backpressure_is_disconnected(
    tied: TransferPair, tmp_path: Path
) -> None:
    def flood(message: ModelMessage) -> list[ModelMessage]:
        if isinstance(message, ModelAnswer):
            return [structs.replace(message, size=None)]
        if isinstance(message, ModelChunk):
            piece = bytes(16 << 20)
            return [
                ModelChunk(message.transfer_id, "flood", offset, piece)
                for offset in range(0, 5 * len(piece), len(piece))
            ]
        return [message]

    tied.tamper = flood

    with pytest.raises(PeerError, match="unwritten data of 83886080 bytes"):
        await tied.fetch().run()

    assert files(tmp_path / "ours") == {}


def test_receivers_wait_longer_than_the_coordinator_for_its_source() -> None:
    """So that they learn why it ends."""
    passed_on = remote_models.SILENCE_TIMEOUT
    assert passed_on < chunk_selection.SILENCE_TIMEOUT < download.SILENCE_TIMEOUT
