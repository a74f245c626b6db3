"""Input files as editors and other programs leave them."""

from codecs import BOM_UTF8

import pytest

from gateway.batches.uploads import (
    CHAT_PATH,
    answering,
    chat_line,
    ended,
    jsonl,
    read_lines,
)
from gateway.serving import Pool
from harness.slow_imports import openai as sdk

ONE, TWO = (jsonl([chat_line(number)]) for number in (1, 2))
WRONG = jsonl([chat_line(3) | {"method": "GET"}])


async def run_batch(openai: "sdk.AsyncOpenAI", content: bytes) -> "sdk.types.Batch":
    file = await openai.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await openai.batches.create(
        input_file_id=file.id, endpoint=CHAT_PATH, completion_window="24h"
    )
    return await ended(openai, batch.id)


async def test_batch_runs_in_spite_of_empty_lines_and_a_mark(
    pool: Pool, openai: "sdk.AsyncOpenAI", subtests: pytest.Subtests
) -> None:
    files = {
        "mark": BOM_UTF8 + ONE + TWO,
        "at the end": ONE + TWO + b"\n",
        "between": ONE + b"\n\r\n" + TWO,
        "all": BOM_UTF8 + b"\n" + ONE.replace(b"\n", b"\r\n") + b" \n" + TWO + b"\n\n",
    }
    async with answering(pool) as seen:
        for name, content in files.items():
            with subtests.test(name):
                seen.clear()

                done = await run_batch(openai, content)

                assert done.status == "completed", done
                assert done.request_counts is not None
                assert done.request_counts.completed == 2
                assert sorted(seen) == ["q1", "q2"]
                found = await read_lines(openai, done.output_file_id)
                assert [each["custom_id"] for each in found] == ["c1", "c2"]


async def test_wrong_line_has_the_number_that_an_editor_shows(
    pool: Pool, openai: "sdk.AsyncOpenAI"
) -> None:
    async with answering(pool):
        done = await run_batch(openai, BOM_UTF8 + b"\n" + ONE + b"\n" + WRONG)

    assert done.status == "failed"
    assert done.errors is not None
    assert [each.line for each in done.errors.data or ()] == [4]


async def test_body_may_begin_with_a_mark(pool: Pool) -> None:
    body = BOM_UTF8 + b'{"model":"m1","messages":[{"role":"user","content":"q1"}]}'
    headers = pool.headers() | {"Content-Type": "application/json"}

    async with (
        answering(pool) as seen,
        pool.session.post(pool.url + CHAT_PATH, data=body, headers=headers) as answer,
    ):
        assert answer.status == 200
        await answer.read()

    assert seen == ["q1"]
