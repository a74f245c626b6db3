"""Runs named tasks with a chat model: classify, extract_json, summarize.

Code does what it can: it counts words, and a parser finds the JSON in a text.  The
model's output is validated before it is returned.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from shoal.domain.errors import InvalidRequest, JobError
from shoal.domain.work import (
    ANY_MODEL,
    JSON,
    Call,
    CallStream,
    JobKind,
    ModelOrder,
    Task,
    Work,
)
from shoal.domain.worker import ServedModel
from shoal.engines.engine import Engine, Finished, Item
from shoal.engines.structured_prompts import (
    Prompter,
    PromptReply,
    StructuredPrompt,
    compact,
    find_json,
    first_object,
    prefix,
    to_json,
)

SENTIMENTS = ("positive", "negative", "neutral")
LABELS_MAX = 100
LABEL_MAX = 200  # characters


async def classify(prompter: Prompter, text: str, labels: Sequence[str]) -> str:
    """Return ``{"sentiment": …, "confidence": …}`` of a text of any length.

    The sentiment is one of the labels, whatever they are; the confidence is from 0 to
    1.

    Raises InvalidRequest if there is no text.
    """
    if not text.strip():
        raise InvalidRequest("input: expected a text that is not blank", "input")
    question = _label_prompt(labels)

    async def run_part(part: str) -> tuple[str, int]:
        return _read_label(await prompter.run(question, part), labels)

    answers = await prompter.map_parts(text.strip(), question.answer_tokens, run_part)
    # Each part of a long text has a vote, weighted by its confidence.
    votes = Counter(dict.fromkeys(labels, 0))
    for label, percent in answers:
        votes[label] += percent
    winner = max(labels, key=lambda label: votes[label])
    if not votes[winner]:
        winner = answers[0][0]
    percent = round(votes[winner] / len(answers))
    # As JavaScript formats it, the language of the first clients.
    confidence = percent // 100 if percent in (0, 100) else percent / 100
    return to_json({"sentiment": winner, "confidence": confidence})


def parse_labels(labels: JSON, name: str) -> Sequence[str]:
    """Return the labels in the field ``name``.

    Raises InvalidRequest if they are invalid.
    """
    valid = (
        isinstance(labels, Sequence)
        and not isinstance(labels, str)
        and 2 <= len(labels) <= LABELS_MAX
        and all(isinstance(each, str) and each.strip() for each in labels)
    )
    if not valid:
        raise InvalidRequest(
            f"{name}: expected a list of 2 to {LABELS_MAX} texts", name
        )
    assert isinstance(labels, Sequence)
    texts = [str(each) for each in labels]
    if len(set(texts)) < len(texts):
        raise InvalidRequest(f"{name}: a label is a duplicate", name)
    if any(len(each) > LABEL_MAX for each in texts):
        raise InvalidRequest(f"{name}: longer than {LABEL_MAX} characters", name)
    return texts


def _label_prompt(labels: Sequence[str]) -> StructuredPrompt:
    return StructuredPrompt(
        "Decide which label fits the text that the user sends best, and how sure you "
        f"are in percent.  The labels: {to_json(labels)}.",
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


def _read_label(answer: PromptReply, labels: Sequence[str]) -> tuple[str, int]:
    answered = first_object(answer)
    label, percent = answered.get("label"), answered.get("percent")
    if label not in labels:
        raise JobError("the model gave none of the labels")
    if not isinstance(percent, float) or not 0 <= percent <= 100:
        raise JobError("the model did not say how sure it is, from 0 to 100")
    # Some models answer with a fraction of 1.
    return str(label), round(percent * 100 if percent < 1 else percent)


SEARCH_INLINE_MAX = 1 << 16  # characters that are searched on the event loop

EXTRACT_PROMPT = StructuredPrompt(
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


async def extract_json(prompter: Prompter, text: str) -> str:
    """Return ``{"extracted": […], "count": …}`` of a text of any length.

    Raises InvalidRequest if too much of it resembles JSON and is invalid.
    """
    try:
        if len(text) > SEARCH_INLINE_MAX:
            found = await asyncio.to_thread(_json_in, text)
        else:
            found = _json_in(text)
    except ValueError as error:
        raise InvalidRequest(f"input: {error}", "input") from error
    if not found and text.strip():

        async def run_part(part: str) -> list[str]:
            return _read_objects(await prompter.run(EXTRACT_PROMPT, part))

        answers = await prompter.map_parts(
            text.strip(), EXTRACT_PROMPT.answer_tokens, run_part
        )
        found = [each for answer in answers for each in answer]
    # Not decoded and encoded again, which would change numbers.
    return f'{{"extracted":[{",".join(found)}],"count":{len(found)}}}'


def _json_in(text: str) -> list[str]:
    """Return the JSON values in a text, verbatim except for spaces.

    Lists of numbers count only if there is nothing else: "[1]" is usually a footnote.
    """
    whole = text.strip()
    return [
        compact(each.text)
        for each in find_json(text)
        if isinstance(each.value, dict)
        or each.text == whole
        or any(not isinstance(item, float) for item in each.value)
    ]


def _read_objects(answer: PromptReply) -> list[str]:
    match = _EXTRACTED.search(answer.text)
    try:
        found = find_json(answer.text[match.end() if match else 0 :], "{")
        objects = [compact(each.text) for each in found]
    except ValueError as error:
        raise JobError(f"the model's answer: {error}") from error
    if match is None and not objects:
        raise JobError("the model gave no JSON objects")
    return objects


SUMMARY_MAX = 1000  # characters

SUMMARY_PROMPT = StructuredPrompt(
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

# An unterminated string: its complete characters.
_TRUNCATED_SUMMARY = re.compile(
    r'\{\s*"summary"\s*:\s*"((?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*)'
)


async def summarize(prompter: Prompter, text: str) -> str:
    """Return ``{"summary": …, "word_count": …}`` of a text of any length."""
    summary = await _summary(prompter, text.strip())
    return to_json({"summary": summary, "word_count": len(text.split())})


async def _summary(prompter: Prompter, text: str) -> str:
    """Return a summary that is no longer than the text.

    For a long text, summarizes the summaries of its parts.
    """

    async def run_part(part: str) -> str:
        summary = _read_summary(await prompter.run(SUMMARY_PROMPT, part))
        if len(part) < len(text):
            # They are read together, and must become fewer.
            return prefix(summary, max(1, len(part) // 4))
        return summary if len(summary) < len(text) else text

    answers = await prompter.map_parts(text, SUMMARY_PROMPT.answer_tokens, run_part)
    if len(answers) > 1:
        return await _summary(prompter, "\n".join(answers))
    return answers[0] if answers else ""


def _read_summary(answer: PromptReply) -> str:
    summary = first_object(answer).get("summary")
    if (
        summary is None
        and answer.truncated
        and (match := _TRUNCATED_SUMMARY.search(answer.text))
    ):
        summary = json.loads(f'"{match[1]}"', strict=False) + "…"
    if not isinstance(summary, str) or not summary.strip():
        raise JobError("the model gave no summary")
    # It may have written half of a surrogate pair.
    text = summary.strip().encode("utf-16", "replace").decode("utf-16")
    if len(text) <= SUMMARY_MAX:
        return text
    return prefix(text, SUMMARY_MAX - 1).rstrip(" …") + "…"


Payload: TypeAlias = Mapping[str, JSON]

LABEL_FIELDS = ("labels", "categories")
"""The fields of a payload that may hold the labels."""


class TaskRunner:
    """Runs the work of an engine's model, and text tasks."""

    def __init__(self, engine: Engine, model: ServedModel) -> None:
        self._engine = engine
        self._model = model

    def run(
        self, work: Work, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Item, None]:
        """Run ``work`` as ``Engine.run`` does; a task's answer is one piece, of JSON.

        Also raises InvalidRequest for an unknown task.
        """
        if isinstance(work, Task):
            return _run(self._engine, self._model, work)
        if isinstance(work, Call | CallStream | ModelOrder):
            raise InvalidRequest(f"a model does no {work.kind.value} jobs")
        if work.model == ANY_MODEL:
            work = replace(work, model=self._model.name)
        return self._engine.run(work, continues, thoughts)


async def _run(
    engine: Engine, model: ServedModel, task: Task
) -> AsyncGenerator[Item, None]:
    if JobKind.CHAT not in model.kinds:
        raise InvalidRequest(f"{model.name} cannot chat, so it cannot do tasks")
    if (run_task := _TASKS.get(task.name)) is None:
        known = ", ".join(sorted(TASK_NAMES))
        raise InvalidRequest(f"there is no task {task.name!r:.100}; known: {known}")
    payload = task.payload if isinstance(task.payload, Mapping) else {}
    text = payload.get("input")
    if not isinstance(text, str):
        raise InvalidRequest("input: expected a text", "input")
    prompter = Prompter(engine, model)
    yield await run_task(prompter, text, payload)
    yield Finished("stop", prompter.usage)


async def _summarize(prompter: Prompter, text: str, payload: Payload) -> str:
    return await summarize(prompter, text)


async def _classify(prompter: Prompter, text: str, payload: Payload) -> str:
    for name in LABEL_FIELDS:
        if (labels := payload.get(name)) is not None:
            return await classify(prompter, text, parse_labels(labels, name))
    return await classify(prompter, text, SENTIMENTS)


async def _extract_json(prompter: Prompter, text: str, payload: Payload) -> str:
    return await extract_json(prompter, text)


_TASKS: Mapping[str, Callable[[Prompter, str, Payload], Awaitable[str]]] = {
    "classify": _classify,
    "extract_json": _extract_json,
    "summarize": _summarize,
}

TASK_NAMES = frozenset(_TASKS)
