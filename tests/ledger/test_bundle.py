from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ledger.builders import (
    AT,
    COORDINATOR,
    KEY,
    OUTPUT,
    WORKER,
    Log,
    bundle_holds,
    claims,
    grown,
    second_holds,
    signed,
    unsigned,
)
from shoal.domain.errors import InvalidRequest
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.ledger import checkpoint, merkle, receipts
from shoal.ledger.bundle import ReceiptBundle, read, verify, write
from shoal.ledger.receipts import Claims
from shoal.ledger.verification import FILE_MAX, StepResult, VerificationStep

ALL = [
    VerificationStep.FORM,
    VerificationStep.KEY,
    VerificationStep.SIGNATURE,
    VerificationStep.RECEIPT,
    VerificationStep.CHECKPOINT,
    VerificationStep.LOGGED,
    VerificationStep.OUTPUT,
    VerificationStep.WORKER,
]


def of(*batch: Claims) -> ReceiptBundle:
    """Return the first receipt's bundle."""
    log = Log()
    log.add(*batch)
    return log.bundle()


def last(bundle: ReceiptBundle, key: bytes = KEY) -> StepResult:
    """Return the last verification step; both verifiers must agree."""
    checks = verify(write(bundle), key)
    assert second_holds(write(bundle), key) is checks[-1].ok
    return checks[-1]


def forged(given: Claims, index: int = 0, **changed: Any) -> ReceiptBundle:
    """Return the bundle of a dishonest coordinator."""
    named = changed.pop("checkpoint_size", 0)
    body = changed.pop("body", None) or receipts.body(given, named, merkle.EMPTY_ROOT)
    hash = merkle.leaf_hash(body)
    fields: dict[str, Any] = {
        "coordinator_key": KEY.hex(),
        "receipt": body.decode(),
        "signature": COORDINATOR.sign(receipts.PREFIX + body),
        "index": index,
        "path": (),
        "checkpoint": checkpoint.make(COORDINATOR, 1, hash, AT),
        "output": OUTPUT,
    }
    return ReceiptBundle(**(fields | changed))


def test_bundle_round_trips() -> None:
    bundle = grown(5).bundle(3, None)

    assert read(write(bundle)) == bundle


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 20])
def test_every_receipt_verifies_with_nothing_but_the_key(size: int) -> None:
    log = grown(size)
    for index in range(size):
        data = write(log.bundle(index))

        assert [check.step for check in verify(data, KEY)] == ALL
        assert bundle_holds(data)
        assert second_holds(data)


def test_output_is_optional() -> None:
    data = write(grown(3).bundle(output=None))

    steps = [check.step for check in verify(data, KEY)]

    assert steps == [step for step in ALL if step is not VerificationStep.OUTPUT]
    assert bundle_holds(data)
    assert second_holds(data)


@pytest.mark.parametrize(
    ("verdict", "receipt"),
    [
        (Verdict.VALID, signed()),
        (Verdict.MISSING, None),
        (Verdict.MALFORMED, SignedReceipt(b"\xff", b"")),
        (Verdict.MALFORMED, SignedReceipt(b"{}", b"")),
        (Verdict.WRONG_JOB, signed(job_id="other")),
        (Verdict.WRONG_WORKER, signed(COORDINATOR)),
        (Verdict.WRONG_OUTPUT, signed(output="{}")),
        (Verdict.BAD_SIGNATURE, SignedReceipt(signed().body, bytes(64))),
    ],
)
def test_worker_receipt_is_verified_again(
    verdict: Verdict, receipt: SignedReceipt | None
) -> None:
    said = of(claims(verdict=verdict, worker_receipt=receipt), unsigned())

    assert last(said) == StepResult(VerificationStep.WORKER)


def test_invalid_receipt_called_valid_is_detected() -> None:
    bad = SignedReceipt(signed().body, bytes(64))

    check = last(of(claims(worker_receipt=bad)))

    assert check.step is VerificationStep.WORKER
    assert check.problem is not None
    assert check.problem.startswith("the signature is not the worker's, but")


def test_missing_receipt_called_valid_is_detected() -> None:
    assert last(of(claims(worker_receipt=None))).step is VerificationStep.WORKER
    assert last(of(claims(worker_key=None))).step is VerificationStep.WORKER


def test_valid_receipt_called_invalid_is_detected() -> None:
    data = write(of(claims(verdict=Verdict.BAD_SIGNATURE)))

    assert verify(data, KEY)[-1].step is VerificationStep.WORKER
    assert not bundle_holds(data)


def test_receipt_of_a_worker_without_a_key_is_nobody_s() -> None:
    nobody = signed(provider_pubkey="none")
    given = claims(worker_key=None, worker_receipt=nobody, verdict=Verdict.WRONG_WORKER)

    assert last(of(given)).ok
    assert last(of(structs.replace(given, verdict=Verdict.VALID))).problem is not None


def test_bundle_of_another_coordinator_is_rejected() -> None:
    check = last(grown(2).bundle(), WORKER.public_key)

    assert check == StepResult(
        VerificationStep.KEY,
        f"the file names {KEY.hex()}, the given key is {WORKER.public_key.hex()}",
    )


def test_key_in_the_file_is_not_trusted() -> None:
    log = Log(WORKER)
    log.add(claims())
    bundle = replace(log.bundle(), coordinator_key=KEY.hex())

    assert last(bundle).step is VerificationStep.SIGNATURE


def test_signature_of_other_data_is_rejected() -> None:
    body = receipts.body(claims(), 0, merkle.EMPTY_ROOT)

    assert last(forged(claims(), signature=COORDINATOR.sign(body))).step is (
        VerificationStep.SIGNATURE
    )


def test_malformed_signed_receipt_is_rejected() -> None:
    body = b'{"type":"shoal/other"}'

    assert last(forged(claims(), body=body)).step is VerificationStep.RECEIPT


def test_checkpoint_of_another_coordinator_is_rejected() -> None:
    log = grown(2)
    note = checkpoint.make(WORKER, 2, bytes(32), AT)

    assert (
        last(replace(log.bundle(), checkpoint=note)).step is VerificationStep.CHECKPOINT
    )


def test_receipt_beyond_the_log_is_rejected() -> None:
    log = grown(3)
    older = replace(log.bundle(2), checkpoint=log.notes[2])

    assert last(older).step is VerificationStep.LOGGED


@pytest.mark.parametrize("index", [-1, 0, 2, 3, 2**53 - 1])
def test_receipt_at_a_wrong_index_is_rejected(index: int) -> None:
    assert (
        last(replace(grown(3).bundle(1), index=index)).step is VerificationStep.LOGGED
    )


def test_receipt_before_its_checkpoint_is_rejected() -> None:
    check = last(forged(claims(), checkpoint_size=1))

    assert check == StepResult(
        VerificationStep.LOGGED, "receipt 0 claims to follow a checkpoint of 1 receipts"
    )


def test_different_output_is_rejected() -> None:
    assert last(replace(grown(2).bundle(), output="{}")).step is VerificationStep.OUTPUT
    assert last(replace(grown(2).bundle(), output="")).step is VerificationStep.OUTPUT


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null\n",
        b"{}\n",
        b"\xff",
        b"[" * 100_000,
        write(grown(2).bundle())[:-1],
        write(grown(2).bundle()) + b"\n",
        b" " + write(grown(2).bundle()),
        write(grown(2).bundle()).replace(b'"index":0', b'"index":0.0'),
        write(grown(2).bundle()).replace(b'"index":0', b'"index":-0'),
        write(grown(2).bundle()).replace(b'"index":0', b'"index":0,"more":1'),
        write(grown(2).bundle()).replace(b'"version":1', b'"version":2'),
        write(grown(2).bundle()).replace(b"shoal/bundle", b"shoal/growth"),
        write(grown(2).bundle()).replace(b"/", b"\\/"),
    ],
    ids=lambda data: repr(data[:30]),
)
def test_non_canonical_bundle_is_rejected(data: bytes) -> None:
    (check,) = verify(data, KEY)

    assert check.step is VerificationStep.FORM
    assert check.problem is not None
    assert check.problem.startswith("the file cannot be read: ")


def test_oversized_file_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match=f"the limit is {FILE_MAX}"):
        read(b" " * (FILE_MAX + 1))


def test_file_may_have_the_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = write(of(claims()))
    monkeypatch.setattr("shoal.ledger.verification.FILE_MAX", len(largest))

    assert write(read(largest)) == largest


@given(st.binary(), st.binary(max_size=40))
def test_arbitrary_bytes_and_keys_only_fail(data: bytes, key: bytes) -> None:
    assert not bundle_holds(data, key)


@pytest.mark.parametrize("key", [b"", b"short", bytes(33), bytes([1]) + bytes(31)])
def test_invalid_key_verifies_nothing(key: bytes) -> None:
    bundle = replace(grown(2).bundle(), coordinator_key=key.hex())

    assert not bundle_holds(write(bundle), key)
