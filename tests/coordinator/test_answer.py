"""Answers: the text from workers to clients."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from shoal.coordinator.answer import (
    ANSWER_MAX,
    TOKENS_MAX,
    Answer,
    ReaderTooSlow,
    UnusableOutput,
)
from shoal.coordinator.answer_reader import (
    DELTA_COST,
    JOIN_AT,
    SLOW_SECONDS,
    UNREAD_CEILING,
    UNREAD_MAX,
    AnswerCursor,
)
from shoal.domain.errors import Cancelled, JobError
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import AnswerPiece, Choice, Delta, Outcome, Usage
from shoal.domain.work import Chat
from shoal.pool.context_limits import text_max
from simulation import virtual

ONE, TWO, THREE = LeaseNumber(1), LeaseNumber(2), LeaseNumber(3)
A, B = WorkerId("a"), WorkerId("b")
WHOLE = "The fish, übrigens: 😀."
SPLITS = range(len(WHOLE) + 1)


def partial_answer(
    *pieces: AnswerPiece, read: bool = True
) -> tuple[Answer, AnswerCursor]:
    """Return an answer with output of a first worker, and a reader."""
    answer = Answer(JobId("j"))
    reading = answer.open_reader()
    answer.grant(ONE, A, continues=False)
    for piece in pieces:
        answer.append([piece], 0.0)
    if read:
        assert read_now(reading) == list(pieces)
    return answer, reading


def read_now(reading: AnswerCursor) -> list[AnswerPiece]:
    """Read the available pieces without waiting."""
    return virtual.run(reading.read())


def text_now(reading: AnswerCursor) -> str:
    return "".join(map(str, read_now(reading)))


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def test_text_is_read_once_and_kept_in_full() -> None:
    answer, reading = partial_answer("one ", "two ")
    answer.append(["three"], 0.0)

    assert read_now(reading) == ["three"]
    assert answer.text == "one two three"


def test_only_the_first_text_of_a_lease_is_first_output() -> None:
    answer, _ = partial_answer(read=False)

    assert [answer.append([text], 0.0) for text in "abc"] == [True, False, False]
    answer.grant(TWO, B, continues=True)
    assert [answer.append([text], 0.0) for text in "def"] == [True, False, False]


def test_repeated_beginning_is_dropped_at_any_split(
    subtests: pytest.Subtests,
) -> None:
    for at in SPLITS:
        for size in [1, 3, 1000]:
            with subtests.test(at=at, size=size):
                answer, reading = partial_answer(
                    *([WHOLE[:at]] if at else []), read=False
                )
                given = text_now(reading) if at else ""

                assert answer.grant(TWO, B, continues=False) == ""
                for piece in cut(WHOLE, size):
                    answer.append([piece], 1.0)
                answer.check_complete()

                rest = text_now(reading) if at < len(WHOLE) else ""
                assert given + rest == WHOLE == answer.text


def test_continuing_worker_appends(subtests: pytest.Subtests) -> None:
    for at in SPLITS:
        with subtests.test(at=at):
            answer, reading = partial_answer(*([WHOLE[:at]] if at else []), read=False)
            given = text_now(reading) if at else ""

            assert answer.grant(TWO, B, continues=True) == WHOLE[:at]
            if at < len(WHOLE):
                answer.append([WHOLE[at:]], 1.0)
            answer.check_complete()

            rest = text_now(reading) if at < len(WHOLE) else ""
            assert given + rest == WHOLE


@settings(max_examples=examples(0.4))
@given(st.data())
def test_reader_sees_the_text_once_despite_many_losses(
    data: st.DataObject,
) -> None:
    text = data.draw(st.text(min_size=1, max_size=40))
    answer = Answer(JobId("j"))
    reading = answer.open_reader()
    seen = ""

    for lease in range(1, data.draw(st.integers(1, 4)) + 1):
        continues = data.draw(st.booleans())
        at = len(answer.text) if continues else 0
        answer.grant(LeaseNumber(lease), A, continues=continues)
        end = data.draw(st.integers(at, len(text)))
        while at < end:
            step = data.draw(st.integers(1, end - at))
            before = len(answer.text)
            answer.append([text[at : at + step]], 0.0)
            at += step
            if len(answer.text) > before and data.draw(st.booleans()):
                seen += text_now(reading)
    answer.grant(LeaseNumber(9), B, continues=False)
    answer.append([text], 0.0)
    answer.check_complete()
    answer.finish(Outcome(text))

    assert seen + text_now(reading) == text == answer.text


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("at", range(5))
def test_different_text_after_a_takeover_fails_the_answer(at: int, size: int) -> None:
    answer, _ = partial_answer("abcde")
    answer.grant(TWO, B, continues=False)
    other = "abcde"[:at] + "X" + "abcde"[at + 1 :] + " and so on"

    def take_over() -> None:
        for piece in cut(other, size):
            answer.append([piece], 1.0)

    with pytest.raises(UnusableOutput, match="took over differs") as caught:
        take_over()

    assert caught.value.lost


@pytest.mark.parametrize("shorter", ["", "a", "abcd"])
def test_shorter_text_after_a_takeover_fails_the_answer(
    shorter: str,
) -> None:
    answer, _ = partial_answer("abcde")
    answer.grant(TWO, B, continues=False)
    if shorter:
        answer.append([shorter], 1.0)

    with pytest.raises(UnusableOutput, match="ended its answer before") as caught:
        answer.check_complete()

    assert caught.value.lost


@pytest.mark.parametrize("continues", [True, False])
def test_answer_goes_on_after_a_beginning_read_elsewhere(
    continues: bool, subtests: pytest.Subtests
) -> None:
    for at in SPLITS:
        with subtests.test(at=at):
            answer = Answer(JobId("j"))
            answer.seed([WHOLE[:at]], 0.0)
            reading = answer.open_reader(after=[WHOLE[:at]])

            beginning = answer.grant(TWO, B, continues=continues)
            assert beginning == (WHOLE[:at] if continues else "")
            answer.append(cut(WHOLE[len(beginning) :], 3), 1.0)
            answer.finish(Outcome(WHOLE))

            assert text_now(reading) == WHOLE[at:]
            assert answer.text == WHOLE


def test_answer_that_was_begun_elsewhere_does_not_restart() -> None:
    answer = Answer(JobId("j"))
    answer.grant(ONE, A, continues=False)
    answer.append(["The ", "fish"], 0.0)
    reading = answer.open_reader(after=["The "])

    answer.grant(TWO, B, continues=False)
    answer.append(["The ", "fish", " swims"], 1.0)

    assert text_now(reading) == "fish swims"


def test_unread_answer_may_restart() -> None:
    answer, reading = partial_answer("a first draft", read=False)

    answer.grant(TWO, B, continues=False)
    answer.append(["another"], 1.0)

    answer.check_complete()
    assert read_now(reading) == ["another"]
    assert answer.text == "another"


def test_cost_of_a_repeated_answer_is_linear() -> None:
    # If each piece cost a copy of the rest, this would take minutes.
    long = "0123456789" * 700_000
    answer, reading = partial_answer(long)
    answer.grant(TWO, B, continues=False)

    for piece in cut(long + "!", 35):
        answer.append([piece], 1.0)

    assert read_now(reading) == ["!"]


def test_overlong_answer_fails() -> None:
    answer = Answer(JobId("j"))
    answer.grant(ONE, A, continues=False)
    answer.append(["x" * ANSWER_MAX], 0.0)

    with pytest.raises(UnusableOutput, match="exceeds the limit") as caught:
        answer.append(["x"], 0.0)

    assert not caught.value.lost


def test_answer_far_beyond_its_limit_of_tokens_fails() -> None:
    answer = Answer(JobId("j"), text_max=text_max(Chat("m", (), max_tokens=10)))
    answer.grant(ONE, A, continues=False)
    logprobs = {"content": "x" * 90_000}
    answer.append(["word " * 13_000, Delta(0, {}, logprobs=logprobs)], 0.0)

    with pytest.raises(UnusableOutput, match="far beyond max_tokens") as caught:
        answer.append([Delta(0, {"reasoning_content": "word " * 1000})], 0.0)

    assert not caught.value.lost


@pytest.mark.parametrize(
    ("said", "believed"), [(-1, 0), (7, 7), (2**53, TOKENS_MAX), (10**30, TOKENS_MAX)]
)
def test_implausible_usage_is_replaced(said: int, believed: int) -> None:
    outcome = Answer(JobId("j")).assemble("stop", Usage(said, said))

    assert outcome.usage == Usage(believed, believed)


def test_much_unread_text_is_tolerated_for_a_while() -> None:
    answer, _ = partial_answer("x" * (UNREAD_MAX + 1), read=False)

    answer.append(["y"], SLOW_SECONDS)

    with pytest.raises(ReaderTooSlow):
        answer.append(["z"], SLOW_SECONDS + 0.1)


def test_reading_resets_the_unread_timeout() -> None:
    answer, reading = partial_answer("x" * (UNREAD_MAX + 1), read=False)
    read_now(reading)

    answer.append(["y" * (UNREAD_MAX + 1)], SLOW_SECONDS + 1.0)
    answer.append(["z"], 2 * SLOW_SECONDS)


def test_excessive_unread_text_fails_at_once() -> None:
    answer, _ = partial_answer("x" * UNREAD_CEILING, read=False)

    with pytest.raises(ReaderTooSlow):
        answer.append(["x"], 0.0)


def test_unread_text_below_the_limit_never_times_out() -> None:
    answer, reading = partial_answer("x" * UNREAD_MAX, read=False)

    answer.append([""], 1e9)

    assert text_now(reading) == "x" * UNREAD_MAX


def test_many_unread_pieces_are_joined() -> None:
    pieces = [f"{number} " for number in range(3 * JOIN_AT)]
    _, reading = partial_answer(*pieces, read=False)

    read = read_now(reading)

    assert "".join(map(str, read)) == "".join(pieces)
    assert len(read) <= JOIN_AT


def test_answer_completes_without_a_reader() -> None:
    answer = Answer(JobId("j"))
    answer.grant(ONE, A, continues=False)

    for _ in range(20):
        answer.append(["x" * UNREAD_MAX], 0.0)

    assert len(answer.text) == 20 * UNREAD_MAX


async def test_reader_waits_for_text_and_for_the_end() -> None:
    answer, reading = partial_answer(read=False)
    waiting = asyncio.ensure_future(reading.read())
    await asyncio.sleep(0)
    assert not waiting.done()

    answer.append(["a"], 0.0)
    assert await waiting == ["a"]
    ending = asyncio.ensure_future(reading.read())
    await asyncio.sleep(0)
    answer.finish(Outcome("a"))

    assert await ending == []
    assert await reading.read() == []
    assert await reading.outcome() == Outcome("a")


async def test_outcome_follows_all_text() -> None:
    answer, reading = partial_answer("a", read=False)
    waiting = asyncio.ensure_future(reading.outcome())
    await asyncio.sleep(0)
    answer.append(["b"], 0.0)
    await asyncio.sleep(0)
    assert not waiting.done()

    answer.finish(Outcome("ab", "length"))

    assert await waiting == Outcome("ab", "length")


async def test_text_is_readable_after_the_end() -> None:
    answer, reading = partial_answer("a", read=False)
    answer.finish(JobError("boom"))

    assert await reading.read() == ["a"]
    assert await reading.read() == []
    with pytest.raises(JobError, match="boom"):
        await reading.outcome()


async def test_first_end_counts() -> None:
    answer, reading = partial_answer(read=False)
    assert answer.end is None

    answer.finish(Outcome("whole"))
    answer.finish(JobError("too late"))

    assert answer.end is not None
    assert await reading.outcome() == Outcome("whole")


async def test_cancelled_reader_can_read_again() -> None:
    answer, reading = partial_answer(read=False)
    waiting = asyncio.ensure_future(reading.read())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)

    answer.append(["a"], 0.0)

    assert await reading.read() == ["a"]


# Structured answers.

CALL = Delta(0, {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]})


def test_deltas_are_read_and_put_together_in_order() -> None:
    answer, reading = partial_answer("Let me see. ", read=False)
    answer.append([CALL], 0.0)
    answer.append(["So."], 0.0)

    assert read_now(reading) == ["Let me see. ", CALL, "So."]
    (choice,) = answer.assemble("stop", None).choices
    assert choice.fields["content"] == "Let me see. So."
    assert choice.fields["tool_calls"]


def test_unread_deltas_may_restart() -> None:
    answer, reading = partial_answer("text", CALL, read=False)

    assert answer.grant(TWO, B, continues=True) == ""
    answer.append(["another"], 1.0)

    assert read_now(reading) == ["another"]
    assert answer.assemble("stop", None) == Outcome("another")


@pytest.mark.parametrize("continues", [True, False])
def test_read_deltas_cannot_be_taken_over(continues: bool) -> None:
    answer, _ = partial_answer("text", CALL)

    with pytest.raises(UnusableOutput, match="more than text") as caught:
        answer.grant(TWO, B, continues=continues)

    assert caught.value.lost


def test_delta_instead_of_repeated_text_is_a_different_answer() -> None:
    answer, _ = partial_answer("text")
    answer.grant(TWO, B, continues=False)

    with pytest.raises(UnusableOutput, match="took over differs"):
        answer.append([CALL], 1.0)


def test_waiting_for_the_outcome_reads_nothing() -> None:
    async def scenario() -> Outcome:
        answer = Answer(JobId("j"))
        answer.grant(ONE, A, continues=False)
        waiting = asyncio.ensure_future(answer.open_reader().outcome())
        await asyncio.sleep(0)
        answer.append([CALL], 0.0)
        answer.grant(TWO, B, continues=False)
        answer.append(["whole"], 1.0)
        answer.finish(answer.assemble("stop", None))
        return await waiting

    assert virtual.run(scenario()) == Outcome("whole")


def test_endless_empty_deltas_are_an_overlong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.coordinator.answer.ANSWER_MAX", 100 * DELTA_COST)
    answer = Answer(JobId("j"))
    answer.grant(ONE, A, continues=False)

    def write() -> None:
        for _ in range(101):
            answer.append([Delta()], 0.0)

    with pytest.raises(UnusableOutput, match="exceeds the limit"):
        write()


def test_size_counts_text_and_not_memory() -> None:
    answer, _ = partial_answer("text", Delta(0, {"content": "more"}), read=False)
    assert answer.size == 8

    answer.grant(TWO, B, continues=False)

    assert answer.size == 0


# Several readers.


def test_every_reader_reads_from_the_beginning() -> None:
    answer, first = partial_answer("one ", "two ")

    second = answer.open_reader()
    answer.append(["three"], 0.0)

    assert text_now(first) == "three"
    assert text_now(second) == "one two three"


def test_slow_reader_is_disconnected_and_the_others_continue() -> None:
    answer, slow = partial_answer("x" * UNREAD_CEILING, read=False)
    quick = answer.open_reader()
    assert len(text_now(quick)) == UNREAD_CEILING

    answer.append(["yz"], 0.0)

    assert text_now(quick) == "yz"
    assert text_now(slow) == ""
    with pytest.raises(Cancelled, match="reads too slowly"):
        virtual.run(slow.outcome())
    answer.remove_reader(slow)
    assert answer.has_readers


def test_slow_last_client_ends_the_answer_despite_onlookers() -> None:
    answer, _ = partial_answer("x" * UNREAD_CEILING, read=False)
    onlooker = answer.open_reader(counts=False)
    assert len(text_now(onlooker)) == UNREAD_CEILING

    with pytest.raises(ReaderTooSlow):
        answer.append(["yz"], 0.0)

    assert not answer.has_readers


def test_slow_onlooker_ends_nothing() -> None:
    answer, reading = partial_answer(read=False)
    answer.open_reader(counts=False)
    for _ in range(9):
        answer.append(["x" * (UNREAD_CEILING // 8)], 0.0)
        read_now(reading)

    assert answer.has_readers


def test_answer_of_a_completed_job_can_be_read_again() -> None:
    choices = (Choice({"content": "a"}), Choice({"content": "b"}, "length"))
    outcome = Outcome("a", choices=choices)

    text, rich = (
        Answer.completed(JobId("j"), each).open_reader()
        for each in (Outcome("whole"), outcome)
    )

    assert read_now(text) == ["whole"]
    assert read_now(rich) == [
        Delta(0, {"content": "a"}, finish_reason="stop"),
        Delta(1, {"content": "b"}, finish_reason="length"),
    ]
    assert virtual.run(rich.outcome()) == outcome


# Two workers at once.


@pytest.mark.parametrize(("first", "second", "worker"), [(ONE, TWO, A), (TWO, ONE, B)])
def test_first_of_two_leases_to_write_continues(
    first: LeaseNumber, second: LeaseNumber, worker: WorkerId
) -> None:
    answer, _ = partial_answer(read=False)
    answer.hedge(TWO, B)

    assert answer.accepts_lease(first)
    assert not answer.accepts_lease(second)
    assert answer.accepts_lease(first)
    assert (answer.lease, answer.worker_id) == (first, worker)


@pytest.mark.parametrize(("over", "stays"), [(ONE, TWO), (TWO, ONE)])
def test_remaining_one_of_two_leases_continues(
    over: LeaseNumber, stays: LeaseNumber
) -> None:
    answer, _ = partial_answer(read=False)
    answer.hedge(TWO, B)

    answer.unhedge(over)

    assert answer.accepts_lease(stays)
    assert not answer.accepts_lease(over)


def test_lease_after_the_first_piece_writes_nothing() -> None:
    answer, _ = partial_answer("text", read=False)

    answer.hedge(TWO, B)
    assert not answer.accepts_lease(TWO)
    answer.unhedge(TWO)

    assert answer.lease == ONE


def test_unknown_lease_writes_nothing() -> None:
    answer, _ = partial_answer(read=False)
    answer.hedge(TWO, B)

    assert not answer.accepts_lease(THREE)
    assert answer.accepts_lease(TWO)
