"""Fields that an API does not have: for the engine, without an effect, or refused."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import JSON, Chat, Feature
from shoal.gateway.chat.anthropic.message_request import decode_message_request
from shoal.gateway.chat.ollama.requests import ModelLoad, decode_ollama_chat
from shoal.gateway.chat.openai.chat_request import decode_chat_request
from shoal.gateway.chat.responses.request import decode_response_request

MESSAGES: JSON = [{"role": "user", "content": "hi"}]


def ollama(data: bytes) -> Chat:
    request = decode_ollama_chat(data)
    assert not isinstance(request, ModelLoad)
    assert isinstance(request.work, Chat)
    return request.work


DIALECTS: Mapping[str, tuple[Callable[[bytes], Chat], dict[str, JSON]]] = {
    "chat": (lambda data: decode_chat_request(data).work, {"messages": MESSAGES}),
    "responses": (
        lambda data: decode_response_request(data, 0).chat(),
        {"input": "hi"},
    ),
    "messages": (
        lambda data: decode_message_request(data).generation.work,
        {"messages": MESSAGES, "max_tokens": 9},
    ),
    "ollama": (ollama, {"messages": MESSAGES}),
    "ollama options": (ollama, {"messages": MESSAGES}),
}

HARMLESS: Mapping[str, dict[str, JSON]] = {
    "codex": {"client_metadata": {"x": "y"}, "prompt_cache_key": "k", "store": False},
    "claude code": {
        **{"context_management": None, "speed": "fast", "diagnostics": {"a": None}},
        "metadata": {"user_id": "u"},
    },
    "open webui": {"chat_id": "c", "session_id": "s", "keep_alive": "5m"},
    "ollama's": {"num_ctx": 8192, "penalize_newline": True, "truncate": True},
}


def decode(dialect: str, fields: Mapping[str, Any]) -> Chat:
    decoder, body = DIALECTS[dialect]
    given = {"options": fields} if dialect == "ollama options" else fields
    return decoder(json.dumps({"model": "m", **body, **given}).encode())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_unknown_fields_go_to_engines_that_take_any(dialect: str) -> None:
    work = decode(dialect, {"min_tokens": 3, "unheard_of": None})

    assert work.options == {"min_tokens": 3}
    assert work.needs == {Feature.FIELDS}


@pytest.mark.parametrize("client", HARMLESS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_fields_of_known_clients_have_no_effect(dialect: str, client: str) -> None:
    assert decode(dialect, HARMLESS[client]).needs == frozenset()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_options_of_sampling_have_one_name_everywhere(dialect: str) -> None:
    given = {"top_k": 4, "min_p": 0.1, "seed": 7, "mirostat": 1}
    if dialect == "ollama":
        return  # it has them in ``options``

    assert decode(dialect, given).options == given
    with pytest.raises(InvalidRequest) as caught:
        decode(dialect, {"min_p": "much"})
    assert caught.value.field in ("min_p", "options.min_p")


@pytest.mark.parametrize("dialect", [each for each in DIALECTS if each != "chat"])
def test_options_of_a_chat_are_refused_in_other_forms_than_an_apis(
    dialect: str,
) -> None:
    assert decode(dialect, {"n": 1}).options == {}
    with pytest.raises(InvalidRequest) as caught:
        decode(dialect, {"n": 2})
    assert caught.value.field == "n"
