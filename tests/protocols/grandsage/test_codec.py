"""Frames of text."""

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.grandsage.recorded import NOW, joined, run
from protocols.pairs import CHAT
from protocols.session_pair import sent
from shoal.domain.vocabulary import AnswerChunk, Completed
from shoal.protocols.grandsage.codec import (
    TASK_ID,
    decode_frame,
    encode_end,
    encode_text,
)
from shoal.protocols.seam.json_text import well_formed


@given(text=st.text(), places=st.lists(st.integers(0, 1000)))
def test_text_split_at_any_byte_is_the_same_text(text: str, places: list[int]) -> None:
    session = joined()
    (task,) = sent(session.send(run(CHAT), NOW))
    task_id = decode_id(task)
    data = text.encode()
    ends = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})

    outputs = [
        output
        for start, end in pairwise(ends)
        for output in session.receive([TASK_ID.pack(task_id) + data[start:end]], NOW)
    ]
    outputs += session.receive([encode_end(task_id)], NOW)

    *pieces, end_event = outputs
    said = [p for p in pieces if isinstance(p, AnswerChunk)]
    assert len(said) == len(pieces)
    assert "".join(map(str, chain.from_iterable(p.pieces for p in said))) == text
    assert all(all(p.pieces) for p in said)
    assert isinstance(end_event, Completed)


@given(data=st.binary(), places=st.lists(st.integers(0, 1000)))
def test_bytes_split_anywhere_decode_as_the_whole_does(
    data: bytes, places: list[int]
) -> None:
    ends = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})

    text, tail = "", b""
    for start, end in pairwise(ends):
        piece, tail = decode_frame(tail + data[start:end])
        assert len(tail) <= 3
        text += piece

    assert text + tail.decode(errors="replace") == data.decode(errors="replace")


FRAME_MAX = 1 << 14  # instead of 1 MiB


@pytest.mark.parametrize("character", ["a", "é", "日", "😀", "\ud800"])
@pytest.mark.parametrize("length", [FRAME_MAX // 4, FRAME_MAX - 4, FRAME_MAX * 2])
def test_long_text_is_split_into_frames_below_the_limit(
    character: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.protocols.grandsage.codec.FRAME_MAX", FRAME_MAX)

    frames = encode_text(7, character * length)

    assert all(4 < len(frame) < FRAME_MAX for frame in frames)
    text = b"".join(frame[4:] for frame in frames).decode()
    assert text == well_formed(character) * length


def test_empty_text_makes_no_frame() -> None:
    assert encode_text(7, "") == []
    assert encode_end(7) == b"\0\0\0\x07"


def decode_id(task: str | bytes) -> int:
    assert isinstance(task, str)
    return int(task.split('"id":')[1].split(",")[0])
