"""Answers of servers that sample survive the one that began them (R3)."""

from collections.abc import Iterator
from typing import Any

import pytest

from engines.sampling_server import (
    NEW_TURN,
    NUMBERS,
    Habits,
    SamplingServer,
    counts,
    serving_beside,
)
from engines.test_continuation import KINDS
from harness.slow_imports import openai
from live.programs import Pool, Programs

BROKEN_AFTER = 4  # tokens


@pytest.fixture(scope="module")
def empty_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    programs = Programs(tmp_path_factory.mktemp("takeover"))
    try:
        yield programs.serve("--queue-wait", "5")
    finally:
        programs.close()


def answer(pool: Pool, habits: Habits, **options: Any) -> str:
    """Return the answer that one of two servers began and the other ended."""
    breaks = [BROKEN_AFTER]
    servers = [SamplingServer(habits, seed, breaks) for seed in (1, 2)]
    with serving_beside(*servers) as urls, pool.client() as client:
        workers = [
            pool.joined(f"w{seed}", "--engine", url, "--slots", "1")
            for seed, url in enumerate(urls)
        ]
        try:
            text = ask(client, **options)
            assert not breaks
            return text
        finally:
            for worker in workers:
                worker.terminate()


def ask(client: "openai.OpenAI", **options: Any) -> str:
    stream = client.chat.completions.create(
        model="counter",
        messages=[{"role": "user", "content": "Count."}],
        stream=True,
        **options,
    )
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    thoughts = "".join(
        getattr(each, "reasoning_content", None) or "" for each in deltas
    )
    assert counts(thoughts) in ([], [*range(1, len(NUMBERS) + 1)])
    return "".join(each.content or "" for each in deltas)


@pytest.mark.parametrize("kind", KINDS)
def test_other_server_continues_what_one_has_sampled(
    empty_pool: Pool, kind: str
) -> None:
    text = answer(empty_pool, KINDS[kind], temperature=0.8)

    assert counts(text.rpartition("</think>")[2]) == [*range(1, len(NUMBERS) + 1)]


def test_stream_ends_at_once_where_no_server_can_continue(empty_pool: Pool) -> None:
    with pytest.raises(openai.APIError, match="no other worker can continue it"):
        answer(empty_pool, NEW_TURN, temperature=0.8)
