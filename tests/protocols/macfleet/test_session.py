"""A connection from its first frame to its last."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest

from protocols.calling import (
    CALL,
    MEMBER,
    OFFER,
    RUN,
    STREAM,
    TASK,
    TOKEN,
    CallPair,
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
from protocols.session_pair import binary
from shoal.domain.credentials import digest_of
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    CancelJob,
    Completed,
    Failed,
    OffersChanged,
    PushCalls,
    Rejected,
    RunJob,
    SendBlob,
    StreamedCall,
)
from shoal.domain.work import Feature, JobKind, Work
from shoal.domain.worker import Hardware
from shoal.ledger.keys import Signer
from shoal.protocols.macfleet import PROTOCOL, Config
from shoal.protocols.macfleet.codec.frames import (
    Flag,
    Frame,
    FrameReader,
    FrameType,
    encode_frame,
)
from shoal.protocols.macfleet.codec.hardware import HardwareProfile, encode_profile
from shoal.protocols.macfleet.codec.keys import fleet_key, sign
from shoal.protocols.macfleet.dialer import FleetDialer
from shoal.protocols.macfleet.frame_handlers import CHUNK_TIMEOUT
from shoal.protocols.macfleet.handshake_messages import (
    decode_first,
    decode_second,
    encode_second,
    encode_suffix,
)
from shoal.protocols.macfleet.liveness import RegistryLiveness
from shoal.protocols.macfleet.membership import FleetRegistry, NodeAddress
from shoal.protocols.seam.admission import AdmissionGrant, JoinRequest, proves_token
from shoal.protocols.seam.context import ProtocolContext, WorkerProfile
from shoal.protocols.seam.peer_session import (
    PeerDescribed,
    PeerJoined,
    PeerMessage,
    Protection,
    ToPeer,
)
from shoal.protocols.seam.session import Bulk, Close, Notice, PeerProfile

HEAD = 24  # bytes
CHALLENGE = bytes(range(0xE0, 0x100))


def refused(
    member: WorkerProfile,
    context: ProtocolContext,
    config: Config | None = None,
) -> CallPair:
    """Let a worker try to join; return both ends."""
    return connect(PROTOCOL, member, context, config=config)


def test_shoal_nodes_authenticate_by_a_token_over_tls() -> None:
    member = replace(MEMBER, hardware=Hardware("Apple M2", gpu_cores=8, memory_gb=16.0))

    assert member.identity is not None
    met, described, offered = connect(PROTOCOL, member).events

    assert met == PeerJoined(
        "worker-one",
        cancels=True,
        submits_jobs=False,
        protection=Protection.TLS,
        exclusive=True,
        respects_offers=True,
        public_key=member.identity.public_key.hex(),
    )
    assert isinstance(described, PeerDescribed)
    assert described.profile == PeerProfile(
        "worker-one",
        Hardware("Apple M2", gpu_cores=8, memory_gb=16.0, tier=0),
        protocol_version=1,
    )
    assert offered == OffersChanged((OFFER,))


def test_code_is_not_offered_in_a_fleet_without_a_token() -> None:
    pair = connect(PROTOCOL, replace(MEMBER, token=""), fleet_context(""))

    met, _, offered = pair.events
    assert isinstance(met, PeerJoined)
    assert met.protection is Protection.PLAIN
    assert isinstance(offered, OffersChanged)
    assert offered.offers[0].features == {Feature.VALUES}
    work = replace(CALL, needs=frozenset({Feature.CODE}))
    pair.command(replace(RUN, work=work))
    pair.tick(0.0)
    assert isinstance(pair.events[-1], Rejected)
    assert "--macfleet-token" in pair.events[-1].reason


def test_code_is_not_offered_without_tls() -> None:
    pair = unconnected(PROTOCOL, MEMBER, fleet_context(), config=Config(open=True))
    pair.certificate = b""  # an open fleet has no TLS
    pair.begin()
    pair.event(OffersChanged(MEMBER.offers))

    met, _, offered = pair.events
    assert isinstance(met, PeerJoined)
    assert isinstance(offered, OffersChanged)
    assert offered.offers[0].features == {Feature.VALUES}


@pytest.mark.parametrize(
    ("member", "context", "said"),
    [
        (replace(MEMBER, token="another token"), fleet_context(), "--token"),
        (replace(MEMBER, token=TOKEN), fleet_context(""), "--token"),
        (replace(MEMBER, token="short"), fleet_context(), "--token"),
    ],
)
def test_a_refused_worker_receives_the_reason(
    member: WorkerProfile, context: ProtocolContext, said: str
) -> None:
    pair = refused(member, context)

    assert pair.events == []
    assert said in (pair.dialer.final_reason(1000, "") or "")


def test_two_machines_with_one_name_are_distinguished() -> None:
    listens = listener(fleet_context())
    first = unconnected(PROTOCOL, MEMBER, fleet_context())
    other = replace(MEMBER, identity=Signer.from_seed(bytes(32)))
    second = unconnected(PROTOCOL, other, fleet_context())
    again = unconnected(PROTOCOL, MEMBER, fleet_context())
    for pair in (first, second, again):
        pair.coordinator = listens.accept("192.0.2.1", 0.0)
        pair.begin()

    assert isinstance(first.events[0], PeerJoined)
    assert second.events == []
    assert "--name" in (second.dialer.final_reason(1000, "") or "")
    assert isinstance(again.events[0], PeerJoined)  # the listener refuses the first one


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


@pytest.mark.parametrize("fleet", ["", "lab"])
@pytest.mark.parametrize("token", [TOKEN, "short"])
def test_the_join_token_admits_a_worker_whatever_the_fleets_token(
    token: str, fleet: str
) -> None:
    def admit(request: JoinRequest) -> AdmissionGrant:
        assert any(proves_token(request.token, each) for each in ("a fleet's", token))
        return AdmissionGrant()

    context = replace(fleet_context(token), admission=admit)
    config = Config(token="a fleet's", fleet=fleet)

    pair = connect(PROTOCOL, replace(MEMBER, token=token), context, config=config)

    assert start_job(pair).work == CALL


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


@pytest.mark.parametrize("timeout", [5.0, None])
def test_a_call_to_a_shoal_worker_carries_what_remains_of_its_jobs_limit(
    timeout: float | None,
) -> None:
    pair = connect(PROTOCOL)
    call = replace(CALL, timeout=timeout)

    run = start_job(pair, replace(RUN, work=call, remaining=40.0))

    sent_task = msgspec.msgpack.decode(binary(pair.coordinator_sent)[-1][HEAD:])
    assert sent_task["timeout"] == (timeout or 40.0)
    # Without a timeout of the caller, that of the function applies.
    assert run.work == call
    assert run.remaining == (None if timeout else 40.0)


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
    assert b"may not submit jobs" in sent(heard)[-1]


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
    life = RegistryLiveness(fleet, "node-b", 0.0)

    for now in (1.0, 2.0, 3.0):
        fleet.on_missed_pong("node-b", now)
        assert life.lost_reason(now) == ""
    fleet.expire(30.0)

    assert life.lost_reason(30.0) == "its heartbeats have stopped"
    assert life.deadline == 31.0


def test_frames_are_a_sign_of_life_beside_the_fleets_heartbeats() -> None:
    fleet = FleetRegistry("node-a", HardwareProfile)
    fleet.on_pong("node-b", NodeAddress("192.0.2.1", 50051), None, 0.0)
    life = RegistryLiveness(fleet, "node-b", 0.0)
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


def test_control_messages_and_heartbeats_are_on_stream_0() -> None:
    pair = connect(PROTOCOL)
    run = start_job(pair)
    for now in (3.0, 6.0):
        pair.tick(now)
    pair.event(Completed(run.job_id, run.lease, value=packed(1)))

    streams: dict[FrameType, set[int]] = {}
    both = binary([*pair.coordinator_sent, *pair.worker_sent])
    for each in frames_in(b"".join(both)):
        streams.setdefault(each.type, set()).add(each.stream)
    assert streams == {
        FrameType.CONTROL: {0},
        FrameType.HEARTBEAT: {0},
        FrameType.TASK: {1},
        FrameType.RESULT: {1},
    }


def test_a_large_answer_between_shoal_nodes_is_on_the_stream_of_its_task() -> None:
    pair = connect(PROTOCOL)
    large = packed([bytes(300_000)])
    run = start_job(pair, replace(RUN, work=replace(CALL, args=large)))

    assert pair.event(Completed(run.job_id, run.lease, value=large))

    (*_, said), (*_, answer) = binary(pair.coordinator_sent), binary(pair.worker_sent)
    task, result = frames_in(said), frames_in(answer)
    assert {each.stream for each in task} == {each.stream for each in result} == {2}


def frames_in(data: bytes) -> list[Frame]:
    return [FrameReader.read(each) for each in FrameReader().split(data)]


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


def test_a_silent_shoal_peer_is_lost_after_ten_seconds() -> None:
    pair = connect(PROTOCOL)

    outputs = [pair.coordinator.tick(now) for now in (3.0, 6.0, 9.0, 10.0)]

    assert isinstance(outputs[-1][-1], Close)
    assert outputs[-1][-1].reason == "silent for 10 s"


@pytest.mark.parametrize("size", [300_000, 5_000_000])
def test_small_messages_go_between_the_chunks_of_large_ones(size: int) -> None:
    pair = connect(PROTOCOL)
    data = packed([bytes(size)])
    run = start_job(pair, replace(RUN, work=replace(CALL, args=data)))
    pair.event(Completed(run.job_id, run.lease, value=data))

    assert run.work == replace(CALL, args=data)
    assert pair.events[-1] == Completed(RUN.job_id, RUN.lease, value=data)
    assert (
        max(map(len, pieces(binary(pair.coordinator_sent)[-1]))) <= (256 << 10) + HEAD
    )
    lane = start_job(pair, replace(RUN, job_id=JobId("lane"), work=STREAM))
    (pushed,) = pair.command(
        PushCalls(JobId("lane"), RUN.lease, [StreamedCall(1, data, packed({}))])
    )
    expected = [StreamedCall(1, data, packed({}))]
    assert pushed == PushCalls(lane.job_id, LeaseNumber(1), expected)


def pieces(data: bytes) -> list[bytes]:
    """Split bytes into frames."""
    found: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + HEAD + int.from_bytes(data[at + 8 : at + 12])
        found.append(data[at:end])
        at = end
    return found


def test_a_blob_reference_does_not_overtake_the_blob() -> None:
    pair = connect(PROTOCOL)
    blob = bytes(1 << 20)
    digest = digest_of("x")
    args = packed([1])[:-1] + b"\xc7\x20\x02" + digest
    coordinator = pair.coordinator
    (first,) = coordinator.send(ToPeer("", SendBlob(digest, blob)), 0.0)
    (second,) = coordinator.send(
        ToPeer("", replace(RUN, work=replace(CALL, args=args))), 0.0
    )
    (third,) = coordinator.send(ToPeer("", CancelJob(RUN.job_id, RUN.lease)), 0.0)

    assert isinstance(first, Bulk)
    assert isinstance(second, Bulk)
    assert isinstance(third, Bulk)


def test_a_blob_with_a_wrong_digest_ends_the_connection() -> None:
    pair = connect(PROTOCOL)

    pair.command(SendBlob(bytes(32), b"not that"))

    assert "not match its digest" in pair.ends[0]


@pytest.mark.parametrize(
    "type", [FrameType.GRADIENT, FrameType.BARRIER, FrameType.COMPRESSED_GRADIENT]
)
def test_a_collective_ends_the_connection_with_the_reason(type: FrameType) -> None:
    pair = connect(PROTOCOL)

    outputs = pair.coordinator.receive([encode_frame(Frame(type, 5, 0, 0, b""))], 0.0)

    (closed,) = [each for each in outputs if isinstance(each, Close)]
    assert f"a {type.name} frame: no group of ranks is here" in closed.reason


def test_workers_may_not_submit_jobs() -> None:
    pair = connect(PROTOCOL)
    task = frame(FrameType.TASK, {"task_id": "1", "name": "f"})

    heard = pair.coordinator.receive([task], 0.0)

    assert not pair.commands
    (said,) = sent(heard)
    assert b"may not submit jobs" in said


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
    monkeypatch.setattr("shoal.protocols.macfleet.frame_handlers.PAYLOAD_MAX", 4 << 20)
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


@pytest.mark.parametrize("work", [CALL, TASK, STREAM], ids=lambda each: each.kind.value)
def test_grant_goes_to_workers_that_proved_a_token_only(work: Work) -> None:
    run = replace(RUN, work=work, grant="sk-shoal-call-1.2.3")
    strangers = replace(MEMBER, token="")

    assert start_job(connect(PROTOCOL), run).grant == run.grant
    pair = connect(PROTOCOL, strangers, fleet_context(""))
    assert start_job(pair, run).grant == ""
