"""What Shoal's own wire promises beyond the laws of all wires."""

import json
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from protocols import calling, pairs
from protocols.calling import (
    CALL,
    MEMBER,
    RUN,
    TOKEN,
    CallPair,
    connect,
    fleet_context,
    packed,
    start_job,
    unconnected,
)
from protocols.session_pair import binary, sent
from shoal.domain.answer_assembly import assemble
from shoal.domain.errors import PeerError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import JobTerms, Webhook
from shoal.domain.money import Micros
from shoal.domain.outcome import AnswerPiece, Delta, Fault
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Failed,
    Joined,
    LoadChanged,
    OffersChanged,
    Rejected,
    RunJob,
    SendBlob,
)
from shoal.domain.work import Feature, JobKind, Task, Work
from shoal.domain.worker import Hardware, Offer, TokenPrices, WorkerLoad
from shoal.ledger.keys import Signer, verify
from shoal.ledger.receipts import output_of
from shoal.ledger.worker_receipts import output_hash_of
from shoal.protocols.seam.admission import AdmissionGrant, JoinRequest
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.endpoints import WebSocketRoute
from shoal.protocols.seam.peer_session import PeerDescribed, PeerJoined, ToPeer
from shoal.protocols.seam.session import BoundSession, Bulk, Close, Output, Send
from shoal.protocols.seam.token_proof import NOT_PROVEN
from shoal.protocols.shoal import PROTOCOL, codec
from shoal.protocols.shoal.codec import EVENT_DECODER, encode
from shoal.protocols.shoal.session import NAME_TAKEN, NO_CODE, PLAIN, SILENCE_MAX
from shoal.protocols.shoal.streams import HEAD, LAST, MORE, STREAM_LAST, STREAM_MORE

OTHER = replace(MEMBER, identity=Signer.from_seed(bytes(32)))
CODE = structs.replace(CALL, needs=frozenset({Feature.CODE}))
ANY_JOB = JobId("job"), LeaseNumber(1)
BLOB = b"\xc7\x20\x02" + bytes(32)  # refers to a large value


def describe(pair: CallPair) -> PeerJoined:
    joined = pair.events[0]
    assert isinstance(joined, PeerJoined)
    return joined


def test_a_worker_is_known_by_its_proven_key_and_describes_its_machine() -> None:
    hardware = Hardware("M4", memory_gb=64.0)
    pair = connect(PROTOCOL, replace(MEMBER, hardware=hardware))

    assert describe(pair).public_key == calling.SIGNER.public_key.hex()
    described = [e.profile for e in pair.events if isinstance(e, PeerDescribed)]
    assert described[-1].hardware == hardware
    assert described[0].release


def test_a_token_is_proved_and_never_sent() -> None:
    pair = connect(PROTOCOL)

    seen = b"".join(map(bytes, pair.worker_sent + pair.coordinator_sent))  # type: ignore[arg-type]
    assert TOKEN.encode() not in seen


@pytest.mark.parametrize(
    ("theirs", "ours", "binding", "reason"),
    [
        ("another", TOKEN, b"same", "Invalid token"),
        ("", TOKEN, b"same", "Invalid token"),
        (TOKEN, "", b"same", NOT_PROVEN),  # a coordinator without a token proves none
        (TOKEN, TOKEN, b"", PLAIN),
    ],
)
def test_who_proves_nothing_is_refused(
    theirs: str, ours: str, binding: bytes, reason: str
) -> None:
    member = replace(MEMBER, token=theirs, plain=not binding)
    pair = unconnected(PROTOCOL, member, fleet_context(ours))
    pair.binding = binding

    pair.begin()

    assert any(reason in each for each in pair.ends)
    assert not any(isinstance(each, PeerJoined) for each in pair.events[1:])


def known(key: str) -> WorkerProfile:
    """Return a worker without a token, admitted before by the coordinator of a key."""
    return replace(MEMBER, token="", verify=verify, coordinator_key=key)


def test_coordinator_that_proved_the_token_is_remembered() -> None:
    keys: list[str] = []
    member = replace(MEMBER, verify=verify, on_coordinator=keys.append)
    connect(PROTOCOL, member)
    connect(PROTOCOL, replace(member, token=""), fleet_context(""))

    identity = fleet_context().identity
    assert keys == [identity.public_key.hex()]


def test_worker_without_a_token_expects_the_key_of_its_coordinator() -> None:
    def admit(request: JoinRequest) -> AdmissionGrant:
        assert (request.token, request.key) == ("", calling.SIGNER.public_key.hex())
        return AdmissionGrant("token", "worker")

    context = replace(fleet_context(""), admission=admit)
    pair = connect(PROTOCOL, known(context.identity.public_key.hex()), context)
    other = unconnected(PROTOCOL, known("00" * 32), context)
    other.begin()

    # Both ends have proved who they are, as by a token.
    run = structs.replace(RUN, work=CODE, grant="a grant")
    assert start_job(pair, run).grant == "a grant"
    assert any("is not the one that admitted" in each for each in other.ends)


def test_who_says_no_hello_in_time_is_lost_whatever_it_sends() -> None:
    pair = unconnected(PROTOCOL, MEMBER, fleet_context())
    pair.coordinator.tick(0.0)
    piece = HEAD.pack(MORE, 1) + b"x"

    for now in range(10):
        assert pair.coordinator.receive([piece], now) == []

    (close,) = pair.coordinator.tick(10.0)
    assert isinstance(close, Close)


def test_idle_ends_hear_of_each_other_twice_in_the_longest_silence() -> None:
    pair = connect(PROTOCOL)
    at = pair.worker.deadline
    assert at is not None
    assert 2 * at < SILENCE_MAX < 3 * at

    for now in (at, 2 * at, 3 * at):
        pair.worker_sent.clear()
        pair.coordinator_sent.clear()
        pair.tick(now)

        assert len(pair.worker_sent) == len(pair.coordinator_sent) == 1
        assert pair.worker.deadline == now + at
        assert pair.coordinator.deadline == now + SILENCE_MAX


def test_a_proof_is_of_one_channel_only() -> None:
    """A man in the middle has two channels, and no proof of one is valid on another."""
    pair = unconnected(PROTOCOL, MEMBER, fleet_context())
    pair.worker.bind(b"one")  # type: ignore[attr-defined]
    pair.coordinator.bind(b"another")  # type: ignore[attr-defined]
    pair.binding = b""

    pair.begin()

    assert not pair.events
    assert pair.ends


def test_a_name_is_that_of_the_key_that_is_connected() -> None:
    context = fleet_context()
    route, *_ = PROTOCOL.endpoints(PROTOCOL.config(), context)
    assert isinstance(route, WebSocketRoute)

    def join(member: WorkerProfile, now: float) -> CallPair:
        pair = unconnected(PROTOCOL, member, context)
        pair.coordinator = route.accept(calling.REQUEST, now).session
        pair.begin(now)
        return pair

    first = join(MEMBER, 0.0)
    second = join(OTHER, 1.0)
    again = join(MEMBER, 2.0)
    later = join(OTHER, 100.0)
    later.coordinator.connection_lost(101.0)  # type: ignore[attr-defined]
    next_ = join(MEMBER, 101.0)

    for each in (first, again, later, next_):
        assert describe(each).name == MEMBER.name
    assert not second.events
    assert any(NAME_TAKEN in each for each in second.ends)
    assert NAME_TAKEN in (second.dialer.final_reason(1000, "") or "")


def test_code_and_grants_need_a_proven_token() -> None:
    proven = connect(PROTOCOL)
    open_to_all = connect(PROTOCOL, replace(MEMBER, token=""), fleet_context(""))
    run = structs.replace(RUN, work=CODE, grant="a grant")

    assert start_job(proven, run).grant == "a grant"
    assert open_to_all.command(run) == []
    open_to_all.tick(0.0)
    assert open_to_all.events[-1] == Rejected(run.job_id, run.lease, NO_CODE)
    assert start_job(open_to_all, structs.replace(run, work=CALL)).grant == ""


def test_nothing_of_who_pays_is_sent() -> None:
    terms = JobTerms(user="someone", webhook=Webhook("http://h/?t=secret", "s3cr3t"))
    pair = connect(PROTOCOL)

    assert start_job(pair, structs.replace(RUN, terms=terms)).terms == JobTerms()
    seen = b"".join(map(bytes, pair.coordinator_sent))  # type: ignore[arg-type]
    assert b"secret" not in seen
    assert b"someone" not in seen


def test_a_job_that_cannot_be_written_fails_and_nothing_else_does() -> None:
    pair = connect(PROTOCOL)

    assert pair.command(structs.replace(RUN, work=Task("demo.add", {"n": 2**64}))) == []
    pair.tick(0.0)
    heard = pair.events[-1]

    assert isinstance(heard, Failed)
    assert (heard.job_id, heard.fault) == (RUN.job_id, Fault.REQUEST)
    assert "64 bits" in heard.error
    start_job(pair, structs.replace(RUN, job_id=JobId("next")))


def test_values_that_a_message_cannot_have_are_an_error_of_the_peer() -> None:
    prices = TokenPrices(Micros(1), Micros(1))
    offer = Offer(frozenset({JobKind.CHAT}), last_resort=prices)
    structs.force_setattr(prices, "prompt", -5)

    with pytest.raises(PeerError, match="price"):
        EVENT_DECODER.decode(encode(OffersChanged((offer,))))


def test_what_refers_to_a_value_does_not_overtake_it() -> None:
    pair = connect(PROTOCOL)
    blob = SendBlob(bytes(32), bytes(1 << 20))
    refers = structs.replace(CALL, args=packed([1]) + BLOB)
    plain = structs.replace(RUN, job_id=JobId("plain"))

    def waits(message: object) -> bool:
        (output,) = pair.coordinator.send(ToPeer("", message), 0.0)  # type: ignore[arg-type]
        sent_.append(output)
        return isinstance(output, Bulk)

    sent_: list[Output] = []
    assert waits(blob)
    assert waits(structs.replace(RUN, work=refers))
    assert waits(CancelJob(RUN.job_id, RUN.lease))
    assert not waits(plain)
    assert not waits(CancelJob(plain.job_id, plain.lease))
    ready = [each.is_ready() for each in sent_ if isinstance(each, Bulk)]  # type: ignore[misc]
    assert ready == [True, False, False]
    # Once the value is sent, nothing about it waits.
    sent(sent_)
    assert not waits(structs.replace(RUN, job_id=JobId("next"), work=refers))


def test_bytes_are_not_searched_for_nesting(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(value: object) -> bool:
        raise AssertionError("it reads each byte")

    monkeypatch.setattr(codec, "is_too_deep", search)
    value = SendBlob(bytes(32), b"\x91" * 100_000)  # each a head of an array

    assert EVENT_DECODER.decode(encode(value)) == value


@pytest.mark.parametrize("newer", [True, False])
def test_large_messages_to_older_ends_are_one_stream_without_credit(
    newer: bool,
) -> None:
    context = fleet_context()
    route, *_ = PROTOCOL.endpoints(PROTOCOL.config(), context)
    assert isinstance(route, WebSocketRoute)
    coordinator = route.accept(calling.REQUEST, 0.0).session
    coordinator.tick(0.0)
    dialer = PROTOCOL.dial("http://127.0.0.1:4010", MEMBER)
    worker = dialer.start_session({})
    for end in (coordinator, worker):
        assert isinstance(end, BoundSession)
        end.bind(b"one channel")
    hello, *more = binary(sent(worker.tick(0.0), joined=False))
    fields = msgspec.msgpack.decode(hello[HEAD.size :])
    body = packed(fields if newer else fields[:10])  # without the window
    coordinator.receive([HEAD.pack(0, len(body)) + body, *more], 0.0)

    (output,) = coordinator.send(ToPeer("", SendBlob(bytes(32), bytes(1 << 20))), 0.0)

    kinds = [each[0] for each in binary(sent([output], joined=False))]
    assert {*kinds} == ({STREAM_MORE, STREAM_LAST} if newer else {MORE, LAST})


def test_an_older_program_ignores_what_it_does_not_know() -> None:
    told = msgspec.msgpack.decode(encode(OffersChanged(MEMBER.offers)))
    told[1][0][1].append("a kind of job from the future")
    told[1][0].append("a field from the future")
    shorter = msgspec.msgpack.decode(encode(LoadChanged(WorkerLoad("hot"))))
    del shorter[1][2:]

    offers = EVENT_DECODER.decode(packed(told))
    load = EVENT_DECODER.decode(packed(shorter))

    failed = encode(Failed(*ANY_JOB, "why", Fault.REQUEST))
    newer = failed.replace(packed(Fault.REQUEST.value), packed("a fault to come"))

    assert offers == OffersChanged(MEMBER.offers)
    assert load == LoadChanged(WorkerLoad("hot"))
    assert EVENT_DECODER.decode(newer) == Failed(*ANY_JOB, "why", Fault.WORKER)


@pytest.mark.parametrize("pieces", [["a", " text"], ["a", Delta(1, {"content": "é"})]])
@pytest.mark.parametrize("work", [pairs.CHAT, Task("demo.add", {"x": 1})])
def test_an_answer_has_a_receipt_of_its_output(
    work: Work, pieces: list[AnswerPiece]
) -> None:
    pair, (joined,) = pairs.connect(PROTOCOL)
    assert isinstance(joined, Joined)
    (run,) = pair.command(structs.replace(RUN, work=work, continues="begun"))
    assert isinstance(run, RunJob)

    heard = pair.event(AnswerChunk(run.job_id, run.lease, pieces))
    heard += pair.event(Completed(run.job_id, run.lease, rest=("\ud800",)))

    chunk, end = heard
    assert isinstance(chunk, AnswerChunk)
    assert isinstance(end, Completed)
    assert end.receipt is not None
    told = assemble(["begun", *chunk.pieces, *end.rest], end.finish_reason, None)
    receipt, key = json.loads(end.receipt.body), pairs.SIGNER.public_key
    assert receipt["output_hash"] == output_hash_of(output_of(work, told))
    assert (receipt["job_id"], receipt["provider_pubkey"]) == (RUN.job_id, key.hex())
    assert verify(key, end.receipt.signature, end.receipt.body)
    assert joined.offer.receipts


def test_a_value_has_no_receipt() -> None:
    pair = connect(PROTOCOL)
    run = start_job(pair)

    (end,) = pair.event(Completed(run.job_id, run.lease, value=packed(1)))

    assert isinstance(end, Completed)
    assert end.receipt is None


def test_a_token_takes_few_bytes() -> None:
    pair = connect(PROTOCOL)
    run = start_job(pair, structs.replace(RUN, job_id=JobId("0" * 24)))
    assert isinstance(run, RunJob)

    (output,) = pair.worker.send(AnswerChunk(run.job_id, run.lease, ["word "]), 0.0)

    assert isinstance(output, Send)
    assert len(output.data) < 55
    assert pair.event(Completed(run.job_id, run.lease)) != []
