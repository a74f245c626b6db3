"""A job's text on its way from workers to whoever asked."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import JobError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.work import Outcome
from shoal.runtime.answer import (
    ANSWER_MAX,
    JOIN_ABOVE,
    SLOW_AFTER,
    UNREAD_CEILING,
    UNREAD_MAX,
    Answer,
    Slow,
    Spoilt,
)
from simulation import virtual

ONE, TWO = LeaseNumber(1), LeaseNumber(2)
WHOLE = "The fish, übrigens: 😀."
SPLITS = range(len(WHOLE) + 1)


def begun(*pieces: str, read: bool = True) -> Answer:
    """Return an answer of which a first worker has written something."""
    answer = Answer(JobId("j"))
    answer.grant(ONE, continues=False)
    for piece in pieces:
        answer.put(piece, 0.0)
    if read:
        assert read_now(answer) == list(pieces)
    return answer


def read_now(answer: Answer) -> list[str]:
    """Read what is there, without waiting."""

    async def read() -> list[str]:
        return await answer.read()

    return virtual.run(read())


def pieces_of(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def test_text_is_read_once_and_kept_whole() -> None:
    answer = begun("one ", "two ")
    answer.put("three", 0.0)

    assert read_now(answer) == ["three"]
    assert answer.text == "one two three"


def test_only_the_first_text_of_a_lease_is_the_first() -> None:
    answer = begun(read=False)

    assert [answer.put(text, 0.0) for text in "abc"] == [True, False, False]
    answer.grant(TWO, continues=True)
    assert [answer.put(text, 0.0) for text in "def"] == [True, False, False]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("at", SPLITS)
def test_beginning_is_dropped_wherever_the_first_worker_was_lost(
    at: int, size: int
) -> None:
    answer = begun(*([WHOLE[:at]] if at else []), read=False)
    given = read_now(answer) if at else []

    answer.grant(TWO, continues=False)
    for piece in pieces_of(WHOLE, size):
        answer.put(piece, 1.0)
    answer.check_whole()

    rest = read_now(answer) if at < len(WHOLE) else []
    assert "".join(given + rest) == WHOLE == answer.text


@pytest.mark.parametrize("at", SPLITS)
def test_worker_that_continues_just_adds(at: int) -> None:
    answer = begun(*([WHOLE[:at]] if at else []), read=False)
    given = read_now(answer) if at else []

    answer.grant(TWO, continues=True)
    if at < len(WHOLE):
        answer.put(WHOLE[at:], 1.0)
    answer.check_whole()

    rest = read_now(answer) if at < len(WHOLE) else []
    assert "".join(given + rest) == WHOLE


@given(st.data())
def test_asker_sees_the_text_once_however_often_workers_are_lost(
    data: st.DataObject,
) -> None:
    text = data.draw(st.text(min_size=1, max_size=40))
    answer = Answer(JobId("j"))
    seen = ""

    for lease in range(1, data.draw(st.integers(1, 4)) + 1):
        continues = data.draw(st.booleans())
        at = len(answer.text) if continues else 0
        answer.grant(LeaseNumber(lease), continues=continues)
        end = data.draw(st.integers(at, len(text)))
        while at < end:
            step = data.draw(st.integers(1, end - at))
            before = len(answer.text)
            answer.put(text[at : at + step], 0.0)
            at += step
            if len(answer.text) > before and data.draw(st.booleans()):
                seen += "".join(read_now(answer))
    answer.grant(LeaseNumber(9), continues=False)
    answer.put(text, 0.0)
    answer.check_whole()
    answer.finish(Outcome(text))

    assert seen + "".join(read_now(answer)) == text == answer.text


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("at", range(5))
def test_worker_that_takes_over_with_another_text_spoils_the_answer(
    at: int, size: int
) -> None:
    answer = begun("abcde")
    answer.grant(TWO, continues=False)
    other = "abcde"[:at] + "X" + "abcde"[at + 1 :] + " and so on"

    def take_over() -> None:
        for piece in pieces_of(other, size):
            answer.put(piece, 1.0)

    with pytest.raises(Spoilt, match="another answer") as caught:
        take_over()

    assert caught.value.lost


@pytest.mark.parametrize("shorter", ["", "a", "abcd"])
def test_worker_that_ends_before_the_lost_one_had_been_spoils_the_answer(
    shorter: str,
) -> None:
    answer = begun("abcde")
    answer.grant(TWO, continues=False)
    if shorter:
        answer.put(shorter, 1.0)

    with pytest.raises(Spoilt, match="ended before") as caught:
        answer.check_whole()

    assert caught.value.lost


def test_answer_that_nobody_has_seen_may_begin_anew() -> None:
    answer = begun("a first draft", read=False)

    answer.grant(TWO, continues=False)
    answer.put("another", 1.0)

    answer.check_whole()
    assert read_now(answer) == ["another"]
    assert answer.text == "another"


def test_repeating_a_long_answer_in_small_pieces_costs_no_square() -> None:
    # If each piece cost a copy of the rest, this would take minutes.
    long = "0123456789" * 400_000
    answer = begun(long)
    answer.grant(TWO, continues=False)

    for piece in pieces_of(long + "!", 4):
        answer.put(piece, 1.0)

    assert read_now(answer) == ["!"]


def test_too_long_an_answer_is_spoilt() -> None:
    answer = Answer(JobId("j"), attended=False)
    answer.grant(ONE, continues=False)
    answer.put("x" * ANSWER_MAX, 0.0)

    with pytest.raises(Spoilt, match="exceeds the limit") as caught:
        answer.put("x", 0.0)

    assert not caught.value.lost


def test_much_unread_text_is_borne_for_a_while() -> None:
    answer = begun("x" * (UNREAD_MAX + 1), read=False)

    answer.put("y", SLOW_AFTER)

    with pytest.raises(Slow, match="characters unread"):
        answer.put("z", SLOW_AFTER + 0.1)


def test_reading_ends_the_patience_that_had_begun() -> None:
    answer = begun("x" * (UNREAD_MAX + 1), read=False)
    read_now(answer)

    answer.put("y" * (UNREAD_MAX + 1), SLOW_AFTER + 1.0)
    answer.put("z", 2 * SLOW_AFTER)


def test_far_too_much_unread_text_is_too_slow_at_once() -> None:
    answer = begun("x" * UNREAD_CEILING, read=False)

    with pytest.raises(Slow):
        answer.put("x", 0.0)


def test_unread_text_below_the_limit_is_held_for_ever() -> None:
    answer = begun("x" * UNREAD_MAX, read=False)

    answer.put("", 1e9)

    assert "".join(read_now(answer)) == "x" * UNREAD_MAX


def test_many_unread_pieces_are_joined() -> None:
    pieces = [f"{number} " for number in range(3 * JOIN_ABOVE)]
    answer = begun(*pieces, read=False)

    read = read_now(answer)

    assert "".join(read) == "".join(pieces)
    assert len(read) <= JOIN_ABOVE


def test_nobody_reads_and_nothing_is_held_unread() -> None:
    answer = Answer(JobId("j"), attended=False)
    answer.grant(ONE, continues=False)

    for _ in range(20):
        answer.put("x" * UNREAD_MAX, 0.0)

    assert len(answer.text) == 20 * UNREAD_MAX


async def test_reader_waits_for_text_and_for_the_end() -> None:
    answer = begun(read=False)
    reading = asyncio.ensure_future(answer.read())
    await asyncio.sleep(0)
    assert not reading.done()

    answer.put("a", 0.0)
    assert await reading == ["a"]
    ending = asyncio.ensure_future(answer.read())
    await asyncio.sleep(0)
    answer.finish(Outcome("a"))

    assert await ending == []
    assert await answer.read() == []
    assert await answer.outcome() == Outcome("a")


async def test_outcome_waits_past_all_text() -> None:
    answer = begun("a", read=False)
    waiting = asyncio.ensure_future(answer.outcome())
    await asyncio.sleep(0)
    answer.put("b", 0.0)
    await asyncio.sleep(0)
    assert not waiting.done()

    answer.finish(Outcome("ab", "length"))

    assert await waiting == Outcome("ab", "length")


async def test_text_before_the_end_can_still_be_read_after_it() -> None:
    answer = begun("a", read=False)
    answer.fail(JobError("boom"))

    assert await answer.read() == ["a"]
    assert await answer.read() == []
    with pytest.raises(JobError, match="boom"):
        await answer.outcome()


async def test_first_end_counts() -> None:
    answer = begun(read=False)
    assert not answer.ended

    answer.finish(Outcome("whole"))
    answer.fail(JobError("too late"))

    assert answer.ended
    assert await answer.outcome() == Outcome("whole")


async def test_reader_that_was_cancelled_may_read_again() -> None:
    answer = begun(read=False)
    reading = asyncio.ensure_future(answer.read())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.sleep(0)

    answer.put("a", 0.0)

    assert await answer.read() == ["a"]
