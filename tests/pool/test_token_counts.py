"""Token counts of workers, which are believed as far as texts can hold them."""

import math

import pytest

from shoal.domain.outcome import Choice, Outcome, Usage
from shoal.domain.work import (
    JSON,
    Chat,
    Completion,
    Embedding,
    Rerank,
    Transcription,
    Work,
)
from shoal.pool.context_limits import (
    ANSWER_MARGIN,
    LIMIT_MARGIN,
    MEDIA_TOKENS,
    PROMPT_MARGIN,
    overcount,
    text_max,
)

HI = ({"role": "user", "content": "hi"},)
LONG = ({"role": "user", "content": "x" * 50_000},)
PART: JSON = {
    "type": "image_url",
    "image_url": {"url": "data:image/png;base64," + "A" * 4_000_000},
}
PICTURE: tuple[dict[str, JSON], ...] = ({"role": "user", "content": [PART]},)
CHAT = Chat("m", HI)
SHORT = Chat("m", HI, max_tokens=10)
HUGE = 2**31 - 1
TOOL_CALL = Choice({"tool_calls": [{"function": {"arguments": "y" * 9000}}]})
THOUGHTS = Choice({"content": "", "reasoning_content": "z" * 9000})
TEXT = Outcome("t" * 9000)


@pytest.mark.parametrize(
    ("work", "outcome", "usage"),
    [
        (CHAT, Outcome("hello"), Usage(PROMPT_MARGIN, ANSWER_MARGIN)),
        (Chat("m", LONG), Outcome(""), Usage(50_000, 0)),
        (Chat("m", PICTURE), Outcome(""), Usage(MEDIA_TOKENS, 0)),
        (CHAT, TEXT, Usage(1, 9000)),
        (CHAT, Outcome("", choices=(TOOL_CALL,)), Usage(1, 9000)),
        (CHAT, Outcome("", choices=(THOUGHTS,)), Usage(1, 9000, None, 9000)),
        (SHORT, Outcome("hello"), Usage(1, 10 + LIMIT_MARGIN)),
        (Chat("m", HI, 900, options={"n": 3}), TEXT, Usage(1, 2700)),
        (Completion("m", ["a", "b"], 900), TEXT, Usage(1, 1800)),
        (Completion("m", list(range(9000)), 9), TEXT, Usage(9000, 9)),
        (Embedding("m", ("x" * 9000,)), Outcome(""), Usage(9000, 0)),
        (Rerank("m", "q" * 900, ("d",) * 50), Outcome(""), Usage(46_000, 0)),
        (Transcription("m", "A" * 9000, "wav"), TEXT, Usage(9000, 9000)),
    ],
)  # fmt: skip
def test_count_that_the_texts_can_hold_is_believed(
    work: Work, outcome: Outcome, usage: Usage
) -> None:
    reported = Outcome(outcome.text, usage=usage, choices=outcome.choices)

    assert overcount(work, reported) is None


@pytest.mark.parametrize(
    ("work", "outcome", "usage", "wrong"),
    [
        (CHAT, Outcome("hello"), Usage(HUGE, 1), True),
        (CHAT, Outcome("hello"), Usage(1, HUGE), True),
        (SHORT, Outcome("hello"), Usage(1, HUGE), True),
        (SHORT, Outcome("hello"), Usage(1, 500), True),
        (Chat("m", PICTURE), Outcome(""), Usage(100_000, 1), True),
        (Embedding("m", ("hi",)), Outcome(""), Usage(HUGE, 0), True),
        (Embedding("m", ("hi",)), TEXT, Usage(1, 9000), True),
        # It knows no limit, or does not send its thoughts.
        (SHORT, TEXT, Usage(1, 2000), False),
        (Chat("m", HI, 8000), Outcome("hello"), Usage(1, 8000), False),
        (CHAT, Outcome("hello"), Usage(1, 8000, None, 7990), False),
    ],
)  # fmt: skip
def test_count_that_the_texts_cannot_hold_is_not_believed(
    work: Work, outcome: Outcome, usage: Usage, *, wrong: bool
) -> None:
    reported = Outcome(outcome.text, usage=usage, choices=outcome.choices)

    found = overcount(work, reported)

    assert found is not None
    assert found.wrong == wrong


def test_limit_of_a_text_grows_with_answers_and_their_prompt() -> None:
    assert text_max(CHAT) == math.inf
    assert text_max(Embedding("m", ("hi",))) == math.inf
    one = text_max(SHORT)
    assert 10 * 64 < one < 100_000
    assert text_max(Chat("m", HI, 10, options={"n": 3})) == 3 * one
    assert text_max(Completion("m", "p" * 900, 10)) == one - 2 + 900
