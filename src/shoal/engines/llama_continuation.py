"""Continues an answer that another worker began, on llama.cpp's server.

llama.cpp continues a final message of the assistant.  Its tokens then belong to the
prompt, but count as those of the answer, towards the limit and the usage.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec

from shoal.domain.outcome import Usage
from shoal.domain.work import Chat, Completion, message_text
from shoal.engines.catalog import ServerQuery
from shoal.engines.engine import Finished, Item
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.requests import openai_request
from shoal.engines.server_errors import refusal_error

TextWork: TypeAlias = Chat | Completion


async def continue_answer(
    server: OpenAIEngine, work: TextWork, beginning: str
) -> AsyncGenerator[Item, None]:
    """Run ``work``, whose answer begins with ``beginning``, as ``Engine.run`` does.

    No more than ``max_tokens``, of which the server generates at least one.
    """
    begun = with_beginning(work, beginning)
    prompt_tokens = await count_tokens(server, work)
    prefilled = await count_tokens(server, begun) - prompt_tokens if beginning else 0
    if work.max_tokens is not None:
        remaining = work.max_tokens - prefilled
        if remaining <= 0:
            yield Finished("length", Usage(prompt_tokens, prefilled))
            return
        begun = replace(begun, max_tokens=remaining)
    async with aclosing(server.run(begun)) as items:
        async for item in items:
            if isinstance(item, Finished) and (usage := item.usage) is not None:
                read, written = usage.prompt_tokens, usage.completion_tokens
                usage = Usage(read - prefilled, written + prefilled)
                yield replace(item, usage=usage)
            else:
                yield item


def with_beginning(work: TextWork, beginning: str) -> TextWork:
    """Return the work with the beginning of its answer in the prompt.

    A final message of the assistant is extended: llama.cpp accepts only one.
    """
    if not beginning:
        return work
    if isinstance(work, Completion):
        # Others than texts are never continued (domain.work.INDIVISIBLE_FEATURES).
        assert isinstance(work.prompt, str)
        return replace(work, prompt=work.prompt + beginning)
    *messages, last = work.messages
    if last.get("role") == "assistant":
        text = message_text(last) + beginning
        return replace(work, messages=(*messages, {**last, "content": text}))
    answer = {"role": "assistant", "content": beginning}
    return replace(work, messages=(*work.messages, answer))


async def count_tokens(server: OpenAIEngine, work: TextWork) -> int:
    """Count the tokens of the prompt, a beginning included."""
    prompt = work.prompt if isinstance(work, Completion) else None
    if prompt is None:
        request = openai_request(work, work.model)
        prompt = (await _query(server, "/apply-template", request.body))["prompt"]
    body = {"content": prompt, "add_special": True, "parse_special": True}
    return len((await _query(server, "/tokenize", msgspec.json.encode(body)))["tokens"])


async def _query(server: OpenAIEngine, path: str, body: bytes) -> Any:
    reply = await server.query(ServerQuery(path, body, native=True))
    if reply.status != 200:
        raise refusal_error(reply.status, reply.content_type, reply.body, secret="")
    return msgspec.json.decode(reply.body)
