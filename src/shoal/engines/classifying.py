"""The task of classifying: which label fits a text, and how sure the model is."""

from collections import Counter
from collections.abc import Sequence

from shoal.domain.errors import InvalidRequest, JobError
from shoal.domain.work import JSON
from shoal.engines.asking import Answer, Asker, Question, object_in
from shoal.engines.json_in_text import written

SENTIMENTS = ("positive", "negative", "neutral")
LABELS_MAX = 100
LABEL_MAX = 200  # characters


async def classify(asker: Asker, text: str, labels: Sequence[str]) -> str:
    """Return ``{"sentiment": …, "confidence": …}``, of a text of any length.

    The first is one of the labels, whatever they are, and the second from 0 to 1.

    Raises InvalidRequest if there is no text.
    """
    if not text.strip():
        raise InvalidRequest("input: expected a text that is not blank", "input")
    question = _which_of(labels)

    async def ask(part: str) -> tuple[str, int]:
        return _read_label(await asker.ask(question, part), labels)

    answers = await asker.in_parts(text.strip(), question.tokens, ask)
    # Of a long text every part has a vote, which weighs as much as it is sure.
    votes = Counter(dict.fromkeys(labels, 0))
    for label, percent in answers:
        votes[label] += percent
    winner = max(labels, key=lambda label: votes[label])
    if not votes[winner]:
        winner = answers[0][0]
    percent = round(votes[winner] / len(answers))
    # As JavaScript writes it, who wrote the first clients.
    confidence = percent // 100 if percent in (0, 100) else percent / 100
    return written({"sentiment": winner, "confidence": confidence})


def read_labels(labels: JSON, name: str) -> Sequence[str]:
    """Return what is to be chosen from, as the field of that name has it.

    Raises InvalidRequest if it is no good.
    """
    good = (
        isinstance(labels, Sequence)
        and not isinstance(labels, str)
        and 2 <= len(labels) <= LABELS_MAX
        and all(isinstance(each, str) and each.strip() for each in labels)
    )
    if not good:
        raise InvalidRequest(
            f"{name}: expected a list of 2 to {LABELS_MAX} texts", name
        )
    assert isinstance(labels, Sequence)
    texts = [str(each) for each in labels]
    if len(set(texts)) < len(texts):
        raise InvalidRequest(f"{name}: one of them is there twice", name)
    if any(len(each) > LABEL_MAX for each in texts):
        raise InvalidRequest(f"{name}: longer than {LABEL_MAX} characters", name)
    return texts


def _which_of(labels: Sequence[str]) -> Question:
    return Question(
        "Decide which label fits the text that the user sends best, and how sure you "
        f"are in percent.  The labels: {written(labels)}.",
        '{"label": "…", "percent": 0 to 100}',
        {
            "type": "object",
            "properties": {
                "label": {"type": "string", "enum": labels},
                "percent": {"type": "integer", "minimum": 0, "maximum": 100},
            },
            "required": ["label", "percent"],
            "additionalProperties": False,
        },
        256,
    )


def _read_label(answer: Answer, labels: Sequence[str]) -> tuple[str, int]:
    given = object_in(answer)
    label, percent = given.get("label"), given.get("percent")
    if label not in labels:
        raise JobError("the model gave none of the labels")
    if not isinstance(percent, float) or not 0 <= percent <= 100:
        raise JobError("the model did not say how sure it is, from 0 to 100")
    # Some give a share of 1.
    return str(label), round(percent * 100 if percent < 1 else percent)
