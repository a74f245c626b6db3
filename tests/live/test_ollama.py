"""Ollama's own client, without a key, at the port of its API: what is streamed.

What it has in common with the clients of other dialects is in ``test_dialects``.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from harness.slow_imports import ollama
from live.programs import PATIENCE, Programs
from live.test_dialects import MODEL
from models.tool_answers import (
    BOTH,
    PLAN,
    PLANNED,
    SWIMS,
    THOUGHT,
    TOOLS_GGUF,
    WEATHER,
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[ollama.Client]":
    """The client, without a key, of a coordinator that needs none for it."""
    programs = Programs(tmp_path_factory.mktemp("ollama"))
    try:
        pool = programs.serve("--ollama-port", "0", "--ollama-open")
        pool.joined("one", "--model", f"{MODEL}={TOOLS_GGUF}")
        url = f"http://127.0.0.1:{pool.ready['ports']['ollama']}"
        with ollama.Client(url, timeout=PATIENCE) as client:
            yield client
    finally:
        programs.close()


def asked(
    client: "ollama.Client", messages: Any, *, stream: bool
) -> "ollama.ChatResponse":
    """Return an answer; of a stream, with all that its parts have."""
    more: dict[str, Any] = {"tools": [WEATHER], "options": {"temperature": 0}}
    if not stream:
        whole: ollama.ChatResponse = client.chat(MODEL, messages, **more)
        return whole
    *parts, last = client.chat(MODEL, messages, stream=True, **more)
    assert last.done
    assert not any(part.done for part in parts)
    message = ollama.Message(
        role="assistant",
        content="".join(part.message.content or "" for part in parts),
        thinking="".join(part.message.thinking or "" for part in parts),
        tool_calls=[c for part in parts for c in part.message.tool_calls or ()],
    )
    return last.model_copy(update={"message": message})


@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_called_and_their_results_read(
    client: "ollama.Client", stream: bool
) -> None:
    messages: list[Any] = [{"role": "user", "content": BOTH}]

    called = asked(client, messages, stream=stream)
    calls = called.message.tool_calls or ()
    messages.append(called.message)
    for weather in ("sunny", "rainy"):
        messages.append({"role": "tool", "content": weather})
    told = asked(client, messages, stream=stream)

    assert [call.function.name for call in calls] == ["get_weather"] * 2
    assert [call.function.arguments for call in calls] == [
        {"city": "Paris"},
        {"city": "Lima"},
    ]
    assert told.message.content == "It is sunny in Paris and rainy in Lima."
    for each in (called, told):
        assert each.done_reason == "stop"
        assert each.prompt_eval_count
        assert each.eval_count


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_apart_from_answers_and_calls(
    client: "ollama.Client", stream: bool
) -> None:
    planned = asked(client, [{"role": "user", "content": PLANNED}], stream=stream)
    swims = client.generate(MODEL, SWIMS, think=True, options={"temperature": 0})

    assert planned.message.thinking == PLAN
    assert len(planned.message.tool_calls or ()) == 1
    assert (swims.thinking, swims.response) == (THOUGHT, "No.")


def test_model_is_described_and_limits_are_obeyed(client: "ollama.Client") -> None:
    shown = client.show(MODEL)
    cut = client.generate(MODEL, "ping", options={"num_predict": 1, "temperature": 0})

    assert {"completion", "tools", "vision"} <= {*(shown.capabilities or ())}
    assert [each.model for each in client.list().models] == [MODEL]
    assert (cut.done_reason, cut.eval_count) == ("length", 1)
