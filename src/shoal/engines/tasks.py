"""Does tasks that have a name with a model that chats.

What can be computed is: words are counted, and JSON that stands in a text is found by a
parser.  What the model adds is checked before it is passed on.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from shoal.domain.errors import InvalidRequest, JobError
from shoal.domain.work import JSON, Kind, Task, Work
from shoal.domain.worker import Model
from shoal.engines.asking import Answer, Asker, Question, beginning
from shoal.engines.json_in_text import json_in, sayable, written
from shoal.engines.port import Engine, Finished, Item

SENTIMENTS = ("positive", "negative", "neutral")
SUMMARY_MAX = 1000  # characters
LABELS_MAX = 100
LABEL_MAX = 200  # characters
LARGE = 1 << 16  # characters that are searched beside the loop

Payload: TypeAlias = Mapping[str, JSON]


class WithTasks:
    """Does what an engine does with one of its models, and tasks besides."""

    def __init__(self, engine: Engine, model: Model) -> None:
        self._engine = engine
        self._model = model

    def run(self, work: Work, continues: str = "") -> AsyncGenerator[Item, None]:
        """Do ``work`` as ``Engine.run`` does; a task's answer is one piece, of JSON.

        Raises InvalidRequest also for a task that is not known.
        """
        if isinstance(work, Task):
            return _run(self._engine, self._model, work)
        return self._engine.run(work, continues)


async def _run(engine: Engine, model: Model, task: Task) -> AsyncGenerator[Item, None]:
    if Kind.CHAT not in model.kinds:
        raise InvalidRequest(f"{model.name} does no chats, and so no tasks")
    if (do := _TASKS.get(task.name)) is None:
        known = ", ".join(sorted(TASK_NAMES))
        raise InvalidRequest(f"there is no task {task.name!r:.100}; known: {known}")
    payload = task.payload if isinstance(task.payload, Mapping) else {}
    text = payload.get("input")
    if not isinstance(text, str):
        raise InvalidRequest("input: expected a text", "input")
    asker = Asker(engine, model)
    yield await do(asker, text, payload)
    yield Finished("stop", asker.usage)


async def _summarize(asker: Asker, text: str, payload: Payload) -> str:
    summary = await _summary(asker, text.strip())
    return written({"summary": summary, "word_count": len(text.split())})


SUMMARY = Question(
    "Summarize the text that the user sends in one to three sentences, in the language "
    "that it is in.",
    '{"summary": "…"}',
    {
        "type": "object",
        "properties": {"summary": {"type": "string"}},
        "required": ["summary"],
        "additionalProperties": False,
    },
    512,
)

# A string that was not finished: as many of its characters as are whole.
_CUT = re.compile(
    r'\{\s*"summary"\s*:\s*"((?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*)'
)


async def _summary(asker: Asker, text: str) -> str:
    """Return a summary that is no longer than the text.

    Of a long text, summaries of its parts are summarized.
    """

    async def ask(part: str) -> str:
        summary = _read_summary(await asker.ask(SUMMARY, part))
        if len(part) < len(text):
            # They are read together, and have to become fewer.
            return beginning(summary, max(1, len(part) // 4))
        return summary if len(summary) < len(text) else text

    answers = await asker.in_parts(text, SUMMARY.tokens, ask)
    if len(answers) > 1:
        return await _summary(asker, "\n".join(answers))
    return answers[0] if answers else ""


def _read_summary(answer: Answer) -> str:
    summary = _object_in(answer).get("summary")
    if summary is None and answer.cut and (begun := _CUT.search(answer.text)):
        summary = json.loads(f'"{begun[1]}"', strict=False) + "…"
    if not isinstance(summary, str) or not summary.strip():
        raise JobError("the model gave no summary")
    # It may have written half a character.
    text = summary.strip().encode("utf-16", "replace").decode("utf-16")
    if len(text) <= SUMMARY_MAX:
        return text
    return beginning(text, SUMMARY_MAX - 1).rstrip(" …") + "…"


async def _classify(asker: Asker, text: str, payload: Payload) -> str:
    labels = _labels_in(payload)
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


def _labels_in(payload: Payload) -> Sequence[str]:
    """Return what is to be chosen from.

    Raises InvalidRequest naming the field that is no good.
    """
    given = [name for name in ("labels", "categories") if payload.get(name) is not None]
    if not given:
        return SENTIMENTS
    name = given[0]
    labels = payload[name]
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
    given = _object_in(answer)
    label, percent = given.get("label"), given.get("percent")
    if label not in labels:
        raise JobError("the model gave none of the labels")
    if not isinstance(percent, float) or not 0 <= percent <= 100:
        raise JobError("the model did not say how sure it is, from 0 to 100")
    # Some give a share of 1.
    return str(label), round(percent * 100 if percent < 1 else percent)


EXTRACT = Question(
    "Turn what the text that the user sends says into JSON objects, one for each thing "
    "that it is about, with short keys and with the values that stand in the text.",
    '{"extracted": [{…}, …]}',
    {
        "type": "object",
        "properties": {"extracted": {"type": "array", "items": {"type": "object"}}},
        "required": ["extracted"],
        "additionalProperties": False,
    },
    1024,
)

_EXTRACTED = re.compile(r'\{\s*"extracted"\s*:\s*\[')


async def _extract_json(asker: Asker, text: str, payload: Payload) -> str:
    try:
        if len(text) > LARGE:
            found = await asyncio.to_thread(_data_in, text)
        else:
            found = _data_in(text)
    except ValueError as error:
        raise InvalidRequest(f"input: {error}", "input") from error
    if not found and text.strip():

        async def ask(part: str) -> list[str]:
            return _read_objects(await asker.ask(EXTRACT, part))

        answers = await asker.in_parts(text.strip(), EXTRACT.tokens, ask)
        found = [each for answer in answers for each in answer]
    # Not decoded and written anew, which would change numbers.
    return f'{{"extracted":[{",".join(found)}],"count":{len(found)}}}'


def _data_in(text: str) -> list[str]:
    """Return the JSON in a text, as it stands there.

    Lists of numbers do not count, unless they are all there is: "[1]" is a footnote.
    """
    whole = text.strip()
    return [
        sayable(each.text)
        for each in json_in(text)
        if isinstance(each.value, dict)
        or each.text == whole
        or any(not isinstance(item, float) for item in each.value)
    ]


def _read_objects(answer: Answer) -> list[str]:
    begun = _EXTRACTED.search(answer.text)
    try:
        found = json_in(answer.text[begun.end() if begun else 0 :], "{")
        objects = [sayable(each.text) for each in found]
    except ValueError as error:
        raise JobError(f"the model's answer: {error}") from error
    if begun is None and not objects:
        raise JobError("the model gave no JSON objects")
    return objects


def _object_in(answer: Answer) -> Mapping[str, Any]:
    """Return the first JSON object of an answer: some models say more than that."""
    try:
        found = next(json_in(answer.text, "{"), None)
    except ValueError as error:
        raise JobError(f"the model's answer: {error}") from error
    return found.value if found is not None else {}


_TASKS: Mapping[str, Callable[[Asker, str, Payload], Awaitable[str]]] = {
    "classify": _classify,
    "extract_json": _extract_json,
    "summarize": _summarize,
}

TASK_NAMES = frozenset(_TASKS)
