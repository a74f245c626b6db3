"""What a worker signs, made and read."""

import json
from datetime import datetime

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from harness.profiles import examples
from protocols.dispatch.recorded import Case, each_of_kind
from shoal.domain.errors import PeerError
from shoal.domain.receipts import RECEIPT_SIZE_MAX, SignedReceipt
from shoal.ledger.canonical import encode
from shoal.ledger.keys import Signer, public_key_of, verify
from shoal.protocols.dispatch.ecmascript_json import canonical
from shoal.protocols.dispatch.messages import ReceiptSubmit
from shoal.protocols.dispatch.receipts import (
    UNREADABLE,
    hash_of,
    read_bundled,
    read_submitted,
    sign,
    signature_of,
)

BODY = (
    b'{"job_id":"j","provider_pubkey":"p","output_hash":"h","completed_at":"t",'
    b'"payment_ref":null}'
)


@each_of_kind("receipt_sign")
def test_receipts_say_what_those_of_real_workers_say(case: Case) -> None:
    signer = Signer.from_seed(bytes.fromhex(case["seed_hex"]))
    at = datetime.fromisoformat(case["completed_at"]).timestamp()
    output = canonical(case["output_json_text"])

    body, signature = sign(
        case["job_id"], signer.public_key, hash_of(output), at, signer.sign
    )

    assert signer.public_key.hex() == case["public_key_hex"]
    said = json.loads(case["canonical_receipt"])
    assert said["output_hash"] == case["output_hash"]
    said["output_hash"] = f"sha256:{case['output_hash']}"  # as in the document
    assert json.loads(body) == said
    assert verify(signer.public_key, signature_of(signature), body)


def test_a_receipt_is_canonical_in_both_readings_of_the_word() -> None:
    signer = Signer.from_seed(bytes(32))

    body, _ = sign("é", signer.public_key, hash_of(b"{}"), 0.0, signer.sign)

    assert body == canonical(body)  # the keys as they stand
    assert body == encode(json.loads(body))  # the keys sorted


@each_of_kind("receipt_sign")
def test_separate_receipts_are_decoded_as_they_were_signed(case: Case) -> None:
    message = msgspec.json.decode(case["receipt_submit_text"], type=ReceiptSubmit)

    job_id, receipt = read_submitted(message)

    assert job_id == case["job_id"]
    assert receipt.body.decode() == case["canonical_receipt"]
    assert verify(
        bytes.fromhex(case["public_key_hex"]), receipt.signature, receipt.body
    )


# What the original's decoder takes, and a strict one does not.
STRICTER = {"verify-sig-base64url-nopad", "verify-sig-base64-newlines"}


@each_of_kind("receipt_verify")
def test_decoded_receipts_verify_as_recorded(case: Case) -> None:
    receipt = read_bundled(
        Raw(case["receipt_json_text"].encode()),
        Raw(json.dumps(case["signature"]).encode()),
    )

    found = False
    key = public_key_of(case["public_key"])
    if receipt is not None and key is not None:
        found = verify(key, receipt.signature, receipt.body)
    if case["id"] in STRICTER:
        assert not found
    else:
        assert found == case.get("recommended", case["upstream_verified"])


@pytest.mark.parametrize(
    ("receipt", "signature"),
    [(b"null", b'"AA=="'), (BODY, b"null"), (BODY, b'""')],
)
def test_a_receipt_without_its_signature_is_none(
    receipt: bytes, signature: bytes
) -> None:
    assert read_bundled(Raw(receipt), Raw(signature)) is None


@pytest.mark.parametrize(
    ("receipt", "signature"),
    [
        (b'"text"', b'"AA=="'),
        (b"[]", b'"AA=="'),
        (b"5", b'"AA=="'),
        (BODY, b"5"),
        (BODY, b'{"a":1}'),
        (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", b'"AA=="'),
        (b'{"a":"' + b"x" * RECEIPT_SIZE_MAX + b'"}', b'"AA=="'),
    ],
)
def test_a_malformed_receipt_is_marked_unreadable(
    receipt: bytes, signature: bytes
) -> None:
    assert read_bundled(Raw(receipt), Raw(signature)) is UNREADABLE


@settings(max_examples=examples(0.4))
@given(
    body=st.dictionaries(st.text(max_size=9), st.text(max_size=9) | st.integers())
    | st.just(json.loads(BODY)),
    indent=st.none() | st.just(1),
    ascii_=st.booleans(),
)
def test_receipts_are_decoded_in_javascripts_form(
    body: dict[str, object], indent: int | None, ascii_: bool
) -> None:
    text = json.dumps(body, indent=indent, ensure_ascii=ascii_).encode()

    assert read_bundled(Raw(text), Raw(b'"AA=="')) == SignedReceipt(
        canonical(text), b"\0"
    )


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ('{"provider_pubkey":"p"}', "job_id"),
        (BODY.decode().replace('"j"', "null"), "job_id"),
        (BODY.decode().replace('"j"', '""'), "job_id"),
        (BODY.decode().replace('"j"', '"' + "j" * 257 + '"'), "job_id"),
        (BODY.decode().replace('"p"', "5"), "provider_pubkey"),
        (BODY.decode().replace('"h"', "[]"), "output_hash"),
        (BODY.decode().replace('"t"', "{}"), "completed_at"),
        (BODY.decode().replace("null", "1"), "payment_ref"),
        (BODY.decode().replace('"j"', '"\\ud800"'), "half a character"),
        ("[]", "expected an object"),
        ('{"a":"' + "x" * RECEIPT_SIZE_MAX + '"}', "exceeds"),
    ],
)
def test_a_separate_receipt_has_all_fields(changed: str, fault: str) -> None:
    with pytest.raises(PeerError, match=fault):
        read_submitted(ReceiptSubmit(Raw(changed.encode()), "AA=="))


@pytest.mark.parametrize(
    ("text", "signature"),
    [
        ("AAEC", b"\0\1\2"),
        ("AAE=", b"\0\1"),
        ("AAE", b"\0\1"),
        ("AA", b"\0"),
        ("A", b""),
        ("AB", b""),
        ("AAF=", b""),
        ("AA-_", b""),
        ("AA EC", b""),
        ("AAEC\n", b""),
        ("AAE==", b""),
        ("", b""),
        ("é", b""),
        ("A" * 200, b""),
    ],
)
def test_base64_is_decoded_strictly(text: str, signature: bytes) -> None:
    assert signature_of(text) == signature
