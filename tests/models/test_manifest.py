"""Manifests, whether honest or hostile."""

import string
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.manifests import entry, manifest_of
from shoal.domain.errors import InvalidRequest, PeerError
from shoal.models import manifest
from shoal.models.manifest import (
    CHUNK,
    CHUNKS_MAX,
    FILES_MAX,
    FileEntry,
    Manifest,
    decode,
    parse_address,
)

EMPTY = sha256(b"").digest()
CONTENT = {"a.json": b"{}", "b.bin": bytes(CHUNK) + b"!", "empty": b""}

portable = st.text(string.ascii_letters + string.digits + "._-", min_size=1)


def encoded(*files: FileEntry) -> bytes:
    return Manifest(files).encoded


def test_a_manifest_survives_the_wire_and_names_its_chunks() -> None:
    made = manifest_of(CONTENT)

    got = decode(made.encoded)

    assert got == made
    assert (got.size, got.chunks) == (CHUNK + 3, 3)
    assert [got.place(each) for each in range(3)] == [
        (0, 0, 2),
        (1, 0, CHUNK),
        (1, CHUNK, 1),
    ]
    assert [*got.places()] == [(each, got.place(each)) for each in range(3)]
    assert got.has_hash(2, b"!")
    assert not got.has_hash(2, b"?")
    assert parse_address(got.address) == sha256(made.encoded).digest()


@given(
    st.dictionaries(
        st.sampled_from("abcdefg"), st.integers(0, 3 * CHUNK), min_size=1, max_size=7
    )
)
def test_the_chunks_of_a_manifest_cover_each_file_once(sizes: dict[str, int]) -> None:
    files = []
    for name in sorted(sizes):
        hashes = bytes(-(-sizes[name] // CHUNK) * 32)
        files.append(FileEntry(name, sizes[name], EMPTY, hashes))
    made = decode(encoded(*files))

    covered = dict.fromkeys(sizes, 0)
    for chunk, place in made.places():
        assert made.place(chunk) == place
        name = files[place.file].name
        assert place.offset == covered[name]
        assert 0 < place.size <= CHUNK
        covered[name] += place.size
    assert covered == sizes


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "..", "/etc/passwd", "a/b", "a\\b", "C:x", "CON", "nul.txt", "a\0b"),
        *("", ".hidden", "a ", "a.", "é", "a\n", "x" * 201, "-rf", "com1"),
    ],
)
def test_a_hostile_name_is_refused(name: str) -> None:
    with pytest.raises(PeerError, match="is not a valid name of a model's file"):
        decode(encoded(FileEntry(name, 0, EMPTY, b"")))


@given(st.text(max_size=30) | portable)
def test_accepted_names_stay_in_their_folder_on_every_system(name: str) -> None:
    try:
        decode(encoded(FileEntry(name, 0, EMPTY, b"")))
    except PeerError:
        return
    assert not set(name) - set(string.ascii_letters + string.digits + "._+@=-")
    assert name[0] not in ".-"
    assert name[-1] != "."
    stem = name.partition(".")[0].upper()
    assert stem not in {"CON", "PRN", "AUX", "NUL", "COM1", "LPT1"}


HOSTILE = {
    "10 TB": (encoded(FileEntry("x", 10**13, EMPTY, b"")), "more than 1099511627776"),
    "negative": (encoded(FileEntry("x", -1, EMPTY, b"")), "a size of -1 bytes"),
    "hashes": (encoded(FileEntry("x", 1, EMPTY, bytes(31))), "31 bytes of hashes"),
    "more hashes": (encoded(FileEntry("x", 0, EMPTY, bytes(32))), "expected 0"),
    "digest": (encoded(FileEntry("x", 0, b"", b"")), "bytes of hashes"),
    "case": (encoded(entry("A", b""), entry("a", b"")), "differs from A only in case"),
    "repeated": (encoded(entry("a", b""), entry("a", b"")), "are repeated"),
    "order": (encoded(entry("b", b""), entry("a", b"")), "not in order"),
    "no file": (encoded(), "of 0 files"),
    "files": (
        encoded(*(entry(f"{n:04}", b"") for n in range(FILES_MAX + 1))),
        "of 1001 files",
    ),
    "another form": (manifest_of(CONTENT).encoded + b"\0", "not a manifest"),
    "text": (b'[["a",0,"",""]]', "not a manifest"),
    "two forms": (
        msgspec.msgpack.encode([["x", 0, EMPTY, b"", "more"]]),
        "not encoded in its only form",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_refused_with_a_reason(case: str) -> None:
    data, why = HOSTILE[case]

    with pytest.raises(PeerError, match=why):
        decode(data)


def test_sizes_are_summed_before_hashes_are_needed() -> None:
    half = CHUNKS_MAX // 2 * CHUNK + 1
    files = [FileEntry(name, half, EMPTY, b"") for name in "ab"]

    with pytest.raises(PeerError, match="expected 16777248"):
        decode(encoded(*files))


def test_a_large_manifest_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "ENCODED_MAX", 10)

    with pytest.raises(PeerError, match="exceeds 10"):
        decode(bytes(11))


@given(st.binary(max_size=200))
def test_other_bytes_are_no_manifest(data: bytes) -> None:
    with pytest.raises(PeerError):
        decode(data)


@given(st.data())
def test_a_manifest_with_one_other_byte_is_another_model_or_none(
    data: st.DataObject,
) -> None:
    made = manifest_of(CONTENT)
    at = data.draw(st.integers(0, len(made.encoded) - 1))
    bit = data.draw(st.integers(0, 7))
    changed = bytearray(made.encoded)
    changed[at] ^= 1 << bit

    try:
        got = decode(bytes(changed))
    except PeerError:
        return
    assert got.root != made.root


@pytest.mark.parametrize(
    "text", ["", "sha256:", "md5:" + "0" * 64, "sha256:" + "g" * 64]
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="expected sha256: and 64"):
        parse_address(text)
