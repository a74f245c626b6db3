"""Models that are fetched in chunks from several peers, some of which fail or lie."""

import asyncio
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from models.chunk_hosts import ChunkHost, Tamper
from models.transfer_pair import files
from shoal.domain.errors import (
    ConfigError,
    PeerError,
    ShoalError,
    Unavailable,
    UnknownModel,
)
from shoal.domain.model_messages import (
    ChunkSent,
    ChunksRefused,
    ManifestAnswer,
    ModelMessage,
)
from shoal.models import chunk_selection, fetch, manifest
from shoal.models.download import DownloadedModel
from shoal.models.fetch import fetch_model
from shoal.models.library import Library
from shoal.models.library_server import LibraryServer
from shoal.models.manifest import CHUNK

CHUNKS = 12
CONTENT = {
    "config.json": b"{}",
    "empty": b"",
    "weights.bin": b"".join(bytes([n]) * CHUNK for n in range(CHUNKS - 2)) + b"end",
}


class Hosts:
    """Peers that share the model, and the folder of what is fetched from them."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.ours = folder / "ours"
        self._folder = folder
        self._stack = stack
        self._count = 0

    async def add(self, content: dict[str, bytes] = CONTENT) -> ChunkHost:
        """Start a peer that shares a model of this content."""
        self._count += 1
        theirs = self._folder / f"theirs{self._count}"
        theirs.mkdir()
        for name, data in content.items():
            (theirs / name).write_bytes(data)
        sharing = LibraryServer(Library({"org/name": theirs}))
        await self._stack.enter_async_context(sharing)
        return ChunkHost(f"http://host{self._count}", sharing)

    async def fetch(
        self, *hosts: ChunkHost, address: str = "", donors: Sequence[Path] = ()
    ) -> DownloadedModel:
        return await fetch_model(
            "org/name", hosts, self.ours, address=address, donors=donors
        )

    @property
    def partial(self) -> list[Path]:
        """The hidden folders of models that are not complete."""
        return [*self.ours.glob(".partial/*")]


@pytest.fixture
async def hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Hosts]:
    monkeypatch.setattr(fetch, "RETRY_FIRST", 0.0)
    async with AsyncExitStack() as stack:
        yield Hosts(tmp_path, stack)


async def once_both_are_asked(asked: asyncio.Event, other: asyncio.Event) -> None:
    """Wait until the other source is asked for a chunk, too."""
    asked.set()
    await other.wait()


def spoilt(chunk: ModelMessage) -> list[ModelMessage]:
    """Change a byte of each chunk."""
    if isinstance(chunk, ChunkSent):
        return [replace(chunk, data=b"!" + bytes(chunk.data)[1:])]
    return [chunk]


def longer(chunk: ModelMessage) -> list[ModelMessage]:
    """Add to each chunk what was not announced."""
    if isinstance(chunk, ChunkSent):
        return [replace(chunk, data=bytes(chunk.data) + b"more")]
    return [chunk]


async def test_several_sources_send_each_chunk_once(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_selection, "REPEAT_AFTER", math.inf)
    one, two = await hosts.add(), await hosts.add()
    asked = asyncio.Event(), asyncio.Event()
    one.may_send = partial(once_both_are_asked, *asked)
    two.may_send = partial(once_both_are_asked, *reversed(asked))

    got = await hosts.fetch(one, two)

    assert files(got.path) == CONTENT
    assert files(hosts.ours) == {f"org/name/{name}": CONTENT[name] for name in CONTENT}
    assert Counter(one.chunks + two.chunks) == Counter(range(CHUNKS))
    assert one.chunks
    assert two.chunks
    assert got.address.startswith(manifest.SCHEME)


@pytest.mark.parametrize("tamper", [spoilt, longer])
async def test_a_source_that_sends_other_bytes_is_dropped_and_named(
    hosts: Hosts, tamper: Tamper
) -> None:
    liar, honest = await hosts.add(), await hosts.add()
    liar.tamper = tamper

    got = await hosts.fetch(liar, honest)

    assert files(got.path) == CONTENT
    with pytest.raises(PeerError, match="another hash: it sends other bytes"):
        await fetch_model("org/name", [liar], hosts.ours.with_name("again"))


async def test_chunks_may_arrive_in_any_order_and_not_twice(hosts: Hosts) -> None:
    shuffling, repeating = await hosts.add(), await hosts.add()
    waiting: list[ModelMessage] = []

    def shuffle(message: ModelMessage) -> list[ModelMessage]:
        if not isinstance(message, ChunkSent):
            return [message]
        waiting.append(message)
        if len(waiting) < 2:
            return []
        found = waiting[::-1]
        waiting.clear()
        return found

    shuffling.tamper = shuffle
    repeating.tamper = lambda message: (
        [message, message] if isinstance(message, ChunkSent) else [message]
    )

    got = await hosts.fetch(shuffling)

    assert files(got.path) == CONTENT
    with pytest.raises(Unavailable, match="a chunk that was not requested"):
        await fetch_model("org/name", [repeating], hosts.ours.with_name("again"))


async def test_what_has_arrived_is_not_sent_again(hosts: Hosts) -> None:
    host = await hosts.add()
    enough = asyncio.Event()

    def count(message: ModelMessage) -> list[ModelMessage]:
        if len(host.chunks) == CHUNKS // 2 and isinstance(message, ChunkSent):
            enough.set()
            return []
        return [message]

    host.tamper = count
    first = asyncio.create_task(hosts.fetch(host))
    await enough.wait()
    while not [*hosts.ours.glob(".partial/*/files/weights.bin")]:  # noqa: ASYNC110
        await asyncio.sleep(0)  # what was sent is written a moment later
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    (partial,) = hosts.partial
    held = (partial / "files" / "weights.bin").stat().st_size > 0
    assert held
    assert not (hosts.ours / "org").exists()

    host.tamper = lambda message: [message]
    got = await hosts.fetch(host)

    assert files(got.path) == CONTENT
    assert not hosts.partial
    # What was on its way when the first fetch ended is sent again, and no more.
    assert len(host.chunks) <= CHUNKS + chunk_selection.AHEAD_MAX


async def test_damage_on_the_own_disk_is_fetched_again(hosts: Hosts) -> None:
    host = await hosts.add()
    enough = asyncio.Event()

    def stop(message: ModelMessage) -> list[ModelMessage]:
        if len(host.chunks) == CHUNKS - 1:
            enough.set()
        return [] if enough.is_set() and isinstance(message, ChunkSent) else [message]

    host.tamper = stop
    first = asyncio.create_task(hosts.fetch(host))
    await enough.wait()
    first.cancel()
    await asyncio.wait([first])
    (partial,) = hosts.partial
    weights = partial / "files" / "weights.bin"
    weights.write_bytes(weights.read_bytes()[: 3 * CHUNK + 5])
    (partial / "files" / "config.json").unlink(missing_ok=True)
    (partial / "files" / "config.json").symlink_to("/etc/passwd")
    (partial / "files" / "stranger").write_text("?")

    host.tamper = lambda message: [message]
    got = await hosts.fetch(host)

    assert files(got.path) == CONTENT
    assert not (got.path / "config.json").is_symlink()


async def test_a_lost_connection_is_opened_again(hosts: Hosts) -> None:
    host = await hosts.add()

    def cut(message: ModelMessage) -> list[ModelMessage]:
        if len(host.chunks) == CHUNKS // 2 and host.connections == 1:
            asyncio.get_running_loop().call_soon(host.disconnect)
        return [message]

    host.tamper = cut

    got = await hosts.fetch(host)

    assert files(got.path) == CONTENT
    assert host.connections == 2


async def test_others_go_on_when_a_source_is_lost(hosts: Hosts) -> None:
    killed, other = await hosts.add(), await hosts.add()

    def kill(message: ModelMessage) -> list[ModelMessage]:
        if not isinstance(message, ChunkSent):
            return [message]
        asyncio.get_running_loop().call_soon(killed.disconnect)
        return []

    killed.tamper = kill

    got = await hosts.fetch(killed, other)

    assert files(got.path) == CONTENT
    assert {*other.chunks} == {*range(CHUNKS)}


async def test_sources_of_another_model_are_left_out(hosts: Hosts) -> None:
    right, wrong = await hosts.add(), await hosts.add({"weights.bin": b"else"})
    got = await hosts.fetch(right)

    again = hosts.ours.with_name("again")
    other = await fetch_model("org/name", [wrong, right], again, address=got.address)

    assert other.address == got.address
    assert wrong.chunks == []
    with pytest.raises(PeerError, match=f"expected {got.address}"):
        await fetch_model(
            "org/name", [wrong], hosts.ours.with_name("third"), address=got.address
        )


async def test_chunks_of_other_files_are_not_fetched_again(
    hosts: Hosts, tmp_path: Path
) -> None:
    host = await hosts.add()
    donor = tmp_path / "another-name.gguf"
    whole = CONTENT["weights.bin"]
    donor.write_bytes(b"!" + whole[1:])  # all but its first chunk

    got = await hosts.fetch(host, donors=[tmp_path / "missing", donor])

    assert files(got.path) == CONTENT
    assert sorted(host.chunks) == [0, 1]


async def test_an_existing_model_is_not_replaced(hosts: Hosts) -> None:
    host = await hosts.add()
    await hosts.fetch(host)

    with pytest.raises(ConfigError, match="exists already; give --replace"):
        await hosts.fetch(host)

    assert host.connections == 1
    await fetch_model("org/name", [host], hosts.ours, replace=True)
    assert sorted(host.chunks) == [*range(CHUNKS)]  # its own files are donors


async def test_two_fetches_of_one_model_do_not_mix(hosts: Hosts) -> None:
    host, refused = await hosts.add(), asyncio.Event()
    host.may_send = refused.wait
    fetches = {asyncio.create_task(hosts.fetch(host)) for _ in range(2)}

    (failed,), (other,) = await asyncio.wait(
        fetches, return_when=asyncio.FIRST_COMPLETED
    )
    refused.set()

    assert "another process is fetching org/name" in str(failed.exception())
    assert files((await other).path) == CONTENT


async def test_a_model_that_nobody_shares_is_unknown(hosts: Hosts) -> None:
    one, two = await hosts.add(), await hosts.add()

    with pytest.raises(UnknownModel, match="host1: the peer does not share org/other"):
        await fetch_model("org/other", [one, two], hosts.ours)

    assert not hosts.ours.exists()


async def test_a_hostile_manifest_is_the_reported_reason(hosts: Hosts) -> None:
    host = await hosts.add()
    huge = manifest.Manifest(
        (manifest.FileEntry("weights.bin", 10**13, bytes(32), b""),)
    )
    host.tamper = lambda message: (
        [replace(message, manifest=huge.encoded)]
        if isinstance(message, ManifestAnswer)
        else [message]
    )

    with pytest.raises(PeerError, match="a model of more than 1099511627776 bytes"):
        await hosts.fetch(host)

    assert not hosts.ours.exists()


async def test_a_source_whose_file_changes_says_so(
    hosts: Hosts, tmp_path: Path
) -> None:
    host = await hosts.add()
    theirs = tmp_path / "theirs1" / "weights.bin"

    def change(message: ModelMessage) -> list[ModelMessage]:
        if isinstance(message, ManifestAnswer):
            theirs.write_bytes(b"another")
        return [message]

    host.tamper = change

    with pytest.raises(ShoalError, match="it has another model of this name"):
        await hosts.fetch(host)


async def test_a_source_that_refuses_is_asked_again(hosts: Hosts) -> None:
    host = await hosts.add()

    def refuse(message: ModelMessage) -> list[ModelMessage]:
        if isinstance(message, ChunkSent) and host.connections < 3:
            return [ChunksRefused(message.root, "no worker sends it any more")]
        return [message]

    host.tamper = refuse

    got = await hosts.fetch(host)

    assert files(got.path) == CONTENT
    host.tamper = lambda message: (
        [ChunksRefused(message.root, "the disk is gone")]
        if isinstance(message, ChunkSent)
        else [message]
    )
    with pytest.raises(Unavailable, match="the disk is gone"):
        await fetch_model("org/name", [host], hosts.ours.with_name("again"))


async def test_a_file_that_hides_its_change_is_found_by_its_hash(
    hosts: Hosts, tmp_path: Path
) -> None:
    host, other = await hosts.add(), await hosts.add()
    theirs = tmp_path / "theirs1" / "weights.bin"

    def change(message: ModelMessage) -> list[ModelMessage]:
        if isinstance(message, ManifestAnswer):
            about = theirs.stat()
            with theirs.open("r+b") as file:
                file.write(os.urandom(about.st_size))
            os.utime(theirs, ns=(about.st_atime_ns, about.st_mtime_ns))
        return [message]

    host.tamper = change

    got = await hosts.fetch(host, other)

    assert files(got.path) == CONTENT


async def test_progress_counts_what_is_held(hosts: Hosts) -> None:
    host = await hosts.add()
    seen: list[tuple[int, int | None]] = []

    got = await fetch_model(
        "org/name",
        [host],
        hosts.ours,
        progress=lambda held, size: seen.append((held, size)),
    )

    assert seen[0] == (0, got.size)
    assert seen[-1] == (got.size, got.size)
    assert seen == sorted(seen)


async def test_a_model_of_empty_files_is_fetched(hosts: Hosts) -> None:
    host = await hosts.add({"empty": b""})

    got = await hosts.fetch(host)

    assert files(got.path) == {"empty": b""}
