"""Fleet connections after the handshake, fed with fuzzed frames from their peers.

A part of the input is a frame's type, flags and stream, a byte each, and its payload;
the rest of the frame is valid, because errors there are detected earlier.  Task ids are
deterministic, so that some inputs concern existing tasks.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from fuzz.mutations import SEPARATOR
from protocols.calling import (
    RUN,
    STREAM,
    fleet_context,
    packed,
)
from protocols.macfleet.recorded import CASES
from protocols.macfleet.upstream_node import (
    UpstreamNode,
    coordinator_with_node,
    worker_with_node,
)
from shoal.domain.ids import JobId
from shoal.domain.vocabulary import (
    Completed,
    PushCalls,
    RunJob,
    StreamedCall,
)
from shoal.protocols.macfleet.codec.frames import (
    Flag,
    Frame,
    FrameReader,
    FrameType,
    encode_frame,
)
from shoal.protocols.macfleet.codec.tasks import encode_result
from shoal.protocols.seam.peer_session import ALL_PEERS, PeerMessage, ToPeer
from shoal.protocols.seam.session import Close

Say: TypeAlias = Callable[[Any, float], object]

HEADER = 3  # bytes before the payload in a part of the input
IN_LANE = replace(RUN, job_id=JobId("lane"), work=STREAM)
LANE_CALL = StreamedCall(1, packed([1, 2]), packed({}))
NOT_SOUND = {"taskrun/bad crc", "taskrun/unknown frame type"}
LATE = 1000.0  # after every deadline of the connection


def fleet_asked(data: bytes) -> None:
    """A coordinator's connection to an upstream node with a task and a call stream."""
    _crowd(_asking().session, data)


def fleet_asking(data: bytes) -> None:
    """A worker's connection to an upstream node."""
    session = worker_with_node().session
    _listen(session, lambda word, now: session.send(word, now), data)


# Playing an input.


def _crowd(session: Any, data: bytes) -> None:
    _listen(session, lambda word, now: session.send(ToPeer(ALL_PEERS, word), now), data)


def _listen(session: Any, say: Say, data: bytes) -> None:
    for number, frame in enumerate(_frames(data)):
        now = 1.0 + number / 100
        if _act(session.receive([frame], now), say, now):
            return
        due = session.deadline
        if due is not None and due <= now and _act(session.tick(now), say, now):
            return
    if session.deadline is not None:
        session.tick(LATE)


def _frames(data: bytes) -> Iterable[bytes]:
    """Return the frames that an input encodes."""
    pieces: Counter[int] = Counter()  # so far, by stream
    for part in data.split(SEPARATOR):
        if len(part) < HEADER:
            continue
        kind = FrameType(part[0] % len(FrameType) + 1)
        flags, stream = part[1], part[2]
        yield encode_frame(Frame(kind, stream, flags, pieces[stream], part[HEADER:]))
        if flags & Flag.CHUNKED:
            pieces[stream] = 0 if flags & Flag.LAST else pieces[stream] + 1


def _act(outputs: Iterable[Any], say: Say, now: float) -> bool:
    """Carry out commands; return whether the connection has ended."""
    for each in outputs:
        match each.message if isinstance(each, PeerMessage) else each:
            case Close():
                return True
            case RunJob(job_id, lease):
                say(Completed(job_id, lease, value=packed(1)), now)
            case _:
                pass
    return False


# The state of a connection before the input.


def _asking() -> UpstreamNode:
    """Return an upstream node that has a task and a call stream of a coordinator."""
    beside = coordinator_with_node(context=fleet_context(""))
    beside.send(RUN)
    beside.send(IN_LANE)
    beside.send(PushCalls(IN_LANE.job_id, IN_LANE.lease, [LANE_CALL]))
    return beside


# Valid input.


def _seeds(said: Iterable[bytes]) -> list[bytes]:
    """Return messages as inputs: each by itself, and all together."""
    reader = FrameReader()
    frames = [reader.read(each) for data in said for each in reader.split(data)]
    parts = [_written(each) for each in frames if each.stream]
    return [*parts, SEPARATOR.join(parts)]


def _written(frame: Frame) -> bytes:
    kind = (frame.type - 1) % len(FrameType)
    return bytes([kind, frame.flags & 0xFF, frame.stream & 0xFF]) + frame.payload


def _of_real_nodes() -> list[bytes]:
    beside = _asking()
    results = [
        b"".join(
            encode_result(
                str(msgspec.msgpack.decode(each.payload)["task_id"]), packed(1)
            )
        )
        for each in beside.frames
        if each.type is FrameType.TASK
    ]
    frames = (Frame(FrameType.RESULT, 1, 0, 0, each) for each in results)
    tasks = [
        bytes.fromhex(each)
        for case in CASES
        if case["kind"] == "task_worker" and case["name"] not in NOT_SOUND
        for each in case["input"]["frames_hex"]
    ]
    chunks = [
        Frame(FrameType.TASK, 9, 2, 0, b"\x81\xa7task_id"),
        Frame(FrameType.TASK, 9, 6, 1, b"\xa11"),
        Frame(FrameType.BARRIER, 3, 0, 0, b""),
    ]
    return _seeds([*map(encode_frame, [*frames, *chunks]), *tasks])


SESSIONS: Mapping[str, tuple[Callable[[bytes], None], Callable[[], Sequence[bytes]]]]
SESSIONS = {
    "fleet_asked": (fleet_asked, _of_real_nodes),
    "fleet_asking": (fleet_asking, _of_real_nodes),
}
