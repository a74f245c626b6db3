"""What becomes of an answer whose worker is lost in the middle."""

import pytest

from shoal.coordinator.answer import Answer, UnusableOutput
from shoal.coordinator.answer_reader import AnswerCursor
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.domain.outcome import AnswerPiece, Delta
from shoal.domain.work import Chat, Completion, is_repeatable
from simulation import virtual

ONE, TWO = LeaseNumber(1), LeaseNumber(2)
A, B = WorkerId("a"), WorkerId("b")
THOUGHT = Delta(0, {"reasoning_content": "hm"})
CALL = Delta(0, {"tool_calls": [{"index": 0, "function": {"name": "f"}}]})


def read_answer(*pieces: AnswerPiece) -> tuple[Answer, AnswerCursor]:
    """Return an answer whose output so far a client has read."""
    answer = Answer(JobId("j"))
    reading = answer.open_reader()
    answer.grant(ONE, A, continues=False)
    answer.append(pieces, 0.0)
    virtual.run(reading.read())
    return answer, reading


def test_text_after_thoughts_is_continued() -> None:
    answer, reading = read_answer(THOUGHT, "It ", "is ")

    assert answer.grant(TWO, B, continues=True, repeats=False) == "It is "
    answer.append(["so."], 1.0)

    assert virtual.run(reading.read()) == ["so."]
    assert answer.assemble("stop", None).text == "It is so."


def test_answer_in_its_thoughts_begins_anew_after_them() -> None:
    answer, reading = read_answer(THOUGHT)

    assert answer.grant(TWO, B, continues=False, repeats=False) == ""
    answer.append([THOUGHT, "Yes."], 1.0)
    answer.check_complete()

    assert virtual.run(reading.read()) == [THOUGHT, "Yes."]


@pytest.mark.parametrize("is_read", [True, False])
def test_thoughts_are_kept_for_a_worker_that_continues(is_read: bool) -> None:
    answer, _ = read_answer(THOUGHT)
    if not is_read:
        answer = Answer(JobId("j"))
        answer.grant(ONE, A, continues=False)
        answer.append([THOUGHT], 0.0)

    assert answer.grant(TWO, B, continues=True, repeats=False) == ""
    assert answer.thoughts == "hm"
    answer.append([THOUGHT, "Yes."], 1.0)

    fields = answer.assemble("stop", None).choices[0].fields
    assert fields == {"reasoning_content": "hmhm", "content": "Yes."}


def test_sampled_answer_is_not_tried_again() -> None:
    answer, _ = read_answer("It ")

    with pytest.raises(UnusableOutput, match="no other worker can continue") as caught:
        answer.grant(TWO, B, continues=False, repeats=False)

    assert caught.value.lost


def test_sampled_answer_that_was_not_read_begins_anew() -> None:
    answer = Answer(JobId("j"))
    answer.grant(ONE, A, continues=False)
    answer.append(["It "], 0.0)

    assert answer.grant(TWO, B, continues=False, repeats=False) == ""
    answer.append(["Yes."], 1.0)

    assert answer.text == "Yes."


def test_thoughts_of_a_repeated_answer_are_dropped() -> None:
    answer, reading = read_answer(THOUGHT, "It ")

    answer.grant(TWO, B, continues=False, repeats=True)
    answer.append([THOUGHT, "It is"], 1.0)
    answer.check_complete()

    assert virtual.run(reading.read()) == ["is"]


@pytest.mark.parametrize("continues", [True, False])
@pytest.mark.parametrize(
    "piece", [CALL, Delta(0, {"content": "a"}, logprobs={}), Delta(1, {"content": "a"})]
)
def test_more_than_text_is_not_joined(piece: Delta, continues: bool) -> None:
    answer, _ = read_answer("It ", piece)

    with pytest.raises(UnusableOutput, match="more than text"):
        answer.grant(TWO, B, continues=continues, repeats=True)


def test_texts_of_models_are_repeatable_without_chance() -> None:
    chat = Chat("m", ({"role": "user", "content": "?"},))

    assert not is_repeatable(chat)
    assert not is_repeatable(Completion("m", "?", temperature=0.1))
    assert is_repeatable(Chat("m", chat.messages, temperature=0.0))
    assert is_repeatable(Completion("m", "?", options={"seed": 0}))
