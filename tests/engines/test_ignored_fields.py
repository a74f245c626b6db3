"""A server is believed as far as its answers show it."""

from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

from engines.conftest import Serve
from engines.outputs import ask, chat_of
from shoal.domain.errors import CannotDo, InvalidRequest
from shoal.domain.work import JSON, Feature
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.requests import reject_ignored_options, with_chosen_tools
from shoal.engines.server_kinds import TRANSFORMERS

TOOLS: JSON = [{"type": "function", "function": {"name": "f"}}]
FORCED: JSON = {"tools": TOOLS, "tool_choice": "required"}
SCHEMA: JSON = {"response_format": {"type": "json_object"}}
CALL = {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}


async def engine_with(serve: Serve, choice: dict[str, Any]) -> OpenAIEngine:
    """Return an engine whose server answers each chat alike, and without a [DONE]."""

    async def handler(_: web.Request) -> web.StreamResponse:
        message = {"role": "assistant", "content": "Hello.", **choice}
        logprobs = message.pop("logprobs", None)
        body = {
            "choices": [
                {"message": message, "finish_reason": "stop", "logprobs": logprobs}
            ]
        }
        return web.json_response(body)

    engine = OpenAIEngine(await serve(handler))
    await engine.start()
    return engine


@pytest.mark.parametrize(
    ("options", "obeyed", "feature", "field"),
    [
        (SCHEMA, {"content": ' {"a": 1}'}, Feature.SCHEMA, "response_format"),
        (FORCED, {**CALL, "content": None}, Feature.TOOLS, "tool_choice"),
        (FORCED, {**CALL, "content": "So."}, Feature.TOOLS, "tool_choice"),
        ({"logprobs": True}, {"logprobs": {"content": []}}, Feature.LOGPROBS, None),
    ],
)
async def test_ignored_field_is_an_error_that_names_it(
    serve: Serve,
    options: dict[str, JSON],
    obeyed: dict[str, Any],
    feature: Feature,
    field: str | None,
) -> None:
    chat = chat_of("hi", options=options)
    good, bad = await engine_with(serve, obeyed), await engine_with(serve, {})
    try:
        await ask(good, chat)
        assert feature in good.models[0].features

        with pytest.raises(CannotDo, match="the model server ignored it") as caught:
            await ask(bad, chat)

        assert caught.value.field == (field or "logprobs")
        still = feature is Feature.TOOLS  # the model may call one another time
        assert (feature in bad.models[0].features) is still
        assert (await ask(bad, "hi")).text == "Hello."
    finally:
        await good.close()
        await bad.close()


async def test_ignored_number_of_choices_is_made_up_for(serve: Serve) -> None:
    engine = await engine_with(serve, {})
    try:
        outcome = await ask(engine, chat_of("hi", options={"n": 3}))
    finally:
        await engine.close()

    assert [each.fields["content"] for each in outcome.choices] == ["Hello."] * 3


def test_forced_call_is_refused_by_a_kind_that_ignores_it() -> None:
    chat = chat_of("hi", options={"tools": TOOLS})
    for choice in ("auto", "none", None):
        work = replace(chat, options={**chat.options, "tool_choice": choice})
        reject_ignored_options(with_chosen_tools(work), TRANSFORMERS)
    named: JSON = {"type": "function", "function": {"name": "f"}}
    for wanted in ("required", named):
        forced = replace(chat, options={**chat.options, "tool_choice": wanted})
        with pytest.raises(InvalidRequest, match="'tool_choice'"):
            reject_ignored_options(with_chosen_tools(forced), TRANSFORMERS)
