"""Arrays between two connections on real sockets: unchanged, and not copied."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from harness.speed import PATIENCE
from originals.macfleet import read_frame
from protocols.macfleet.recorded import case_of
from shoal.domain.errors import InvalidRequest, PeerError, TooLarge
from shoal.protocols.macfleet.codec.arrays import read_array_frame, write_array_frame
from shoal.protocols.macfleet.codec.chunks import CHUNK_SIZE, ChunkJoiner
from shoal.protocols.macfleet.codec.frame_writer import FrameWriter
from shoal.protocols.macfleet.codec.frames import Flag, Frame, FrameReader, FrameType
from shoal.protocols.seam.framing import FramedMessage
from shoal.protocols.seam.session import Batch, Bulk, Output, Send
from shoal.transports.clock import LoopClock
from shoal.transports.driver import Driver
from shoal.transports.link import Link
from shoal.transports.tcp_client import connect_tcp
from shoal.transports.tls import ServerTls, self_signed_tls
from transports.links import serving

OPEN = "open"  # the first event of an end
ARRAYS: list[Any] = [
    np.arange(4 * CHUNK_SIZE, dtype=np.float32),
    np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],  # not in C order
    np.float16(2.5).reshape(()),
    np.zeros((0, 7), np.bool_),
    np.arange(CHUNK_SIZE, dtype=">f4").reshape(2, -1),
]


class End:
    """One end of a connection that carries arrays only."""

    head_size = FrameReader.head_size
    accepts: frozenset[type] = frozenset()
    deadline = None

    def __init__(self, *, ours: bool) -> None:
        reader = FrameReader()
        self.body_size, self.checksum = reader.body_size, reader.checksum
        self._read = reader.read
        self._voice, self._joiner = FrameWriter(is_shoal=ours), ChunkJoiner()
        self.buffer_for = self._joiner.buffer_for

    def on_open(self, certificate: bytes) -> None:
        pass

    def tick(self, now: float) -> Sequence[Any]:
        return (OPEN,)

    def receive(self, batch: Batch, now: float) -> Sequence[Any]:
        raise AssertionError("its link cuts messages")

    def receive_messages(
        self, messages: Sequence[FramedMessage], now: float
    ) -> Sequence[Any]:
        heard = []
        for message in messages:
            frame: Frame | None = self._read(message)
            if frame is not None and frame.flags & Flag.CHUNKED:
                frame = self._joiner.add(frame)
            if frame is not None:
                heard.append(read_array_frame(frame))
        return heard

    def send(self, array: Any, now: float) -> Sequence[Output]:
        return (write_array_frame(array, self._voice),)


@asynccontextmanager
async def driven(link: Link, end: End) -> AsyncIterator[tuple[Any, Any]]:
    """Run an end; return its driver, and the queue of its arrays."""
    heard: asyncio.Queue[Any] = asyncio.Queue()
    driver = Driver[Any, Any](end, link, LoopClock(), heard.put_nowait)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(driver.run())
        assert await heard.get() == OPEN
        yield driver, heard
        driver.disconnect("done", 1000, "")
        await running


def same(one: Any, other: Any) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and bool(
        (one == other).all()
    )


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("ours", [False, True], ids=["real", "ours"])
async def test_arrays_arrive_unchanged(*, ours: bool, secure: bool) -> None:
    tls: ServerTls | None = self_signed_tls("node") if secure else None
    async with (
        asyncio.timeout(PATIENCE),
        serving(tls) as (url, links),
        connect_tcp(url.replace("tls:", "tls-any:")) as link,
        driven(link, End(ours=ours)) as (sender, _),
        driven(await links.get(), End(ours=ours)) as (_, heard),
    ):
        for array in ARRAYS:
            assert sender.send(array)
        arrived = [await heard.get() for _ in ARRAYS]

        # Small arrays may overtake larger ones.
        for array in ARRAYS:
            (found,) = (each for each in arrived if same(each, array))
            assert not found.flags.owndata, "it is a view of what was received"
            assert found.flags.writeable or array.nbytes <= CHUNK_SIZE


async def test_a_large_array_is_one_frame_for_upstream() -> None:
    array = ARRAYS[0]
    got: asyncio.Queue[Any] = asyncio.Queue()

    async def real(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.put_nowait(await read_frame(reader))
        writer.close()

    async with (
        asyncio.timeout(PATIENCE),
        await asyncio.start_server(real, "127.0.0.1", 0) as server,
        connect_tcp(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}") as link,
        driven(link, End(ours=False)) as (sender, _),
    ):
        assert sender.send(array)
        frame = await got.get()

    assert (frame.type, frame.stream, frame.flags, frame.sequence) == (4, 1, 0, 0)
    assert frame.payload.endswith(array.tobytes())


def test_an_array_is_sent_from_its_own_memory() -> None:
    for ours in (False, True):
        said = write_array_frame(ARRAYS[0], FrameWriter(is_shoal=ours))
        assert isinstance(said, Bulk)
        views = [part for part in said.parts if isinstance(part, memoryview)]
        shared = [
            np.shares_memory(np.frombuffer(view, np.uint8), ARRAYS[0])
            for view in views
            if len(view)
        ]
        assert any(shared)
        assert sum(map(len, views)) - ARRAYS[0].nbytes < 100  # the header


def test_a_small_array_is_encoded_as_recorded_from_upstream() -> None:
    case = case_of("array/float32 1d")
    packed = bytes.fromhex(case["expect"]["packed_hex"])
    array = read_array_frame(Frame(FrameType.GRADIENT, 1, 0, 0, packed))

    said = write_array_frame(array, FrameWriter(is_shoal=False))

    assert isinstance(said, Send)
    assert isinstance(said.data, bytes)
    assert said.data[24:] == packed


def test_each_chunked_array_has_its_own_stream() -> None:
    voice, joiner = FrameWriter(is_shoal=True), ChunkJoiner()
    reader = FrameReader()
    streams = []
    for _ in range(2):
        said = write_array_frame(ARRAYS[0], voice)
        assert isinstance(said, Bulk)
        data = b"".join(bytes(part) for part in said.parts)
        pieces = [reader.read(whole) for whole in reader.split(data)]
        (whole,) = filter(None, map(joiner.add, pieces))
        assert same(read_array_frame(whole), ARRAYS[0])
        streams.append(whole.stream)
        assert {each.stream for each in pieces} == {whole.stream}

    assert streams[0] != streams[1]


def test_frames_without_an_array_are_rejected() -> None:
    with pytest.raises(PeerError, match="expected an array, found TENSOR"):
        read_array_frame(Frame(FrameType.TENSOR, 1, 0, 0, b""))
    with pytest.raises(PeerError, match="an array of 3 bytes"):
        read_array_frame(Frame(FrameType.GRADIENT, 1, 0, 0, b"abc"))
    with pytest.raises(InvalidRequest, match="convert it to numbers"):
        write_array_frame(np.array([object()]), FrameWriter(is_shoal=True))
    with pytest.raises(TooLarge, match="split it"):
        write_array_frame(np.empty(1 << 28, np.uint8), FrameWriter(is_shoal=True))
