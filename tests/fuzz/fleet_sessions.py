"""Fleet connections after the handshake, fed with fuzzed frames from their peers.

A part of the input is a frame's type, flags and stream, a byte each, and its payload;
the rest of the frame is valid, because errors there are detected earlier.  Task ids are
deterministic, so that some inputs concern existing tasks.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, TypeAlias

import msgspec

from fuzz.mutations import SEPARATOR
from protocols.calling import (
    MEMBER,
    RUN,
    STREAM,
    CallPair,
    counted_bytes,
    fleet_context,
    packed,
    unconnected,
)
from protocols.macfleet.recorded import CASES
from protocols.macfleet.upstream_node import (
    UpstreamNode,
    coordinator_with_node,
    worker_with_node,
)
from protocols.session_pair import binary
from shoal.domain.credentials import digest_of
from shoal.domain.ids import JobId
from shoal.domain.vocabulary import (
    BlobMissing,
    CallProgress,
    CallResult,
    CallsReturned,
    CancelCalls,
    CancelJob,
    Completed,
    Draining,
    HealthReported,
    LoadChanged,
    OffersChanged,
    PushCalls,
    RunJob,
    SendBlob,
    StreamedCall,
)
from shoal.domain.work import CallStream
from shoal.domain.worker import MachineHealth, WorkerLoad
from shoal.protocols.macfleet import PROTOCOL
from shoal.protocols.macfleet.codec.chunks import split_payload
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


def fleet_coordinator(data: bytes) -> None:
    """A coordinator's connection to a Shoal worker with a task and a call stream."""
    _crowd(_met().coordinator, data)


def fleet_worker(data: bytes) -> None:
    """A worker's connection to a Shoal coordinator."""
    session = _met().worker
    _listen(session, lambda word, now: session.send(word, now), data)


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
            case RunJob(job_id, lease, work):
                say(CallProgress(job_id, lease, 0.5, "half"), now)
                if not isinstance(work, CallStream):
                    say(Completed(job_id, lease, value=packed(1)), now)
            case PushCalls(job_id, lease, calls):
                returns = [CallResult(call.number, packed(2)) for call in calls]
                say(CallsReturned(job_id, lease, returns), now)
            case BlobMissing(digest):
                say(SendBlob(digest, b"blob"), now)
            case _:
                pass
    return False


# The state of a connection before the input.


def _met() -> CallPair:
    """Return connected ends; the worker has a task, and a call stream with a call."""
    member = replace(MEMBER, random_bytes=counted_bytes("worker"))
    pair = unconnected(PROTOCOL, member, fleet_context())
    pair.begin()
    pair.event(OffersChanged(member.offers))
    pair.command(RUN)
    pair.command(IN_LANE)
    pair.command(PushCalls(IN_LANE.job_id, IN_LANE.lease, [LANE_CALL]))
    return pair


def _asking() -> UpstreamNode:
    """Return an upstream node that has a task and a call stream of a coordinator."""
    beside = coordinator_with_node(context=fleet_context(""))
    beside.send(RUN)
    beside.send(IN_LANE)
    beside.send(PushCalls(IN_LANE.job_id, IN_LANE.lease, [LANE_CALL]))
    return beside


# Valid input.


def _said_between() -> CallPair:
    """Let both ends send every message there is."""
    pair = _met()
    job, lane = (each for each in pair.commands if isinstance(each, RunJob))
    blob = b"blob" * 100
    pair.event(LoadChanged(WorkerLoad("warm", 2, 0.5)))
    pair.event(HealthReported(MachineHealth(cpu=10.0, memory=20.0)))
    pair.event(CallProgress(job.job_id, job.lease, 0.5, "half"))
    pair.event(BlobMissing(digest_of("a blob")))
    pair.event(Completed(job.job_id, job.lease, value=packed(42)))
    pair.event(CallsReturned(lane.job_id, lane.lease, [CallResult(1, packed(3))]))
    pair.event(Draining("it leaves"))
    pair.command(SendBlob(sha256(blob).digest(), blob))
    pair.command(CancelCalls(IN_LANE.job_id, IN_LANE.lease, (1, 2)))
    pair.command(CancelJob(IN_LANE.job_id, IN_LANE.lease))
    pair.tick(3.0)  # a heartbeat of each
    return pair


def _seeds(said: Iterable[bytes]) -> list[bytes]:
    """Return messages as inputs: each by itself, and all together."""
    reader = FrameReader()
    frames = [reader.read(each) for data in said for each in reader.split(data)]
    parts = [_written(each) for each in frames if each.stream]
    return [*parts, SEPARATOR.join(parts)]


def _written(frame: Frame) -> bytes:
    kind = (frame.type - 1) % len(FrameType)
    return bytes([kind, frame.flags & 0xFF, frame.stream & 0xFF]) + frame.payload


def _of_ours() -> list[bytes]:
    """Return what a worker sends, and what a coordinator sends."""
    pair = _said_between()
    whole = Frame(FrameType.BARRIER, 3, 0, 0, b"")
    pieces = split_payload(FrameType.TASK, 9, b"\x81\xa7task_id", b"\xa11")
    return _seeds(
        [
            *binary([*pair.worker_sent, *pair.coordinator_sent]),
            encode_frame(whole),
            *map(encode_frame, pieces),
        ]
    )


def _of_real_nodes() -> list[bytes]:
    beside = _asking()
    results = [
        encode_result(str(msgspec.msgpack.decode(each.payload)["task_id"]), packed(1))
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
    return _seeds([*map(encode_frame, frames), *tasks])


SESSIONS: Mapping[str, tuple[Callable[[bytes], None], Callable[[], Sequence[bytes]]]]
SESSIONS = {
    "fleet_coordinator": (fleet_coordinator, _of_ours),
    "fleet_worker": (fleet_worker, _of_ours),
    "fleet_asked": (fleet_asked, _of_real_nodes),
    "fleet_asking": (fleet_asking, _of_real_nodes),
}
