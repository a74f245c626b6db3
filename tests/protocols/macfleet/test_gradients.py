"""Arrays between two connections' ends, on real sockets: the same, and not copied."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from originals.macfleet import read_frame
from protocols.macfleet.recorded import case_of
from shoal.domain.errors import InvalidRequest, PeerError, TooLarge
from shoal.protocols.framing import Whole
from shoal.protocols.macfleet.gradients import array_in, say_array
from shoal.protocols.macfleet.voice import Voice
from shoal.protocols.macfleet.wire.chunks import CHUNK, Joiner
from shoal.protocols.macfleet.wire.frames import Flag, Frame, FrameReader, FrameType
from shoal.protocols.session import Batch, Bulk, Output, Send
from shoal.runtime.clock import LoopClock
from shoal.runtime.driver import Driver
from shoal.runtime.link import Link
from shoal.transports.tcp_dialling import dial
from shoal.transports.tls import Presented, new_certificate
from transports.links import serving

OPEN = "open"  # which an end hears first
PATIENCE = 20.0  # seconds until what should happen is taken not to
ARRAYS: list[Any] = [
    np.arange(4 * CHUNK, dtype=np.float32),
    np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],  # not in C order
    np.float16(2.5).reshape(()),
    np.zeros((0, 7), np.bool_),
    np.arange(CHUNK, dtype=">f4").reshape(2, -1),
]


class End:
    """One end of a connection on which there are arrays, and nothing else."""

    head_size = FrameReader.head_size
    accepts: frozenset[type] = frozenset()
    deadline = None

    def __init__(self, *, ours: bool) -> None:
        reader = FrameReader()
        self.body_size, self.checksum = reader.body_size, reader.checksum
        self._read = reader.read
        self._voice, self._joiner = Voice(ours=ours), Joiner()
        self.place = self._joiner.place

    def opened(self, certificate: bytes) -> None:
        pass

    def tick(self, now: float) -> Sequence[Any]:
        return (OPEN,)

    def receive(self, batch: Batch, now: float) -> Sequence[Any]:
        raise AssertionError("its link cuts messages")

    def take(self, messages: Sequence[Whole], now: float) -> Sequence[Any]:
        heard = []
        for message in messages:
            frame: Frame | None = self._read(message)
            if frame is not None and frame.flags & Flag.CHUNKED:
                frame = self._joiner.take(frame)
            if frame is not None:
                heard.append(array_in(frame))
        return heard

    def issue(self, array: Any, now: float) -> Sequence[Output]:
        return (say_array(array, self._voice),)


@asynccontextmanager
async def driven(link: Link, end: End) -> AsyncIterator[tuple[Any, Any]]:
    """Run an end; give its driver, and the queue of what it hears."""
    heard: asyncio.Queue[Any] = asyncio.Queue()
    driver = Driver[Any, Any](end, link, LoopClock(), heard.put_nowait)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(driver.run())
        assert await heard.get() == OPEN
        yield driver, heard
        driver.hang_up("done", 1000, "")
        await running


def same(one: Any, other: Any) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and bool(
        (one == other).all()
    )


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("ours", [False, True], ids=["real", "ours"])
async def test_arrays_arrive_as_they_were(*, ours: bool, secure: bool) -> None:
    tls: Presented | None = new_certificate("node") if secure else None
    async with (
        asyncio.timeout(PATIENCE),
        serving(tls) as (url, links),
        dial(url.replace("tls:", "tls-any:")) as link,
        driven(link, End(ours=ours)) as (sender, _),
        driven(await links.get(), End(ours=ours)) as (_, heard),
    ):
        for array in ARRAYS:
            assert sender.issue(array)
        arrived = [await heard.get() for _ in ARRAYS]

        # Small ones may go before larger ones that were said before.
        for array in ARRAYS:
            (found,) = (each for each in arrived if same(each, array))
            assert not found.flags.owndata, "it is a view of what was received"
            assert found.flags.writeable or array.nbytes <= CHUNK


async def test_a_large_array_is_one_frame_for_a_real_peer() -> None:
    array = ARRAYS[0]
    got: asyncio.Queue[Any] = asyncio.Queue()

    async def real(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.put_nowait(await read_frame(reader))
        writer.close()

    async with (
        asyncio.timeout(PATIENCE),
        await asyncio.start_server(real, "127.0.0.1", 0) as server,
        dial(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}") as link,
        driven(link, End(ours=False)) as (sender, _),
    ):
        assert sender.issue(array)
        frame = await got.get()

    assert (frame.type, frame.stream, frame.flags, frame.sequence) == (4, 1, 0, 0)
    assert frame.payload.endswith(array.tobytes())


def test_what_goes_out_is_the_memory_of_the_array() -> None:
    for ours in (False, True):
        said = say_array(ARRAYS[0], Voice(ours=ours))
        assert isinstance(said, Bulk)
        views = [part for part in said.parts if isinstance(part, memoryview)]
        shared = [
            np.shares_memory(np.frombuffer(view, np.uint8), ARRAYS[0])
            for view in views
            if len(view)
        ]
        assert any(shared)
        assert sum(map(len, views)) - ARRAYS[0].nbytes < 100  # but for its head


def test_a_small_array_is_what_real_peers_were_recorded_to_send() -> None:
    case = case_of("array/float32 1d")
    packed = bytes.fromhex(case["expect"]["packed_hex"])
    array = array_in(Frame(FrameType.GRADIENT, 1, 0, 0, packed))

    said = say_array(array, Voice(ours=False))

    assert isinstance(said, Send)
    assert isinstance(said.data, bytes)
    assert said.data[24:] == packed


def test_each_array_in_pieces_is_on_a_stream_of_its_own() -> None:
    voice, joiner = Voice(ours=True), Joiner()
    reader = FrameReader()
    streams = []
    for _ in range(2):
        said = say_array(ARRAYS[0], voice)
        assert isinstance(said, Bulk)
        data = b"".join(bytes(part) for part in said.parts)
        pieces = [reader.read(whole) for whole in reader.cut(data)]
        (whole,) = filter(None, map(joiner.take, pieces))
        assert same(array_in(whole), ARRAYS[0])
        streams.append(whole.stream)
        assert {each.stream for each in pieces} == {whole.stream}

    assert streams[0] != streams[1]


def test_what_is_no_array_is_named() -> None:
    with pytest.raises(PeerError, match="TENSOR came, where an array was expected"):
        array_in(Frame(FrameType.TENSOR, 1, 0, 0, b""))
    with pytest.raises(PeerError, match="an array in 3 bytes"):
        array_in(Frame(FrameType.GRADIENT, 1, 0, 0, b"abc"))
    with pytest.raises(InvalidRequest, match="convert it to numbers"):
        say_array(np.array([object()]), Voice(ours=True))
    with pytest.raises(TooLarge, match="send it in several"):
        say_array(np.empty(1 << 28, np.uint8), Voice(ours=True))
