"""Layers that are fetched into rpc-server's cache, from peers that fail or lie."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from hashlib import sha256
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from models.chunk_hosts import ChunkHost
from shoal.domain.errors import ConfigError, PeerError, ShoalError, Unavailable
from shoal.domain.model_messages import ChunkSent, ModelMessage
from shoal.engines.gguf_export import LlamaShape, write_gguf
from shoal.engines.gguf_header import layer_of, read_tensors
from shoal.engines.gguf_vocabulary import byte_vocabulary
from shoal.models import fetch, tensor_cache
from shoal.models.fetch import fetch_parts
from shoal.models.file_hashes import FileHashes
from shoal.models.library import Library
from shoal.models.library_server import LibraryServer
from shoal.models.manifest import CHUNK, Manifest, manifest_of_files
from shoal.models.tensor_cache import CACHE, TensorCache

NAME = "big"
LAYERS = 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 12_000,  # 1.5 MB a matrix
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": 259,
}
LARGE = 1 << 20  # bytes, in these tests
ROOM = 1 << 30


def fnv1a_64(data: bytes) -> str:
    """Return the name of a tensor, by the definition of the hash."""
    found = 0xCBF29CE484222325
    for byte in data:
        found = (found ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return f"{found:016x}"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with three large tensors in each layer."""
    numbers = np.random.default_rng(0)
    tensors = {
        there: numbers.normal(0, 0.1, dimensions).astype(np.float32)
        for there, _, dimensions in LlamaShape.of(CONFIG).names()
    }
    path = tmp_path_factory.mktemp("model") / f"{NAME}.gguf"
    return write_gguf(path, tensors, CONFIG, byte_vocabulary())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cache, "LARGE", LARGE)
    monkeypatch.setattr(fetch, "RETRY_FIRST", 0.0)


def expected(file: Path, layers: range) -> dict[str, bytes]:
    """Return the large tensors of layers, by their hash."""
    data = file.read_bytes()
    found = {}
    for name, (offset, size) in read_tensors(file).items():
        if size > LARGE and layer_of(name) in layers:
            tensor = data[offset : offset + size]
            found[sha256(tensor).hexdigest()] = tensor
    return found


def cached(folder: Path) -> dict[str, bytes]:
    """Return the tensors of a cache, by their hash."""
    found = [each.read_bytes() for each in (folder / CACHE).iterdir()]
    return {sha256(each).hexdigest(): each for each in found}


class Peers:
    """Peers that share a file, and the folder of what is fetched from them."""

    def __init__(self, folder: Path, file: Path, stack: AsyncExitStack) -> None:
        self.folder = folder / "copied"
        self._file = file
        self._stack = stack
        self._count = 0

    async def add(self, file: Path | None = None) -> ChunkHost:
        self._count += 1
        sharing = LibraryServer(Library({NAME: file or self._file}))
        await self._stack.enter_async_context(sharing)
        return ChunkHost(f"http://host{self._count}", sharing)

    async def fetch(
        self,
        *hosts: ChunkHost,
        layers: range = range(1, 3),
        room: int = ROOM,
        donors: tuple[Path, ...] = (),
        address: str = "",
    ) -> Path:
        def open_cache(content: Manifest) -> TensorCache:
            return TensorCache(self.folder, content, layers, room)

        return await fetch_parts(
            NAME, hosts, open_cache, donors=donors, address=address
        )


@pytest.fixture
async def peers(tmp_path: Path, file: Path) -> AsyncIterator[Peers]:
    async with AsyncExitStack() as stack:
        yield Peers(tmp_path, file, stack)


def changed(file: Path, folder: Path) -> Path:
    """Return another file of the same name and size."""
    data = file.read_bytes()
    other = folder / file.name
    other.write_bytes(b"!" + data[1:-1] + b"!")
    return other


def split(file: Path, folder: Path) -> list[Path]:
    """Write a model in several files, as llama.cpp's gguf-split does; return them."""
    read = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(folder / "big.gguf", "llama", split_max_tensors=11)
    for each in read.tensors:
        writer.add_tensor(each.name, each.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("big-*.gguf"))


def manifest_of(file: Path) -> Manifest:
    shared = Library({NAME: file}).find(NAME)
    assert shared is not None
    return FileHashes().manifest(shared)


def of_tensors(file: Path, layers: range) -> set[int]:
    """Return the chunks of a file that have its header, or large tensors of layers."""
    places = read_tensors(file).items()
    return {0} | {
        chunk
        for name, (offset, size) in places
        if size > LARGE and layer_of(name) in layers
        for chunk in range(offset // CHUNK, -(-(offset + size) // CHUNK))
    }


async def test_only_the_chunks_of_the_layers_are_fetched(
    peers: Peers, file: Path
) -> None:
    one, two = await peers.add(), await peers.add()

    folder = await peers.fetch(one, two)

    assert cached(folder) == expected(file, range(1, 3))
    (name, *_) = (each.name for each in (folder / CACHE).iterdir())
    assert name == fnv1a_64((folder / CACHE / name).read_bytes())
    assert {*one.chunks, *two.chunks} == of_tensors(file, range(1, 3))


async def test_tensors_that_are_whole_are_not_fetched_again(
    peers: Peers, file: Path
) -> None:
    source = await peers.add()
    chunks = len(of_tensors(file, range(1, 3)))

    def cut(message: ModelMessage) -> list[ModelMessage]:
        if isinstance(message, ChunkSent) and len(source.chunks) >= chunks - 3:
            source.disconnect()
            return []
        return [message]

    source.tamper = cut
    with pytest.raises(ShoalError):
        await peers.fetch(source)
    kept = cached(peers.folder)
    assert kept.items() & expected(file, range(1, 3)).items()

    again = await peers.add()
    await peers.fetch(again)

    assert cached(peers.folder) == expected(file, range(1, 3))
    assert len(again.chunks) < chunks
    unneeded = await peers.add()
    await peers.fetch(unneeded)
    assert unneeded.chunks == [0]  # the header


async def test_layers_of_an_earlier_split_make_room(peers: Peers, file: Path) -> None:
    source = await peers.add()
    await peers.fetch(source, layers=range(1, 3))
    sent = len(source.chunks)

    await peers.fetch(source, layers=range(2, 4))

    assert cached(peers.folder) == expected(file, range(2, 4))
    assert len(source.chunks) - sent < len(of_tensors(file, range(2, 4)))


async def test_source_that_sends_other_bytes_leaves_nothing_of_them(
    peers: Peers, file: Path
) -> None:
    liar, honest = await peers.add(), await peers.add()

    def spoil(message: ModelMessage) -> list[ModelMessage]:
        if isinstance(message, ChunkSent) and message.chunk:
            return [replace(message, data=b"!" + bytes(message.data)[1:])]
        return [message]

    liar.tamper = spoil
    with pytest.raises(Unavailable, match="another hash: it sends other bytes"):
        await peers.fetch(liar)
    assert cached(peers.folder).items() <= expected(file, range(1, 3)).items()

    await peers.fetch(liar, honest)

    assert cached(peers.folder) == expected(file, range(1, 3))


async def test_model_of_the_name_with_other_contents_is_refused(
    peers: Peers, tmp_path: Path, file: Path
) -> None:
    other = changed(file, tmp_path)
    address = manifest_of(file).address

    with pytest.raises(PeerError, match="another model of this name"):
        await peers.fetch(await peers.add(other), address=address)

    await peers.fetch(await peers.add(), address=address)


async def test_own_copy_needs_no_peer_but_for_the_hashes(
    peers: Peers, file: Path, tmp_path: Path
) -> None:
    source = await peers.add()
    other = changed(file, tmp_path)

    folder = await peers.fetch(source, donors=(tmp_path / "none", other, file))

    assert cached(folder) == expected(file, range(1, 3))
    assert source.chunks == []


def test_copy_of_an_own_file_can_be_stopped(file: Path, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []

    def stop(*copied: int) -> None:
        reports.append((copied[0], copied[1]))
        if len(reports) == 3:
            raise ConfigError("the copy was stopped")

    cache = TensorCache(tmp_path, manifest_of(file), range(LAYERS), ROOM, stop)
    with pytest.raises(ConfigError, match="was stopped"):
        cache.begin((file,), FileHashes())
    cache.close()

    chunks = len(of_tensors(file, range(LAYERS)))
    assert reports == [(each * CHUNK, chunks * CHUNK) for each in (1, 2, 3)]


async def test_what_does_not_fit_is_not_begun(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await peers.add()
    with pytest.raises(ConfigError, match="larger than what is lent"):
        await peers.fetch(source, room=LARGE)

    def no_space(folder: Path, size: int) -> None:
        raise ConfigError(f"{size} bytes do not fit")

    monkeypatch.setattr(tensor_cache, "check_space", no_space)
    with pytest.raises(ConfigError, match="do not fit"):
        await peers.fetch(source)
    assert source.chunks == [0, 0]


async def test_folder_is_for_one_process_at_a_time(peers: Peers) -> None:
    first = TensorCache(peers.folder, Manifest(()), range(1), ROOM)
    first.begin((), FileHashes())
    try:
        with pytest.raises(ConfigError, match="another process fetches"):
            await peers.fetch(await peers.add())
    finally:
        first.close()


@pytest.mark.parametrize("data", [b"GGUF", b"no model" * CHUNK], ids=["cut", "other"])
async def test_file_that_is_no_model_is_named(
    peers: Peers, tmp_path: Path, data: bytes
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)

    with pytest.raises(ConfigError, match=r"damaged\.gguf is"):
        await peers.fetch(await peers.add(damaged))


def test_manifest_without_hashes_proves_nothing(tmp_path: Path) -> None:
    content = manifest_of_files([("big.gguf", CHUNK, bytes(32))])
    cache = TensorCache(tmp_path, content, range(1), ROOM)

    with pytest.raises(PeerError, match="no hashes"):
        cache.begin((), FileHashes())
    cache.close()


async def test_layers_may_be_in_several_files(
    peers: Peers, file: Path, tmp_path: Path
) -> None:
    parts = split(file, tmp_path)
    source = await peers.add(parts[0])

    folder = await peers.fetch(source)

    assert len(parts) > 2
    assert cached(folder) == expected(file, range(1, 3))

    await peers.fetch(source, layers=range(2, 4))
    assert cached(folder) == expected(file, range(2, 4))


async def test_disk_that_cannot_be_written_is_named(peers: Peers) -> None:
    (peers.folder / CACHE).parent.mkdir()
    (peers.folder / CACHE).write_text("in the way")

    with pytest.raises(ConfigError, match=r"cannot write to .*copied: File exists"):
        await peers.fetch(await peers.add())


@given(
    order=st.randoms(use_true_random=False),
    first=st.integers(0, LAYERS),
    count=st.integers(0, LAYERS),
)
def test_chunks_arrive_in_any_order(
    file: Path,
    tmp_path_factory: pytest.TempPathFactory,
    order: random.Random,
    first: int,
    count: int,
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    content, data = manifest_of(file), file.read_bytes()
    layers = range(first, first + count)
    # Hypothesis ends an example in its middle that takes too much chance.
    with closing(TensorCache(folder, content, layers, ROOM)) as cache:
        held = cache.begin((), FileHashes())
        while todo := [*cache.wanted - held]:
            order.shuffle(todo)
            for chunk in todo:
                _, offset, size = content.place(chunk)
                right = data[offset : offset + size]
                assert cache.write([(chunk, bytes(size))]) == set()
                assert cache.write([(chunk, memoryview(right))]) == {chunk}
                held.add(chunk)
        cache.commit()

    assert held == of_tensors(file, layers)
    assert cached(folder) == expected(file, layers)
