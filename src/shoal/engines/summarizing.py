"""The task of summarizing: a model writes the summary, and the words are counted."""

import json
import re

from shoal.domain.errors import JobError
from shoal.engines.asking import Answer, Asker, Question, beginning, object_in
from shoal.engines.json_in_text import written

SUMMARY_MAX = 1000  # characters

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


async def summarize(asker: Asker, text: str) -> str:
    """Return ``{"summary": …, "word_count": …}``, of a text of any length."""
    summary = await _summary(asker, text.strip())
    return written({"summary": summary, "word_count": len(text.split())})


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
    summary = object_in(answer).get("summary")
    if summary is None and answer.cut and (begun := _CUT.search(answer.text)):
        summary = json.loads(f'"{begun[1]}"', strict=False) + "…"
    if not isinstance(summary, str) or not summary.strip():
        raise JobError("the model gave no summary")
    # It may have written half a character.
    text = summary.strip().encode("utf-16", "replace").decode("utf-16")
    if len(text) <= SUMMARY_MAX:
        return text
    return beginning(text, SUMMARY_MAX - 1).rstrip(" …") + "…"
