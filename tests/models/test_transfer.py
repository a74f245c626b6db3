"""Validation of incoming models."""

import re

import pytest

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.domain.model_messages import ModelChunk, ModelDone
from shoal.models.staging import FILES_MAX, FileWrite, IncomingModel

ID = "550e8400-e29b-41d4-a716-446655440000"


def incoming(size: int | None = 8) -> IncomingModel:
    return IncomingModel(ID, "org/name", size)


def chunk(file_name: str, offset: int, data: bytes) -> ModelChunk:
    return ModelChunk(ID, file_name, offset, data)


DONE = ModelDone(ID, "org/name")


def test_chunks_are_written_at_their_offsets() -> None:
    model = incoming()

    writes = [
        model.add_chunk(chunk("a", 0, b"AAAA")),
        model.add_chunk(chunk("b", 0, b"BB")),
        model.add_chunk(chunk("a", 4, b"CC")),
    ]
    model.complete(DONE)

    assert writes == [
        FileWrite("a", 0, b"AAAA"),
        FileWrite("b", 0, b"BB"),
        FileWrite("a", 4, b"CC"),
    ]


@pytest.mark.parametrize(
    ("offset", "defect"), [(100, "gap"), (0, "repeated"), (2, "overlapping")]
)
def test_misplaced_chunks_are_rejected(offset: int, defect: str) -> None:
    model = incoming(size=None)
    model.add_chunk(chunk("a", 0, b"AAAA"))

    with pytest.raises(PeerError, match=f"a: chunk at {offset}, expected 4"):
        model.add_chunk(chunk("a", offset, b"BBBB"))


def test_file_must_begin_at_offset_0() -> None:
    with pytest.raises(PeerError, match="a: chunk at 4, expected 0"):
        incoming().add_chunk(chunk("a", 4, b"AAAA"))


def test_model_without_a_size_has_a_limit() -> None:
    model = IncomingModel(ID, "org/name", None, unannounced_max=5_000_000_000)
    model.received = 4_999_999_999
    model.add_chunk(chunk("a", 0, b"1"))

    with pytest.raises(PeerError, match=r"than 5 GB: .*raise --unannounced-max"):
        model.add_chunk(chunk("a", 1, b"2"))


def test_excess_data_is_rejected() -> None:
    model = incoming(size=8)
    model.add_chunk(chunk("a", 0, b"12345678"))

    with pytest.raises(LimitExceeded, match="of 9 bytes exceeds the limit of 8"):
        model.add_chunk(chunk("b", 0, b"9"))


def test_missing_data_is_not_complete() -> None:
    model = incoming(size=8)
    model.add_chunk(chunk("a", 0, b"1234567"))

    with pytest.raises(PeerError, match="ended after 7 of 8 bytes"):
        model.complete(DONE)


def test_empty_transfer_is_no_model() -> None:
    with pytest.raises(PeerError, match="without any file"):
        incoming(size=None).complete(DONE)


def test_completion_of_another_model_is_rejected() -> None:
    model = incoming(size=1)
    model.add_chunk(chunk("a", 0, b"1"))

    with pytest.raises(PeerError, match=re.escape("'../x'; expected")):
        model.complete(ModelDone(ID, "../x"))


def test_unsafe_name_is_rejected_before_any_write() -> None:
    model = incoming()

    with pytest.raises(PeerError, match=re.escape("'../x' is not a valid name")):
        model.add_chunk(chunk("../x", 0, b"1"))

    assert (model.received, model.files) == (0, 0)


def test_names_that_differ_only_in_case_are_rejected() -> None:
    model = incoming()
    model.add_chunk(chunk("Model", 0, b"1"))

    with pytest.raises(PeerError, match="model differs from Model only in case"):
        model.add_chunk(chunk("model", 0, b"2"))


def test_repeated_empty_file_is_rejected() -> None:
    model = incoming()
    model.add_chunk(chunk("empty", 0, b""))

    with pytest.raises(PeerError, match="empty: an empty chunk at 0"):
        model.add_chunk(chunk("empty", 0, b""))


def test_number_of_files_is_limited() -> None:
    model = incoming()
    for number in range(FILES_MAX):
        model.add_chunk(chunk(f"file{number}", 0, b""))

    with pytest.raises(PeerError, match=f"more than {FILES_MAX} files"):
        model.add_chunk(chunk("another", 0, b""))


def test_transfer_id_is_case_insensitive() -> None:
    assert incoming().belongs(ModelDone(ID.upper(), "org/name"))
    assert not incoming().belongs(ModelDone("another", "org/name"))
