import json
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from ledger.builders import OUTPUT, WORKER, claims, signed, unsigned
from shoal.domain.errors import InvalidRequest
from shoal.domain.ids import JobId
from shoal.domain.job import Job, JobTerms
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.domain.work import Call, Chat, Work
from shoal.ledger.merkle import EMPTY_ROOT
from shoal.ledger.receipts import Claims, Receipt, body, has_receipt, read
from shoal.ledger.worker_receipts import output_hash_of

ROOT = bytes(range(32))

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
MANY = st.integers(0, 2**53 - 1)
SIGNED = st.builds(SignedReceipt, st.binary(), st.binary())
CLAIMS = st.builds(
    lambda price, fee, **rest: Claims(price=price, fee=min(fee, price), **rest),
    job_id=TEXTS.map(JobId),
    worker=TEXTS,
    worker_key=st.none() | st.binary(min_size=32, max_size=32).map(bytes.hex),
    output_hash=st.binary().map(output_hash_of),
    prompt_tokens=st.none() | MANY,
    completion_tokens=st.none() | MANY,
    price=MANY,
    fee=MANY,
    payment_ref=st.none() | TEXTS,
    at=st.just("2026-02-09T12:00:05.000Z"),
    verdict=st.sampled_from(Verdict),
    worker_receipt=st.none() | SIGNED,
    shards=st.lists(TEXTS, max_size=3).map(tuple),
)


def test_receipt_has_all_fields() -> None:
    written = json.loads(body(claims(), 5, ROOT))

    assert written == {
        "type": "shoal/receipt",
        "version": 1,
        "job_id": "job-1",
        "worker": "w-1",
        "worker_key": WORKER.public_key.hex(),
        "output_hash": output_hash_of(OUTPUT.encode()),
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "price": 10_000,
        "fee": 500,
        "payment_ref": None,
        "at": "2026-02-09T12:00:05.000Z",
        "verdict": "valid",
        "worker_receipt": {
            "body": signed().body.decode(),
            "signature": written["worker_receipt"]["signature"],
        },
        "checkpoint": {
            "size": 5,
            "root": "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
        },
    }


@pytest.mark.parametrize(
    ("work", "price", "kept", "has"),
    [
        (Chat("m", ()), 0, True, True),
        (Chat("m", ()), 1, True, True),
        (Chat("m", ()), 1, False, False),
        (Call("f", b"\x90", b"\x80"), 0, True, False),
        (Call("f", b"\x90", b"\x80"), 1, True, True),
        (Call("f", b"\x90", b"\x80"), 1, False, False),
    ],
)
def test_kept_jobs_have_receipts_but_for_free_calls(
    work: Work, price: int, kept: bool, has: bool
) -> None:
    job = Job(JobId("j"), work, terms=JobTerms(price=price, kept=kept))

    assert has_receipt(job) is has


def test_receipt_of_a_wire_without_receipts_is_unsigned() -> None:
    written = json.loads(body(unsigned(), 0, EMPTY_ROOT))

    assert written["verdict"] == "unsigned"
    assert written["worker_receipt"] is None
    assert written["worker_key"] is None


def test_binary_worker_receipt_is_preserved() -> None:
    odd = SignedReceipt(b"\xff\x00", b"short")
    given = claims(worker_receipt=odd, verdict=Verdict.MALFORMED)

    written = body(given, 0, EMPTY_ROOT)

    inside = json.loads(written)["worker_receipt"]
    assert inside == {"body_base64": "/wA=", "signature": "c2hvcnQ="}
    assert read(written).claims.worker_receipt == odd


@given(CLAIMS, MANY, st.binary(min_size=32, max_size=32))
def test_receipt_is_canonical_and_round_trips(
    given: Claims, size: int, root: bytes
) -> None:
    written = body(given, size, root)

    assert rfc8785.dumps(json.loads(written)) == written
    assert read(written) == Receipt(given, size, root)


def test_surrogates_do_not_prevent_a_receipt() -> None:
    given = claims(job_id=JobId("\ud800"), worker="a\udc00", payment_ref="\udfff")

    found = read(body(given, 0, EMPTY_ROOT)).claims

    assert (found.job_id, found.worker, found.payment_ref) == (
        "\ufffd",
        "a\ufffd",
        "\ufffd",
    )


@pytest.mark.parametrize("key", ["", "android_seeker_18f", "ab", "g" * 64])
def test_invalid_key_is_omitted(key: str) -> None:
    assert read(body(claims(worker_key=key), 0, EMPTY_ROOT)).claims.worker_key is None


def changed(**fields: Any) -> bytes:
    return rfc8785.dumps(json.loads(body(claims(), 5, ROOT)) | fields)


def without(name: str) -> bytes:
    fields = json.loads(body(claims(), 5, ROOT))
    del fields[name]
    return rfc8785.dumps(fields)


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"checkpoint":' * 100_000,
        without("verdict"),
        without("worker_receipt"),
        without("checkpoint"),
        changed(extra=1),
        changed(type="shoal/bundle"),
        changed(version=2),
        changed(version=True),
        changed(job_id=None),
        changed(worker_key="A" * 64),
        changed(worker_key=""),
        changed(output_hash="a" * 64),
        changed(output_hash="sha256:" + "A" * 64),
        changed(prompt_tokens=-1),
        changed(completion_tokens=1.5),
        changed(price=-1),
        changed(price=499),
        changed(fee=True),
        changed(payment_ref=7),
        changed(at="2026-02-09"),
        changed(at="2026-02-30T12:00:05.000Z"),
        changed(verdict="VALID"),
        changed(verdict="good"),
        changed(verdict="\u00df"),
        changed(worker_receipt={}),
        changed(worker_receipt={"signature": ""}),
        changed(worker_receipt={"body": "", "signature": "A"}),
        changed(worker_receipt={"body": "", "body_base64": "", "signature": ""}),
        changed(worker_receipt={"body_base64": "e30=", "signature": ""}),
        changed(worker_receipt={"body_base64": "/x==", "signature": ""}),
        changed(checkpoint={"size": -1, "root": "A" * 43 + "="}),
        changed(checkpoint={"size": 1, "root": "AAAA"}),
        changed(checkpoint={"size": 1, "root": ""}),
        body(claims(), 5, ROOT) + b"\n",
        b" " + body(claims(), 5, ROOT),
        body(claims(), 5, ROOT).replace(b'"fee":500', b'"fee":500,"fee":500'),
        body(claims(), 5, ROOT).replace(b'"fee":500', b'"fee":5e2'),
        body(claims(), 5, ROOT).replace(b'"size":5', b'"size":9007199254740993'),
        body(claims(), 5, ROOT).replace(b'"size":5', b'"size":' + b"9" * 5000),
        body(claims(), 5, ROOT).replace(b"job-1", b"job\\u002d1"),
        json.dumps(json.loads(body(claims(), 5, ROOT))).encode(),
    ],
    ids=lambda written: repr(written[:40]),
)
def test_non_canonical_receipt_is_rejected(written: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"the receipt cannot be read: .+"):
        read(written)


@given(st.binary())
def test_arbitrary_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read(data)
