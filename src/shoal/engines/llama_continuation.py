"""Continues an answer that another worker began, on llama.cpp's server.

The beginning of the answer becomes part of the prompt.  Its tokens still count as those
of the answer, towards the limit and in the usage.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec

from shoal.domain.outcome import Usage
from shoal.domain.work import JSON, Chat, Completion
from shoal.engines.catalog import ServerQuery
from shoal.engines.engine import Finished, Item
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.requests import openai_request
from shoal.engines.server_errors import refusal_error
from shoal.engines.server_kinds import MULTIMODAL

TextWork: TypeAlias = Chat | Completion


class TemplatedChat(msgspec.Struct, frozen=True):
    prompt: str


class Tokens(msgspec.Struct, frozen=True):
    tokens: list[Any]


async def continue_answer(
    server: OpenAIEngine, work: TextWork, beginning: str
) -> AsyncGenerator[Item, None]:
    """Run ``work``, whose answer begins with ``beginning``, as ``Engine.run`` does.

    It generates nothing if the beginning reaches ``max_tokens``, even 0, which the
    server would exceed by a token.
    """
    prompt = await templated_prompt(server, work)
    prompt_tokens = await count_tokens(server, prompt)
    prefilled = await count_tokens(server, prompt + beginning) - prompt_tokens
    remaining = None
    if work.max_tokens is not None:
        remaining = work.max_tokens - prefilled
        if remaining <= 0:
            yield Finished("length", Usage(prompt_tokens, prefilled))
            return
    begun = replace(begun_work(work, prompt, beginning), max_tokens=remaining)
    async with aclosing(server.run(begun)) as items:
        async for item in items:
            if isinstance(item, Finished) and (usage := item.usage) is not None:
                read, written = usage.prompt_tokens, usage.completion_tokens
                usage = Usage(read - prefilled, written + prefilled)
                yield replace(item, usage=usage)
            else:
                yield item


def begun_work(work: TextWork, prompt: str, beginning: str) -> TextWork:
    """Return the work with the beginning of its answer in the prompt.

    A chat is continued as a text, so that the model reads the very tokens that it wrote
    itself: in a message of the assistant, llama.cpp would put an empty thought before
    them.  Only a chat with images or audio needs that message.
    """
    if isinstance(work, Completion) or not work.needs & MULTIMODAL:
        return Completion(
            work.model,
            prompt + beginning,
            temperature=work.temperature,
            options=work.options,
        )
    *messages, last = work.messages
    if last.get("role") == "assistant":
        # llama.cpp accepts only one such message.
        text = f"{last.get('content') or ''}{beginning}"
        return replace(work, messages=(*messages, {**last, "content": text}))
    answer = {"role": "assistant", "content": beginning}
    return replace(work, messages=(*work.messages, answer))


async def templated_prompt(server: OpenAIEngine, work: TextWork) -> str:
    """Return the text that the model reads."""
    if isinstance(work, Completion):
        # Others than texts are never continued (domain.work.INDIVISIBLE_FEATURES).
        return work.prompt if isinstance(work.prompt, str) else ""
    body = openai_request(work, work.model).body
    reply = await _query(server, "/apply-template", body)
    return msgspec.json.decode(reply, type=TemplatedChat).prompt


async def count_tokens(server: OpenAIEngine, text: str) -> int:
    """Return the number of tokens of a prompt."""
    body: Mapping[str, JSON] = {
        "content": text,
        "add_special": True,
        "parse_special": True,
    }
    reply = await _query(server, "/tokenize", msgspec.json.encode(body))
    return len(msgspec.json.decode(reply, type=Tokens).tokens)


async def _query(server: OpenAIEngine, path: str, body: bytes) -> bytes:
    reply = await server.query(ServerQuery(path, body, native=True))
    if reply.status != 200:
        raise refusal_error(reply.status, reply.content_type, reply.body, secret="")
    return reply.body
