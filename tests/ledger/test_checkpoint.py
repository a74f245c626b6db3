import base64
import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from ledger.builders import AT, COORDINATOR, KEY, WORKER
from shoal.domain.errors import InvalidRequest
from shoal.ledger.checkpoint import Checkpoint, make, name_of, verify

ROOT = bytes(range(32))
NOTE = make(COORDINATOR, 7, ROOT, AT)
NAME = name_of(KEY)


def test_a_checkpoint_is_a_signed_note() -> None:
    text, _, signatures = NOTE.partition("\n\n")

    assert f"shoal/{hashlib.sha256(KEY).hexdigest()[:16]}" == NAME
    assert text.split("\n") == [
        NAME,
        "7",
        base64.b64encode(ROOT).decode(),
        "at 2026-02-09T12:00:05.123Z",
    ]
    dash, name, signature = signatures.removesuffix("\n").split(" ")
    assert (dash, name) == ("\u2014", NAME)
    signed = base64.b64decode(signature)
    key_id = hashlib.sha256(NAME.encode() + b"\n\x01" + KEY).digest()[:4]
    assert signed[:4] == key_id
    public_key = Ed25519PublicKey.from_public_bytes(KEY)
    public_key.verify(signed[4:], f"{text}\n".encode())


@given(
    st.integers(0, 10**16 - 1),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 10**13),
)
def test_checkpoint_round_trips(size: int, root: bytes, ms: int) -> None:
    at = ms / 1000

    assert verify(make(COORDINATOR, size, root, at), KEY) == Checkpoint(size, root, at)


def test_checkpoint_of_another_coordinator_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match=f"is of {NAME}, not of shoal/"):
        verify(NOTE, WORKER.public_key)


def test_checkpoint_signed_by_another_key_is_rejected() -> None:
    other = make(WORKER, 7, ROOT, AT).replace(name_of(WORKER.public_key), NAME)

    with pytest.raises(InvalidRequest, match="signed by another key"):
        verify(other, KEY)


@pytest.mark.parametrize(
    ("was", "is_"),
    [("\n7\n", "\n8\n"), ("\nAAEC", "\nBAEC"), ("05.123Z", "05.124Z")],
)
def test_changed_checkpoint_is_rejected(was: str, is_: str) -> None:
    with pytest.raises(InvalidRequest, match="signature is wrong"):
        verify(NOTE.replace(was, is_), KEY)


@pytest.mark.parametrize(
    "note",
    [
        "",
        NOTE[:-1],
        NOTE + "\n",
        NOTE + NOTE.split("\n\n")[1],  # a second signature
        NOTE.replace("\n", "\r\n"),
        NOTE.replace("\n7\n", "\n07\n"),
        NOTE.replace("\n7\n", "\n-7\n"),
        NOTE.replace("\n7\n", f"\n{10**16}\n"),
        NOTE.replace("\n7\n", "\n\u0667\n"),
        NOTE.replace("\nat ", "\nmore\nat "),
        NOTE.replace("\u2014", "-"),
        NOTE.replace("shoal/", "other/"),
    ],
)
def test_malformed_checkpoint_is_rejected(note: str) -> None:
    with pytest.raises(InvalidRequest, match="not in the form"):
        verify(note, KEY)


@pytest.mark.parametrize(
    "note",
    [
        NOTE.replace("Hh8=", "Hh9="),  # surplus bits
        NOTE.replace("02-09T", "02-30T"),
        NOTE.replace("02-09T", "02-09-"),
    ],
)
def test_non_canonical_checkpoint_is_rejected(note: str) -> None:
    assert note != NOTE
    with pytest.raises(InvalidRequest, match="cannot be read"):
        verify(note, KEY)


@given(st.text())
def test_arbitrary_text_is_rejected(text: str) -> None:
    with pytest.raises(InvalidRequest):
        verify(text, KEY)
