"""The child process of the embedded engine, and its exit errors."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from engines.outputs import TINY
from harness.speed import PATIENCE
from shoal.domain.errors import LimitExceeded, Unavailable
from shoal.domain.work import JobKind
from shoal.engines.llama_messages import (
    MESSAGE_MAX,
    AnswerEnded,
    JobRefused,
    OpenModel,
    StartJob,
)
from shoal.engines.llama_process import (
    JobOutput,
    LlamaProcess,
    first_error,
    last_unformatted_line,
)

PING = {"messages": [{"role": "user", "content": "ping"}], "temperature": 0}


def ping(**options: object) -> StartJob:
    return StartJob(0, JobKind.CHAT, PING | options)


@pytest.fixture
async def process() -> AsyncIterator[LlamaProcess]:
    """One slot with room for 500 tokens."""
    process = await LlamaProcess.spawn()
    await process.open(OpenModel(str(TINY), slots=1, context=500, threads=1))
    yield process
    await process.close()


async def end_of(answer: JobOutput) -> AnswerEnded | JobRefused:
    while isinstance(item := await answer.read(), list):
        pass
    return item


async def test_aborted_chat_stops_early(process: LlamaProcess) -> None:
    id, answer = process.run(ping(ignore_eos=True))
    await answer.read()

    process.abort(id)

    assert await end_of(answer) == JobRefused(id, "aborted")
    assert process.jobs == 0


async def test_queued_chat_can_be_aborted(
    process: LlamaProcess,
) -> None:
    running, answer = process.run(ping(ignore_eos=True))
    waiting, other = process.run(ping())

    process.abort(waiting)

    assert await end_of(answer) == AnswerEnded(running, "length", 24, 512 - 24)
    assert await end_of(other) == JobRefused(waiting, "aborted")


async def test_unread_pieces_are_joined(process: LlamaProcess) -> None:
    _, unread = process.run(ping())
    async with asyncio.timeout(PATIENCE):
        while process.jobs:  # noqa: ASYNC110  # nothing tells when it is over
            await asyncio.sleep(0.001)

    assert await unread.read() == ["pong"]


async def test_oversized_chat_is_rejected(process: LlamaProcess) -> None:
    with pytest.raises(LimitExceeded):
        process.run(ping(messages="x" * MESSAGE_MAX))

    assert process.jobs == 0


async def test_exited_process_accepts_no_chats(process: LlamaProcess) -> None:
    await process.close()

    _, answer = process.run(ping())

    with pytest.raises(Unavailable, match="the engine was closed"):
        await answer.read()


LOG = """\
0.00.001 W srv init: no API key is set
0.00.002 E gguf_init_from_file: failed to open GGUF file 'x.gguf'
0.00.003 E llama_model_load: error loading model: something more general
"""


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (LOG, "failed to open GGUF file 'x.gguf'"),
        ("0.1 E llama_model_load: error loading model: cut short\n", "cut short"),
        ("0.1 I srv init: all is well\n", None),
        ("", None),
    ],
)
def test_first_error_of_a_log_is_reported(log: str, message: str | None) -> None:
    assert first_error(log) == message


@pytest.mark.parametrize(
    ("log", "suffix"),
    [
        ("", ""),
        (LOG, ""),
        (
            LOG + "ggml.c:7: GGML_ASSERT(x) failed\n",
            ": ggml.c:7: GGML_ASSERT(x) failed",
        ),
    ],
)
def test_unformatted_last_line_is_reported(log: str, suffix: str) -> None:
    assert last_unformatted_line(log) == suffix
