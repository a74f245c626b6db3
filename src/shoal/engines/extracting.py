"""The task of extracting JSON: what stands in a text, or what a model makes of it."""

import asyncio
import re

from shoal.domain.errors import InvalidRequest, JobError
from shoal.engines.asking import Answer, Asker, Question
from shoal.engines.json_in_text import compact, json_in

LARGE = 1 << 16  # characters that are searched beside the loop

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


async def extract_json(asker: Asker, text: str) -> str:
    """Return ``{"extracted": […], "count": …}``, of a text of any length.

    Raises InvalidRequest if too much of it looks like JSON and is none.
    """
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
    """Return the JSON in a text, as it stands there but for spaces.

    Lists of numbers do not count, unless they are all there is: "[1]" is a footnote.
    """
    whole = text.strip()
    return [
        compact(each.text)
        for each in json_in(text)
        if isinstance(each.value, dict)
        or each.text == whole
        or any(not isinstance(item, float) for item in each.value)
    ]


def _read_objects(answer: Answer) -> list[str]:
    begun = _EXTRACTED.search(answer.text)
    try:
        found = json_in(answer.text[begun.end() if begun else 0 :], "{")
        objects = [compact(each.text) for each in found]
    except ValueError as error:
        raise JobError(f"the model's answer: {error}") from error
    if begun is None and not objects:
        raise JobError("the model gave no JSON objects")
    return objects
