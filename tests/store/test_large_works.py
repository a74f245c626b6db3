"""Works in parts: how they are split, and what is read of them."""

import random

import pytest

from shoal.domain.credentials import tokens_to_read
from shoal.domain.errors import StoreError
from shoal.domain.ids import JobId
from shoal.domain.job import Job, JobTerms
from shoal.domain.work import (
    JSON,
    Call,
    Chat,
    Completion,
    Embedding,
    JsonWork,
    Rerank,
    Task,
    Transcription,
    Work,
)
from shoal.store.codec import (
    LARGE_FROM,
    PART_SIZE,
    decode_work,
    encode_work,
    head_of,
    is_large,
    join_parts,
    split_work,
)
from shoal.store.packing import unpack

NOISE = random.Random(0).randbytes(3 * PART_SIZE // 2).hex()  # hard to compress


def chat(content: JSON) -> Chat:
    return Chat("m", ({"role": "user", "content": content},))


def images(count: int, size: int) -> list[JSON]:
    url = "x" * size
    return [{"type": "image_url", "image_url": {"url": url}} for _ in range(count)]


def job(work: Work, form: str = "") -> Job:
    return Job(JobId("j"), work, terms=JobTerms(form=form))


@pytest.mark.parametrize("text", [NOISE, "é🦦 " * PART_SIZE], ids=["noise", "words"])
def test_works_of_every_size_are_joined_as_they_were(text: str) -> None:
    for size in (1, 1000, LARGE_FROM, PART_SIZE, 2 * PART_SIZE + 1, len(text)):
        work = chat(text[-size:])

        split = split_work(work, JobTerms(form="é"))

        assert split.row is not None
        head = head_of(split.row)
        if head is None:
            assert not split.parts
            assert len(split.row) < LARGE_FROM
            stored = split.row
        else:
            assert head.tokens == tokens_to_read(work)
            assert max(map(len, split.parts)) <= PART_SIZE
            stored = join_parts(head, split.parts)
        assert decode_work("chat", stored) == (work, {"form": "é"})


def test_text_that_becomes_small_stays_in_the_row() -> None:
    split = split_work(chat("to be or not to be " * 10_000))

    assert head_of(split.row) is None
    assert split.row is not None
    assert len(unpack(split.row)) > 2 * LARGE_FROM


def test_call_without_a_form_has_no_row() -> None:
    assert split_work(None).row is None
    assert split_work(None, JobTerms(form="form")).row is not None


@pytest.mark.parametrize("stored", [None, b'{"work":null}', b"", b"\x01x", b"{}"])
def test_row_with_the_work_itself_has_no_head(stored: bytes | None) -> None:
    assert head_of(stored) is None


def test_missing_part_is_an_error() -> None:
    split = split_work(chat(NOISE))
    head = head_of(split.row)
    assert head is not None

    with pytest.raises(StoreError, match=f"has {head.parts - 1} of its {head.parts}"):
        join_parts(head, split.parts[1:])


@pytest.mark.parametrize(
    "work",
    [
        chat("x" * LARGE_FROM),
        chat(images(100, 700)),
        Chat("m", ({"role": "user", "content": "x"},) * 40_000),
        Chat("m", (), options={"tools": ["x" * LARGE_FROM]}),
        Completion("m", "x" * LARGE_FROM),
        Completion("m", [[1] * LARGE_FROM]),
        Embedding("m", ("x" * 700,) * 100),
        Rerank("m", "q", ("x" * 700,) * 100),
        Transcription("m", "x" * LARGE_FROM, "wav"),
        Task("t", {"input": {"deep": ["x" * LARGE_FROM]}}),
    ],
)
def test_large_work_is_recognized(work: JsonWork) -> None:
    assert is_large(job(work))
    encoded = encode_work(work)
    assert encoded is not None
    assert len(encoded) >= LARGE_FROM


def test_long_texts_of_terms_count() -> None:
    assert is_large(job(Task("t", 1), form="x" * LARGE_FROM))
    fields = JobTerms(api_fields="x" * LARGE_FROM)
    assert is_large(Job(JobId("j"), Task("t"), terms=fields))


@pytest.mark.parametrize(
    "work",
    [
        chat("x" * (LARGE_FROM // 2)),
        chat(None),
        Completion("m", [1, 2.5, True]),
        Embedding("m", ()),
        Task("t"),
        Call("f", bytes(LARGE_FROM), b"\x80"),  # stored apart
    ],
)
def test_other_work_is_not_large(work: Work) -> None:
    assert not is_large(job(work))
