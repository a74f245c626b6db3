import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from shoal.domain.errors import PeerError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault, Usage
from shoal.domain.receipts import RECEIPT_SIZE_MAX, SignedReceipt
from shoal.domain.vocabulary import Completed, Failed, Rejected
from shoal.domain.work import JobKind
from shoal.domain.worker import Offer
from shoal.protocols.tealenet.codec.envelope import decode, encode
from shoal.protocols.tealenet.codec.extension import (
    VALUES_MAX,
    VERSION,
    HeartbeatExtension,
    InferenceCompleteExtension,
    InferenceErrorExtension,
    IntroductionExtension,
    ReceiptExtension,
    ShoalFeature,
    completion_extension,
    error_extension,
    fault_of,
    read_completion,
    read_error,
    read_heartbeat,
    read_introduction,
    receipt_of,
    usage_of,
    wire_offers,
    write_extension,
)
from shoal.protocols.tealenet.codec.messages import InferenceComplete

JOB = JobId("job")
LEASE = LeaseNumber(1)

INTRODUCTION = IntroductionExtension(
    version=VERSION,
    features=[*(each.value for each in ShoalFeature), "telepathy"],
    name="beagle",
    role="worker",
    token="t",
    offers=wire_offers([Offer(frozenset(JobKind), frozenset({"m"}))]),
    key="00" * 32,
    challenge="AAAA",
    proof="AAAA",
    noise="11" * 32,
    noise_proof="AAAA",
)

texts = st.text(max_size=20)


def test_an_introduction_round_trips() -> None:
    read = read_introduction(write_extension(INTRODUCTION))

    assert read == INTRODUCTION
    assert read.shoal_features == frozenset(ShoalFeature)


def test_absent_fields_are_not_written() -> None:
    assert bytes(write_extension(IntroductionExtension(VERSION))) == b'{"version":1}'
    assert bytes(write_extension(HeartbeatExtension())) == b"{}"
    assert bytes(write_extension(InferenceCompleteExtension())) == b"{}"


@pytest.mark.parametrize(
    "raw",
    [
        b"null",
        b"[]",
        b"{}",
        b'"shoal"',
        b'{"version":0}',
        b'{"version":"1"}',
        b'{"version":1,"name":5}',
        b'{"version":1,"token":"%b"}' % (b"x" * 257),
        b'{"version":1,"key":"%b"}' % (b"x" * 129),
        b'{"version":1,"offers":[1]}',
        b'{"version":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"version":1,"x":[%b1]}' % (b"[]," * VALUES_MAX),
    ],
    ids=lambda raw: ascii(raw[:40]),
)
def test_an_invalid_introduction_counts_as_absent(raw: bytes) -> None:
    assert read_introduction(Raw(raw)) is None


def test_a_peer_without_the_extension_is_plain() -> None:
    assert read_introduction(UNSET) is None
    assert read_heartbeat(UNSET) is None
    assert read_error(UNSET) == InferenceErrorExtension()
    assert read_completion(UNSET) == InferenceCompleteExtension()


def test_unknown_fields_and_features_are_ignored() -> None:
    raw = Raw(b'{"version":7,"features":["cancel"],"mood":{"good":true}}')

    read = read_introduction(raw)

    assert read is not None
    assert read.shoal_features == {ShoalFeature.CANCEL}


def test_a_heartbeat_extension_round_trips() -> None:
    extension = HeartbeatExtension(
        proof="AAAA",
        offers=[],
        draining="rest",
        jobs=2,
        cpu=12.5,
        memory=50.0,
        unfit="hot",
        queued=3,
    )

    assert read_heartbeat(write_extension(extension)) == extension


@pytest.mark.parametrize(
    "raw", [b'{"cpu":101}', b'{"queued":-1}', b'{"jobs":-1}', b'{"draining":1}']
)
def test_an_invalid_heartbeat_extension_counts_as_absent(raw: bytes) -> None:
    assert read_heartbeat(Raw(raw)) is None


@given(
    reason=texts,
    usage=st.none() | st.builds(Usage, st.integers(0, 2**40), st.integers(0, 2**40)),
    output=texts,
    receipt=st.none() | st.builds(SignedReceipt, st.binary(), st.binary()),
)
def test_a_completion_round_trips(
    reason: str, usage: Usage | None, output: str, receipt: SignedReceipt | None
) -> None:
    done = Completed(JOB, LEASE, reason, usage, output=output, receipt=receipt)

    message = decode(
        encode(
            InferenceComplete("id", shoal=write_extension(completion_extension(done)))
        )
    )

    assert isinstance(message, InferenceComplete)
    completion = read_completion(message.shoal)
    assert completion.finish_reason == reason
    assert usage_of(completion.usage) == usage
    assert completion.output == output
    assert receipt_of(completion.receipt) == receipt


def test_an_invalid_completion_is_refused() -> None:
    with pytest.raises(PeerError, match="inferenceComplete"):
        read_completion(Raw(b'{"usage":5}'))


def test_a_long_finish_reason_is_truncated() -> None:
    completion = completion_extension(Completed(JOB, LEASE, "x" * 100))

    assert read_completion(write_extension(completion)).finish_reason == "x" * 64


def test_an_oversized_receipt_is_ignored() -> None:
    assert receipt_of(ReceiptExtension(b"x" * RECEIPT_SIZE_MAX, b"")) is not None
    assert receipt_of(ReceiptExtension(b"x" * RECEIPT_SIZE_MAX, b"y")) is None


@pytest.mark.parametrize("fault", Fault)
def test_a_fault_round_trips(fault: Fault) -> None:
    error = read_error(
        write_extension(error_extension(Failed(JOB, LEASE, "why", fault)))
    )

    assert error.failed
    assert fault_of(error) is fault


def test_a_rejection_is_no_failure() -> None:
    error = read_error(write_extension(error_extension(Rejected(JOB, LEASE, "busy"))))

    assert not error.failed
    assert fault_of(read_error(Raw(b'{"fault":"moon"}'))) is Fault.WORKER
    assert read_error(Raw(b"5")) == InferenceErrorExtension()


@given(st.binary())
def test_readers_accept_any_bytes(data: bytes) -> None:
    for read in (read_introduction, read_heartbeat, read_error):
        read(Raw(data))


def test_a_decoded_extension_does_not_keep_its_message_alive() -> None:
    data = encode(
        InferenceComplete(
            "id", shoal=write_extension(InferenceCompleteExtension(output="x" * 1000))
        )
    )
    message = decode(data)
    assert isinstance(message, InferenceComplete)

    completion = read_completion(message.shoal)

    assert completion.output == "x" * 1000
    assert not isinstance(completion, Raw)
    assert msgspec.json.encode(completion) in data
