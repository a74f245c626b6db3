import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.builders import COORDINATOR, JOB, OUTPUT, VECTORS, WORKER, signed
from shoal.domain.ids import JobId
from shoal.domain.receipts import RECEIPT_SIZE_MAX, SignedReceipt, Verdict
from shoal.ledger.worker_receipts import output_hash_of, verify, verify_output_hash


def verdict_of(receipt: SignedReceipt, **changed: Any) -> Verdict:
    known: dict[str, Any] = {
        "job_id": JOB,
        "public_key": WORKER.public_key,
        "output_json": OUTPUT.encode(),
    }
    return verify(receipt, **(known | changed))


def malformed(body: bytes) -> SignedReceipt:
    return SignedReceipt(body, WORKER.sign(body))


@pytest.mark.parametrize("case", VECTORS["signed"], ids=lambda case: case["id"])
def test_recorded_receipts_are_valid(case: dict[str, Any]) -> None:
    body = case["canonical_receipt"].encode()
    receipt = SignedReceipt(body, base64.b64decode(case["signature_base64"]))
    output = case["canonical_output"].encode()

    verdict = verify(
        receipt,
        job_id=JobId(case["job_id"]),
        public_key=bytes.fromhex(case["public_key_hex"]),
        output_json=output,
    )

    assert verdict is Verdict.VALID
    assert output_hash_of(output) == f"sha256:{case['output_hash']}"


def test_hash_may_have_a_prefix() -> None:
    named = output_hash_of(OUTPUT.encode())

    assert verdict_of(signed(output_hash=named)) is Verdict.VALID
    assert verdict_of(signed(output_hash=named[7:])) is Verdict.VALID


def test_key_may_be_upper_case() -> None:
    receipt = signed(provider_pubkey=WORKER.public_key.hex().upper())

    assert verdict_of(receipt) is Verdict.VALID


def test_unknown_fields_are_signed() -> None:
    assert verdict_of(signed(extra={"n": [1, None]})) is Verdict.VALID


def test_fields_may_have_any_order() -> None:
    fields = json.loads(signed().body)
    body = json.dumps(dict(reversed(fields.items()))).encode()

    assert verdict_of(malformed(body)) is Verdict.VALID


def test_the_signature_may_cover_the_fields_in_order() -> None:
    receipt = signed(extra={"n": [1, None]})
    fields = json.loads(receipt.body)
    in_order = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    assert list(fields) != sorted(fields)

    shown = SignedReceipt(receipt.body, WORKER.sign(in_order.encode()))

    assert verdict_of(shown) is Verdict.VALID
    assert verdict_of(shown, job_id=JobId("job-0")) is Verdict.WRONG_JOB


@pytest.mark.parametrize("number", ["1e400", "9" * 5000, "NaN"])
def test_a_field_without_a_canonical_form_is_verified_as_it_stands(
    number: str,
) -> None:
    body = signed().body[:-1] + b',"n":' + number.encode() + b"}"

    assert verdict_of(malformed(body)) is Verdict.VALID
    assert verdict_of(SignedReceipt(body, bytes(64))) is Verdict.BAD_SIGNATURE


def test_receipt_for_another_job_is_invalid() -> None:
    assert verdict_of(signed(job_id="job-0")) is Verdict.WRONG_JOB


def test_receipt_must_be_signed_by_the_worker_key() -> None:
    assert verdict_of(signed(COORDINATOR)) is Verdict.WRONG_WORKER


def test_receipt_for_another_output_is_invalid() -> None:
    assert verdict_of(signed(), output_json=b"{}") is Verdict.WRONG_OUTPUT
    assert verdict_of(signed(output_hash="sha512:")) is Verdict.WRONG_OUTPUT
    assert verdict_of(signed(output_hash="\u00fc")) is Verdict.WRONG_OUTPUT


@pytest.mark.parametrize("change", ["body", "signature", "length", "nothing"])
def test_wrong_signature_is_invalid(change: str) -> None:
    receipt = signed()
    changed = {
        "body": SignedReceipt(receipt.body + b" ", receipt.signature),
        "signature": SignedReceipt(receipt.body, bytes(64)),
        "length": SignedReceipt(receipt.body, receipt.signature[:63]),
        "nothing": SignedReceipt(receipt.body, b""),
    }

    assert verdict_of(changed[change]) is Verdict.BAD_SIGNATURE


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b'"job_id"',
        b"{}",
        b"\xff\xfe{}",
        signed().body[:-1],
        signed().body.decode().encode("utf-16"),
        signed(job_id=None).body,
        signed(job_id=[JOB]).body,
        signed(provider_pubkey=7).body,
        signed(output_hash={}).body,
        b"[" * 100_000,
        signed(extra=[[]] * 101).body,
        signed(extra="x" * RECEIPT_SIZE_MAX).body,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_unreadable_receipt_is_malformed(body: bytes) -> None:
    assert verdict_of(malformed(body)) is Verdict.MALFORMED


def test_receipt_may_have_the_largest_size() -> None:
    room = RECEIPT_SIZE_MAX - len(signed(extra="").body)

    longest = signed(extra="x" * room)

    assert len(longest.body) == RECEIPT_SIZE_MAX
    assert verdict_of(longest) is Verdict.VALID
    assert verdict_of(signed(extra="x" * (room + 1))) is Verdict.MALFORMED


def test_long_number_is_harmless() -> None:
    body = signed().body[:-1] + b',"n":' + b"9" * 10_000 + b"}"

    assert verdict_of(malformed(body)) is Verdict.VALID


def test_last_of_duplicate_fields_counts() -> None:
    body = b'{"job_id":"other",' + signed().body[1:]

    assert verdict_of(malformed(body)) is Verdict.VALID


@pytest.mark.parametrize("size", [0, 31, 33])
def test_receipt_without_a_worker_key_is_invalid(size: int) -> None:
    assert verdict_of(signed(), public_key=bytes(size)) is Verdict.WRONG_WORKER


@given(st.binary(), st.binary(max_size=70))
def test_arbitrary_bytes_are_malformed(body: bytes, signature: bytes) -> None:
    assert verdict_of(SignedReceipt(body, signature)) is Verdict.MALFORMED


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.none() | st.integers() | st.text() | st.lists(st.text())
            for name in ("job_id", "provider_pubkey", "output_hash", "other")
        },
    )
)
def test_every_receipt_gets_a_verdict(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()

    assert verdict_of(malformed(body)) is not Verdict.VALID


def test_hash_of_the_output_suffices() -> None:
    found = verify_output_hash(
        signed(),
        job_id=JOB,
        public_key=WORKER.public_key,
        output_hash=output_hash_of(OUTPUT.encode()),
    )

    assert found is Verdict.VALID
