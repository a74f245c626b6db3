"""Answers of every kind are valid for clients that check what they get.

``tests/clients`` reads the same answers with the SDKs for JavaScript.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import TypeAdapter

from gateway.chat.varied_answers import (
    PARTS,
    events_of,
    shown_answers,
)
from harness.slow_imports import anthropic, ollama, openai

NULLABLE: Mapping[str, str] = {
    "chat": r"""
        choices\[\]\.(message\.content|(message|delta)\.refusal|finish_reason
        |logprobs(\.content|\.refusal)?)
        | usage  # of a stream: it comes with the last chunk
        | error\.param""",
    "completion": r"choices\[\]\.(finish_reason|logprobs) | usage | error\.param",
    "messages": r"((message|delta)\.)?stop_(reason|sequence) | request_id",
    "responses": r"""
        (response\.)?
        (error|incomplete_details|usage|instructions|previous_response_id
        |max_output_tokens|reasoning\.(effort|summary)|user|safety_identifier
        |prompt_cache_key|tools\[\]\.(description|parameters|strict)
        |output\[\]\.encrypted_content)
        | item\.encrypted_content""",
    "ollama chat": "",
    "ollama generate": "",
}
"""Where the reference of each API has null: all other fields are absent instead."""


def nulls(value: Any, path: str = "") -> Iterator[str]:
    match value:
        case None:
            yield path
        case dict():
            for name, each in value.items():
                yield from nulls(each, f"{path}.{name}".lstrip("."))
        case list():
            for each in value:
                yield from nulls(each, f"{path}[]")
        case _:
            pass


def test_nothing_is_null_that_its_api_does_not_have_as_null() -> None:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for answer in shown_answers(1):
        for body in (answer.whole, answer.stream, answer.broken):
            found[answer.dialect] |= {
                path for event in events_of(body) for path in nulls(event)
            }

    assert found.keys() == NULLABLE.keys()
    for dialect, paths in found.items():
        allowed = re.compile(NULLABLE[dialect], re.VERBOSE)
        assert [path for path in paths if not allowed.fullmatch(path)] == [], dialect


def types() -> Mapping[str, tuple[Any, Any]]:
    """Return the types of whole answers, and of the events of streams."""
    responses, chats = openai.types.responses, openai.types.chat
    return {
        "chat": (chats.ChatCompletion, chats.ChatCompletionChunk),
        "completion": (openai.types.Completion, openai.types.Completion),
        "messages": (anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
        "responses": (responses.Response, responses.ResponseStreamEvent),
        "ollama chat": (ollama.ChatResponse, ollama.ChatResponse),
        "ollama generate": (ollama.GenerateResponse, ollama.GenerateResponse),
    }


def is_event(dialect: str, event: Mapping[str, Any]) -> bool:
    """Say whether a client's types describe an event.

    Errors and pings are apart: clients look for them first.  OpenAI's own completions
    are streamed without a finish reason, against their type.
    """
    if event.get("type") == "ping":
        return False
    if dialect == "completion" and event.get("choices"):
        return event["choices"][0]["finish_reason"] is not None
    return "error" not in event or event.get("type") == "response.failed"


@pytest.mark.long
def test_official_clients_find_nothing_wrong() -> None:
    made = {name: [*map(TypeAdapter, pair)] for name, pair in types().items()}
    for answer in shown_answers(len(PARTS)):
        whole, event = made[answer.dialect]
        whole.validate_json(answer.whole, strict=True)
        for body in (answer.stream, answer.broken):
            for each in events_of(body):
                if is_event(answer.dialect, each):
                    event.validate_python(each, strict=True)
