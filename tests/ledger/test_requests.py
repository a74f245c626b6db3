"""The bytes of requests that receipts hash, and their salts."""

import hashlib
import hmac
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ledger.builders import (
    COORDINATOR,
    JOB,
    KEY,
    OUTPUT,
    WORKER,
    Log,
    bundle_holds,
    claims,
    second_holds,
    second_steps,
)
from shoal.domain.errors import InvalidRequest
from shoal.domain.ids import JobId
from shoal.domain.work import (
    JSON,
    Call,
    CallStream,
    Chat,
    Completion,
    Embedding,
    Feature,
    ModelAction,
    ModelOrder,
    Rerank,
    Task,
    Transcription,
    Work,
)
from shoal.ledger import bundle, receipts
from shoal.ledger.bundle import ReceiptBundle, SaltedRequest
from shoal.ledger.canonical import encode_any
from shoal.ledger.merkle import EMPTY_ROOT
from shoal.ledger.requests import SALT_SIZE, request_hash_of, request_of, request_salt
from shoal.ledger.verification import VerificationStep
from shoal.store.codec import decode_work, encode_work

HI: tuple[dict[str, JSON], ...] = ({"role": "user", "content": "hi"},)
CHAT = Chat("m", HI, 9, 0.5, {"seed": 1})
SALT = request_salt(COORDINATOR, JOB)
NUL = hashlib.sha256(b"").hexdigest()

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
NAMES = st.sampled_from(["a", "role", "\u20ac", "\U0001f600", "\ufb33"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2)
    ),
    max_leaves=3,
)
CHATS = st.builds(
    Chat,
    TEXTS,
    st.lists(st.dictionaries(NAMES, VALUES, max_size=2), max_size=2).map(tuple),
    st.none() | st.integers(1, 10**6),
    st.none() | st.floats(0, 2),
    st.dictionaries(NAMES, VALUES, max_size=2),
)


# What is hashed.


@pytest.mark.parametrize(
    ("work", "request_"),
    [
        (Chat("m", ()), {"kind": "chat", "model": "m", "messages": []}),
        (
            CHAT,
            {"kind": "chat", "model": "m", "messages": [*HI], "max_tokens": 9,
             "temperature": 0.5, "options": {"seed": 1}},
        ),
        (
            Completion("m", "a", None, 0.0),
            {"kind": "completion", "model": "m", "prompt": "a", "temperature": 0},
        ),
        (
            Embedding("m", ("a", "b"), {"dimensions": 2}),
            {"kind": "embedding", "model": "m", "inputs": ["a", "b"],
             "options": {"dimensions": 2}},
        ),
        (
            Rerank("m", "q", ("a",)),
            {"kind": "rerank", "model": "m", "query": "q", "documents": ["a"]},
        ),
        (
            Transcription("m", "AA==", "wav", {"language": "de"}),
            {"kind": "transcription", "model": "m", "audio": "AA==", "format": "wav",
             "options": {"language": "de"}},
        ),
        (Task("t", {"a": 1}), {"kind": "task", "name": "t", "payload": {"a": 1}}),
        (Task("t"), {"kind": "task", "name": "t"}),
        (
            Call("f", b"", b""),
            {"kind": "call", "name": "f", "args": f"sha256:{NUL}",
             "kwargs": f"sha256:{NUL}"},
        ),
        (
            Call("f", b"", b"", 2.5, frozenset({Feature.VALUES, Feature.CODE}),
                 (b"\1\2",), "3.12"),
            {"kind": "call", "name": "f", "args": f"sha256:{NUL}",
             "kwargs": f"sha256:{NUL}", "timeout": 2.5, "needs": ["code", "values"],
             "blobs": ["sha256:0102"], "python": "3.12"},
        ),
        (CallStream("f"), {"kind": "call_stream", "name": "f"}),
        (
            CallStream("f", 1.0, frozenset({Feature.CODE}), "3.12"),
            {"kind": "call_stream", "name": "f", "timeout": 1, "needs": ["code"],
             "python": "3.12"},
        ),
        (
            ModelOrder(ModelAction.LOAD, "m", "anna", 4096, 2),
            {"kind": "model", "action": "load", "name": "m", "machine": "anna",
             "context": 4096, "slots": 2},
        ),
    ],
)  # fmt: skip
def test_request_has_what_was_asked_and_nothing_else(
    work: Work, request_: dict[str, Any]
) -> None:
    assert request_of(work) == rfc8785.dumps(request_)


@given(CHATS)
def test_request_is_canonical_and_the_same_from_the_store(chat: Chat) -> None:
    written = request_of(chat)
    read = json.loads(written, parse_int=float)

    assert rfc8785.dumps(read) == written
    assert read == json.loads(
        encode_any(
            {
                "kind": "chat",
                "model": chat.model,
                "messages": [*chat.messages],
                **({} if chat.max_tokens is None else {"max_tokens": chat.max_tokens}),
                **(
                    {}
                    if chat.temperature is None
                    else {"temperature": chat.temperature}
                ),
                **({"options": chat.options} if chat.options else {}),
            }
        ),
        parse_int=float,
    )
    stored = encode_work(chat)
    assert stored is not None
    work, _ = decode_work("chat", stored)
    assert work is not None
    assert request_of(work) == written


def test_other_requests_have_other_hashes() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"model": "n"},
        {"messages": HI * 2},
        {"messages": ({"role": "user", "content": "hi "},)},
        {"max_tokens": 8},
        {"max_tokens": None},
        {"temperature": 0.0},
        {"temperature": None},
        {"options": {"seed": 2}},
        {"options": {}},
    ]

    hashes = {
        request_hash_of(SALT, request_of(structs.replace(CHAT, **each)))
        for each in changes
    }

    assert len(hashes) == len(changes)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (2**53, b'"9007199254740992"'),
        (-(2**53), b'"-9007199254740992"'),
        (2**53 - 1, b"9007199254740991"),
        ([2**53 - 1, 2**53], b'[9007199254740991,"9007199254740992"]'),
        (True, b"true"),
        (math.nan, b"null"),
        (-math.inf, b"null"),
        ("a\ud800", '"a\ufffd"'.encode()),
        ({"\ud800": [2**53]}, '{"\ufffd":["9007199254740992"]}'.encode()),
        (MappingProxyType({"b": 1.5, "a": (1, 2.0)}), b'{"a":[1,2],"b":1.5}'),
        ([{"a": [0.1, {"\u20ac": 1e21}]}], '[{"a":[0.1,{"\u20ac":1e+21}]}]'.encode()),
    ],
)
def test_what_has_no_canonical_form_is_replaced(value: JSON, written: bytes) -> None:
    assert encode_any(value) == written


# Salts.


def test_salt_follows_from_the_coordinators_seed_and_the_job() -> None:
    purpose = b"shoal request salt v1\njob-1"

    assert hmac.digest(b"c" * 32, purpose, "sha256")[:SALT_SIZE] == SALT
    assert request_salt(COORDINATOR, JobId("job-2")) != SALT
    assert request_salt(WORKER, JOB) != SALT


def test_hash_is_of_the_salt_and_the_request() -> None:
    request = request_of(CHAT)

    digest = hashlib.sha256(SALT + request).hexdigest()

    assert request_hash_of(SALT, request) == f"sha256:{digest}"


# Receipts.


def asked(work: Work = CHAT) -> str:
    return request_hash_of(SALT, request_of(work))


def test_receipt_with_a_request_has_another_version() -> None:
    first = json.loads(receipts.body(claims(), 5, EMPTY_ROOT))
    second = json.loads(receipts.body(claims(request_hash=asked()), 5, EMPTY_ROOT))

    assert second == first | {"version": 2, "request_hash": asked()}
    assert first["version"] == 1


@pytest.mark.parametrize("request_hash", [None, asked()])
def test_receipts_of_both_versions_are_read(request_hash: str | None) -> None:
    given = claims(request_hash=request_hash)

    assert receipts.read(receipts.body(given, 5, EMPTY_ROOT)).claims == given


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 1},
        {"version": 3},
        {"request_hash": None},
        {"request_hash": asked()[:-1]},
        {"request_hash": asked().upper()},
        {"request_hash": asked() + "0"},
        {"request_hash": asked().removeprefix("sha256:")},
        {"request_hash": 1},
    ],
)
def test_receipt_in_another_form_is_refused(changed: dict[str, Any]) -> None:
    fields = json.loads(receipts.body(claims(request_hash=asked()), 5, EMPTY_ROOT))

    with pytest.raises(InvalidRequest):
        receipts.read(rfc8785.dumps(fields | changed))


def test_receipt_of_the_second_version_has_its_request() -> None:
    fields = json.loads(receipts.body(claims(), 5, EMPTY_ROOT))

    with pytest.raises(InvalidRequest, match="canonical"):
        receipts.read(rfc8785.dumps(fields | {"version": 2}))


# Bundles.


def proof(
    request: SaltedRequest | None = None, *, named: str | None = None
) -> ReceiptBundle:
    log = Log()
    log.add(claims(request_hash=named or asked()))
    made = log.bundle(0, OUTPUT)
    return made if request is None else replace(made, request=request)


WITH_TEXT = SaltedRequest(SALT, request_of(CHAT).decode())


def problem_of(
    file: ReceiptBundle, readings: list[bytes] | None = None
) -> tuple[VerificationStep, str | None]:
    """Return the last step, and what was wrong with it."""
    *rest, last = bundle.verify(bundle.write(file), KEY, readings)
    assert all(step.ok for step in rest)
    return last.step, last.problem


def test_bundle_without_a_request_is_as_before() -> None:
    data = bundle.write(proof())

    assert b'"request"' not in data
    assert bundle.read(data) == proof()
    assert bundle_holds(data)
    assert second_holds(data)


def test_bundle_with_a_request_verifies_it() -> None:
    data = bundle.write(proof(WITH_TEXT))

    assert bundle.read(data) == proof(WITH_TEXT)
    steps = [each.step for each in bundle.verify(data, KEY)]
    assert steps[-2:] == [VerificationStep.REQUEST, VerificationStep.WORKER]
    assert bundle_holds(data)
    assert "the request matches the receipt" in second_steps(data)
    assert second_holds(data)


@pytest.mark.parametrize(
    "request_",
    [
        SaltedRequest(bytes(SALT_SIZE), request_of(CHAT).decode()),
        SaltedRequest(SALT, request_of(structs.replace(CHAT, max_tokens=8)).decode()),
        SaltedRequest(SALT, request_of(CHAT).decode() + " "),
        SaltedRequest(SALT, ""),
    ],
)
def test_another_request_in_a_bundle_fails(request_: SaltedRequest) -> None:
    file = proof(request_)

    assert problem_of(file) == (
        VerificationStep.REQUEST,
        f"the receipt names {asked()}, and the request in the file is another",
    )
    assert not second_holds(bundle.write(file))


@pytest.mark.parametrize("request_", [WITH_TEXT, SaltedRequest(SALT)])
def test_given_request_is_verified_with_the_salt(request_: SaltedRequest) -> None:
    other = request_of(structs.replace(CHAT, model="other"))
    file = proof(request_)

    assert problem_of(file, [other, request_of(CHAT)]) == (
        VerificationStep.WORKER,
        None,
    )
    for readings in ([], [other]):
        assert problem_of(file, readings) == (
            VerificationStep.REQUEST,
            f"the receipt names {asked()}, and the given request is another",
        )


def test_given_request_cannot_be_verified_without_the_salt() -> None:
    assert problem_of(proof(), [request_of(CHAT)]) == (
        VerificationStep.REQUEST,
        "the file lacks the salt of the request: export it with the request",
    )


def test_receipt_of_an_earlier_version_names_no_request() -> None:
    log = Log()
    log.add(claims())
    old = log.bundle(0, OUTPUT)

    assert bundle_holds(bundle.write(old))
    for file in (old, replace(old, request=WITH_TEXT)):
        assert problem_of(file, [request_of(CHAT)]) == (
            VerificationStep.REQUEST,
            "the receipt is of an earlier version, which names no request",
        )
    assert not second_holds(bundle.write(replace(old, request=WITH_TEXT)))


def test_salt_alone_is_no_step() -> None:
    data = bundle.write(proof(SaltedRequest(SALT)))

    steps = [each.step for each in bundle.verify(data, KEY)]
    assert VerificationStep.REQUEST not in steps
    assert bundle_holds(data)
    assert second_holds(data)


def flips(data: bytes) -> Iterator[bytes]:
    """Yield a bundle with each byte of what is about its request changed.

    ``test_bit_flips`` does so with the others.
    """
    # The hash, its name, and the version are in the receipt.
    for name, size in ((b"request_hash", 90), (b"version", 14), (b'"request":', 0)):
        begin = data.index(name)
        end = begin + size if size else data.index(b"}", data.index(b"salt")) + 1
        for at in range(begin, end):
            changed = bytearray(data)
            changed[at] ^= 1 << at % 8
            yield bytes(changed)


def test_every_changed_byte_of_a_request_is_detected() -> None:
    data = bundle.write(proof(WITH_TEXT))

    for changed in flips(data):
        assert not bundle_holds(changed), changed
        assert not second_holds(changed), changed


def test_every_changed_byte_is_detected_with_the_request_at_hand() -> None:
    data = bundle.write(proof(SaltedRequest(SALT)))
    readings = [request_of(CHAT)]

    for changed in flips(data):
        steps = bundle.verify(changed, KEY, readings)
        assert not all(each.ok for each in steps), changed
