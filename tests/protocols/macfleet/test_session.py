"""A connection from its first frame to its last."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from protocols.calling import (
    CALL,
    MEMBER,
    OFFER,
    RUN,
    TOKEN,
    connect,
    fleet_context,
    packed,
    sent,
    start_job,
    unconnected,
)
from protocols.macfleet.recorded import case_of
from protocols.macfleet.upstream_node import (
    OPEN,
    UpstreamNode,
    called,
    coordinator_with_node,
    frame,
    listener,
    worker_with_node,
)
from shoal.domain.vocabulary import (
    CancelJob,
    Completed,
    Failed,
    OffersChanged,
    Rejected,
    RunJob,
)
from shoal.domain.work import JobKind
from shoal.domain.worker import Hardware
from shoal.protocols.macfleet import PROTOCOL
from shoal.protocols.macfleet.codec.chunks import CHUNK_TIMEOUT
from shoal.protocols.macfleet.codec.frames import (
    Flag,
    Frame,
    FrameType,
    encode_frame,
)
from shoal.protocols.macfleet.codec.hardware import HardwareProfile, encode_profile
from shoal.protocols.macfleet.codec.keys import fleet_key, sign
from shoal.protocols.macfleet.connection import FleetLiveness
from shoal.protocols.macfleet.dialer import FleetDialer
from shoal.protocols.macfleet.handshake_messages import (
    decode_first,
    decode_second,
    encode_second,
    encode_suffix,
)
from shoal.protocols.macfleet.membership import FleetRegistry, NodeAddress
from shoal.protocols.seam.peer_session import (
    PeerDescribed,
    PeerJoined,
    PeerMessage,
    Protection,
)
from shoal.protocols.seam.session import Close, Notice, PeerProfile

HEAD = 24  # bytes
CHALLENGE = bytes(range(0xE0, 0x100))


def test_two_shoal_nodes_meet_as_any_nodes_do() -> None:
    hardware = Hardware("Apple M2", gpu_cores=8, memory_gb=16.0)
    pair = connect(PROTOCOL, replace(MEMBER, hardware=hardware))

    joined, described, offered = pair.events
    assert joined == PeerJoined(
        "worker-one", submits_jobs=True, protection=Protection.TLS
    )
    assert isinstance(described, PeerDescribed)
    assert described.profile == PeerProfile(
        "worker-one", structs.replace(hardware, tier=0), protocol_version=1
    )
    assert isinstance(offered, OffersChanged)
    (offer,) = offered.offers
    assert (offer.tasks, offer.slots, offer.features) == (OFFER.tasks, 4, frozenset())
    run = start_job(pair)
    assert run.work == CALL
    pair.event(Completed(run.job_id, run.lease, value=packed(42)))
    assert pair.events[-1] == Completed(RUN.job_id, RUN.lease, value=packed(42))


@pytest.mark.parametrize(
    ("token", "server_token"),
    [("another token", TOKEN), (TOKEN, ""), ("", TOKEN)],
)
def test_a_worker_with_another_token_is_refused(token: str, server_token: str) -> None:
    member = replace(MEMBER, token=token)

    pair = connect(PROTOCOL, member, fleet_context(server_token))

    assert pair.events == []


def test_a_coordinator_does_not_answer_the_probe_of_another() -> None:
    beside = coordinator_with_node()
    beside.frames.clear()

    assert beside.task("1", name="shoal.which", args=[]) == []

    assert beside.frames == []
    assert beside.notices == ["ignored the probe of another coordinator"]


def test_another_address_cannot_replace_an_upstream_node() -> None:
    listens = listener(OPEN)
    first = called(listens, "node-b", "192.0.2.1")

    hijack = called(listens, "node-b", "192.0.2.2")
    again = called(listens, "node-b", "192.0.2.1")

    assert isinstance(first.heard[0], PeerJoined)
    assert hijack.heard == []
    assert "192.0.2.1" in hijack.end
    assert isinstance(again.heard[0], PeerJoined)


def test_a_node_without_an_id_is_refused() -> None:
    assert "without an id" in coordinator_with_node("").end


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (frame(FrameType.TASK, {})[:-1] + b"x", "CRC32"),
        (bytes.fromhex("00000001004d0000") + bytes(16), "frame type 77"),
        (bytes.fromhex("0000000100040000ffffffff") + bytes(12), "exceeds the limit"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n", "HTTP"),
    ],
)
def test_malformed_frames_end_the_connection_with_the_reason(
    data: bytes, said: str
) -> None:
    beside = coordinator_with_node()

    beside.says(frame(FrameType.TASK, {"task_id": "1", "name": "f"}) + data)

    assert isinstance(beside.heard[-1], RunJob)  # frames before count
    assert said in beside.end
    assert beside.says(frame(FrameType.TASK, {"task_id": "2", "name": "f"})) == []


@pytest.mark.parametrize("node", [coordinator_with_node, worker_with_node])
def test_a_task_of_a_dispatcher_ends_at_its_timeout(
    node: Callable[[], UpstreamNode],
) -> None:
    beside = node()
    runs = [
        *beside.task("1", name="f", timeout=5.0),
        *beside.task("2", name="f", timeout=None),
        *beside.task("3", name="f"),  # 300 s, as upstream reads it
        *beside.task("4", name="f", timeout=1.0),
    ]
    leases = [(run.job_id, run.lease) for run in runs if isinstance(run, RunJob)]
    beside.send(Completed(*leases[3], value=packed(7)))
    beside.frames.clear()

    assert beside.tick(4.9) == []
    assert beside.tick(5.0) == [CancelJob(*leases[0])]
    assert beside.tick(300.0) == [CancelJob(*leases[2])]

    first, second = (msgspec.msgpack.decode(each.payload) for each in beside.frames)
    assert first == {
        **{"task_id": "1", "ok": False, "value": None},
        "error": "Task timed out after 5.0s",
    }
    assert second["error"] == "Task timed out after 300.0s"
    beside.frames.clear()
    assert beside.send(Completed(*leases[0], value=packed(7))) == []
    assert beside.frames == []


@pytest.mark.parametrize("node", [coordinator_with_node, worker_with_node])
def test_the_timeout_of_a_dispatcher_limits_the_whole_job(
    node: Callable[[], UpstreamNode],
) -> None:
    beside = node()

    runs = [
        *beside.task("1", name="f", timeout=5.0),
        *beside.task("2", name="f", timeout=None),
        *beside.task("3", name="f"),
    ]

    assert [each.remaining for each in runs if isinstance(each, RunJob)] == [
        5.0,
        None,
        300.0,
    ]


def test_frames_are_small_before_the_handshake() -> None:
    session = listener(fleet_context()).accept("192.0.2.1", 0.0)
    session.tick(0.0)

    (end,) = session.receive([bytes.fromhex("00000000000100080000ffff")], 0.0) or [
        *session.receive([bytes(12)], 0.0)
    ]

    assert isinstance(end, Close)
    assert "exceeds the limit" in end.reason


def test_frames_may_be_large_right_after_the_handshake() -> None:
    pair = unconnected(PROTOCOL, MEMBER, fleet_context())
    pair.open()
    pair.coordinator.tick(0.0)
    (first,) = sent(pair.worker.tick(0.0))
    (second,) = sent(pair.coordinator.receive([first], 0.0))
    (third,) = sent(pair.worker.receive([second], 0.0))
    large = frame(FrameType.TASK, {"task_id": "1", "name": "f", "args": [bytes(99999)]})

    heard = pair.coordinator.receive([third + large], 0.0)

    assert not any(isinstance(each, Close) for each in heard)
    assert isinstance(heard[-1], PeerMessage)
    assert isinstance(heard[-1].message, RunJob)


def test_a_handshake_times_out() -> None:
    session = listener(fleet_context()).accept("192.0.2.1", 0.0)
    session.tick(0.0)
    assert session.deadline == 10.0

    (end,) = session.tick(10.0)

    assert isinstance(end, Close)
    assert session.deadline is None


def test_a_peer_whose_heartbeats_fail_is_lost() -> None:
    fleet = FleetRegistry("node-a", HardwareProfile)
    fleet.on_pong("node-b", NodeAddress("192.0.2.1", 50051), None, 0.0)
    life = FleetLiveness(fleet, "node-b", 0.0)

    for now in (1.0, 2.0, 3.0):
        fleet.on_missed_pong("node-b", now)
        assert life.lost_reason(now) == ""
    fleet.expire(30.0)

    assert life.lost_reason(30.0) == "its heartbeats have stopped"
    assert life.deadline == 31.0


def test_frames_are_a_sign_of_life_beside_the_fleets_heartbeats() -> None:
    fleet = FleetRegistry("node-a", HardwareProfile)
    fleet.on_pong("node-b", NodeAddress("192.0.2.1", 50051), None, 0.0)
    life = FleetLiveness(fleet, "node-b", 0.0)
    for now in (1.0, 2.0, 3.0):
        fleet.on_missed_pong("node-b", now)
    fleet.expire(30.0)

    life.on_activity(25.0)

    assert life.lost_reason(34.9) == ""
    assert life.lost_reason(36.0) == "its heartbeats have stopped"


@pytest.mark.parametrize("node", [coordinator_with_node, worker_with_node])
def test_heartbeats_of_an_upstream_peer_are_accepted_in_silence(
    node: Callable[[], UpstreamNode],
) -> None:
    beside = node()
    beside.frames.clear()
    beat = case_of("taskrun/HEARTBEAT type ignored")["input"]["frames_hex"][0]

    for now in (1.0, 2.0, 3.0):
        assert beside.says(bytes.fromhex(beat), now) == []

    assert (beside.notices, beside.frames, beside.end) == ([], [], "")


@pytest.mark.parametrize("node", [coordinator_with_node, worker_with_node])
def test_every_answer_to_a_task_is_on_the_stream_of_the_task(
    node: Callable[[], UpstreamNode],
) -> None:
    beside = node()
    beside.frames.clear()
    tasks: list[dict[str, object]] = [
        {"task_id": "done", "name": "f"},
        {"task_id": "large", "name": "f"},
        {"task_id": "failed", "name": "f"},
        {"task_id": "rejected", "name": "f"},
        {"task_id": "late", "name": "f", "timeout": 5.0},
        {"task_id": "malformed", "name": "f", "args": 1},
    ]

    runs: list[object] = []
    for stream, task in enumerate(tasks, 7):
        task_frame = Frame(FrameType.TASK, stream, 0, 0, packed(task))
        runs += beside.says(encode_frame(task_frame))
    leases = [(run.job_id, run.lease) for run in runs if isinstance(run, RunJob)]
    beside.send(Completed(*leases[0], value=packed(7)))
    beside.send(Completed(*leases[1], value=packed(bytes(300_000))))
    beside.send(Failed(*leases[2], "ValueError: x"))
    beside.send(Rejected(*leases[3], "no such function"))
    beside.tick(5.0)

    read = msgspec.msgpack.Decoder(dict[str, object]).decode
    answers = {str(read(each.payload)["task_id"]): each for each in beside.frames}
    assert {task_id: each.stream for task_id, each in answers.items()} == {
        str(task["task_id"]): stream for stream, task in enumerate(tasks, 7)
    }
    heads = {(each.type, each.flags, each.sequence) for each in beside.frames}
    assert heads == {(FrameType.RESULT, 0, 0)}


def notices(outputs: Sequence[object]) -> list[str]:
    return [each.text for each in outputs if isinstance(each, Notice)]


def control(payload: bytes) -> bytes:
    return encode_frame(Frame(FrameType.CONTROL, 0, int(Flag.V2), 0, payload))


def test_a_coordinator_logs_another_wire_version_in_a_handshake_once() -> None:
    listens, key = listener(fleet_context()), fleet_key(TOKEN)
    logged: list[list[str]] = []
    remarks: list[str] = []

    for _ in range(2):
        session = listens.accept("192.0.2.1", 0.0)
        session.tick(0.0)
        (second,) = sent(session.receive([control(b"node-b" + CHALLENGE)], 0.0))
        theirs = decode_second(key, second[HEAD:], CHALLENGE, signed=True).challenge
        hardware = encode_profile(HardwareProfile())
        suffix = encode_suffix(key, theirs, "node-b", hardware, version=7)
        outputs = session.receive([control(sign(key, theirs) + suffix)], 0.0)
        logged.append(notices(outputs))
        remarks += [
            each.message.profile.remark
            for each in outputs
            if isinstance(each, PeerMessage) and isinstance(each.message, PeerDescribed)
        ]

    assert remarks == 2 * ["wire version 7, and this node has 1"]
    assert logged == [["node 'node-b' has wire_version 7, and this node has 1"], []]


def test_a_worker_logs_another_wire_version_in_a_handshake() -> None:
    key = fleet_key(TOKEN)
    dialer = FleetDialer("tls-any://192.0.2.1:50052", MEMBER)
    dialer.start_session({})
    assert dialer.final_reason(1000, "") is None  # no node answered the ping
    session = dialer.start_session({})
    (first,) = sent(session.tick(0.0))
    theirs = decode_first(first[HEAD:]).challenge
    hardware = encode_profile(HardwareProfile(wire_version=2))

    second = encode_second(key, "node-a", theirs, CHALLENGE, hardware)
    outputs = session.receive([control(second)], 0.0)

    assert notices(outputs) == ["node 'node-a' has wire_version 2, and this node has 1"]


@pytest.mark.parametrize(
    "type", [FrameType.GRADIENT, FrameType.BARRIER, FrameType.COMPRESSED_GRADIENT]
)
def test_a_collective_ends_the_connection_with_the_reason(type: FrameType) -> None:
    pair = connect(PROTOCOL)

    outputs = pair.coordinator.receive([encode_frame(Frame(type, 5, 0, 0, b""))], 0.0)

    (closed,) = [each for each in outputs if isinstance(each, Close)]
    assert f"a {type.name} frame: no group of ranks is here" in closed.reason


CHUNKED, LAST = int(Flag.CHUNKED), int(Flag.CHUNKED | Flag.LAST)
both_roles = pytest.mark.parametrize("node", [coordinator_with_node, worker_with_node])


def chunks_of(
    type: FrameType, payload: bytes, *, stream: int = 9, first: int = 0, number: int = 3
) -> list[bytes]:
    """Cut a payload into chunks as the document has them: flags and sequence only."""
    size = -(-len(payload) // number)
    return [
        encode_frame(
            Frame(
                *(type, stream, LAST if index == number - 1 else CHUNKED),
                (first + index) % (1 << 32),
                payload[index * size : (index + 1) * size],
            )
        )
        for index in range(number)
    ]


@both_roles
@pytest.mark.parametrize("first", [0, 1, 0xFFFFFFFF])
def test_a_chunked_task_of_any_peer_is_joined_and_answered_on_its_stream(
    node: Callable[[], UpstreamNode], first: int
) -> None:
    beside = node()
    case = case_of("taskrun/nonzero stream and sequence")
    recorded_task = bytes.fromhex(case["input"]["frames_hex"][0])[HEAD:]
    other = frame(FrameType.TASK, {"task_id": "other", "name": "f"})
    one, two, three = chunks_of(FrameType.TASK, recorded_task, first=first)

    assert beside.says(one) == []
    assert len(beside.says(other)) == 1  # between the chunks, and on another stream
    assert beside.says(two) == []
    (run,) = beside.says(three)
    assert isinstance(run, RunJob)
    beside.frames.clear()
    beside.send(Completed(run.job_id, run.lease, value=packed(1)))

    (result,) = beside.frames
    reply = bytes.fromhex(case["expect"]["replies"][0]["wire_hex"])[HEAD:]
    assert (result.stream, result.flags, bytes(result.payload)) == (9, 0, reply)
    beside.tick(CHUNK_TIMEOUT)
    assert beside.end == ""


@both_roles
@pytest.mark.parametrize("flag", [LAST, int(Flag.LAST)])
def test_a_task_in_one_chunk_is_a_whole_task(
    node: Callable[[], UpstreamNode], flag: int
) -> None:
    beside = node()
    task = packed({"task_id": "1", "name": "f"})

    (run,) = beside.says(encode_frame(Frame(FrameType.TASK, 9, flag, 7, task)))

    assert isinstance(run, RunJob)


def test_a_chunked_result_completes_a_call() -> None:
    beside = coordinator_with_node()
    beside.send(RUN)
    task_id = msgspec.msgpack.decode(beside.frames[-1].payload)["task_id"]
    result = packed({"task_id": task_id, "ok": True, "value": 7, "error": None})

    heard = [
        each
        for chunk in chunks_of(FrameType.RESULT, result)
        for each in beside.says(chunk)
    ]

    assert heard == [Completed(RUN.job_id, RUN.lease, value=packed(7))]


@both_roles
@pytest.mark.parametrize("type_", [FrameType.TASK, FrameType.RESULT])
def test_a_compressed_frame_ends_the_connection_with_the_reason(
    node: Callable[[], UpstreamNode], type_: FrameType
) -> None:
    beside = node()

    beside.says(encode_frame(Frame(type_, 1, int(Flag.COMPRESSED), 0, b"x")))

    assert "sent uncompressed" in beside.end


@both_roles
def test_a_missing_chunk_ends_the_connection_with_the_reason(
    node: Callable[[], UpstreamNode],
) -> None:
    beside = node()
    one, two, _ = chunks_of(FrameType.TASK, packed({"task_id": "1", "name": "f"}))

    beside.says(one, 0.0)
    beside.says(two, 100.0)

    beside.tick(CHUNK_TIMEOUT)
    assert beside.end == ""
    beside.tick(100.0 + CHUNK_TIMEOUT)
    assert beside.end == "the next chunk on stream 9 did not arrive within 120 s"


@both_roles
def test_chunks_out_of_order_end_the_connection_with_the_reason(
    node: Callable[[], UpstreamNode],
) -> None:
    beside = node()
    one, _, three = chunks_of(FrameType.TASK, packed({"task_id": "1", "name": "f"}))

    beside.says(one + three)

    assert "chunk 2 (TASK) on stream 9, expected chunk 1" in beside.end


@both_roles
def test_chunks_of_any_peer_take_bounded_memory(
    node: Callable[[], UpstreamNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.protocols.macfleet.codec.chunks.BUFFERED_MAX", 4 << 20)
    beside = node()
    piece = encode_frame(Frame(FrameType.TASK, 9, CHUNKED, 0, bytes(1 << 20)))

    for index in range(4):
        beside.says(piece[:12] + index.to_bytes(4) + piece[16:])
    assert beside.end == ""
    beside.says(piece[:12] + (4).to_bytes(4) + piece[16:])

    assert "exceeds the limit" in beside.end


def test_a_failed_task_returns_its_error() -> None:
    beside = coordinator_with_node()
    (run,) = beside.task("1", name="f")
    assert isinstance(run, RunJob)

    failed = Failed(run.job_id, run.lease, "ValueError: x", exception=b"a record")
    beside.send(failed)

    assert b"ValueError: x" in bytes(beside.frames[-1].payload)
    assert b"a record" not in bytes(beside.frames[-1].payload)
    assert JobKind.CALL is run.work.kind
