"""Continues an answer that another worker began, on a server with OpenAI's API.

Servers differ in how they do that, and silently accept what they do not know; the
templates of models differ as well.  So a way is believed only after a cheap trial: the
prompt with the beginning of an answer has exactly the tokens of that beginning more
than the prompt without it.  A server that begins a new turn counts more.

Source: requests to llama-server, vLLM, transformers serve and LiteLLM; their API pages.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec
from msgspec import structs

from shoal.domain.errors import ShoalError, Unavailable
from shoal.domain.options import COMPLETION_OPTIONS
from shoal.domain.outcome import THOUGHTS, Delta, Usage
from shoal.domain.work import JSON, Chat, Completion
from shoal.engines.catalog import LORA, ServerQuery
from shoal.engines.engine import Finished, Item
from shoal.engines.requests import CONTINUE_FLAGS, is_begun, openai_request
from shoal.engines.server_errors import DECODE_ERRORS, NotServed, refusal_error
from shoal.engines.server_kinds import MULTIMODAL, Way
from shoal.engines.streams.answers import StopStrings

if TYPE_CHECKING:
    from shoal.engines.openai_server import OpenAIEngine

TextWork: TypeAlias = Chat | Completion


async def continue_answer(
    server: "OpenAIEngine", work: TextWork, beginning: str, way: Way, thoughts: str = ""
) -> AsyncGenerator[Item, None]:
    """Run ``work``, whose answer begins with ``beginning``, as ``Engine.run`` does.

    ``thoughts`` came before it.  Where no text continues them, the answer has others.
    It generates nothing if the beginning reaches ``max_tokens``, even 0, which servers
    exceed by a token.
    """
    begun = await _begin(server, work, beginning, way, thoughts)
    remaining = None
    if work.max_tokens is not None:
        remaining = work.max_tokens - begun.answer_tokens
        if remaining <= 0:
            yield Finished("length", Usage(begun.prompt_tokens, begun.answer_tokens))
            return
    begun_work = structs.replace(begun.work, max_tokens=remaining)
    if begun.thinks:
        options = {**begun.work.options, **SHOWN_ENDS}
        rest = thoughts_apart(
            server.generate(structs.replace(begun_work, options=options))
        )
    else:
        rest = server.generate(begun_work, begun.flags)
    # The server looks for stop strings in what it writes itself.
    stops = StopStrings(_stops_of(work), beginning)
    async with aclosing(without_repeated(begun.trimmed, rest)) as items:
        async for item in items:
            if isinstance(item, Finished):
                for held in stops.rest():
                    yield held
                yield _counted(item, begun)
                continue
            for passed in stops.passed([item]):
                yield passed
            if stops.found:
                yield Finished("stop", Usage(begun.prompt_tokens, begun.answer_tokens))
                return


async def without_repeated(
    space: str, items: AsyncGenerator[Item, None]
) -> AsyncGenerator[Item, None]:
    """Yield ``items`` without ``space`` at the beginning of their text.

    It was trimmed off the beginning of the answer, and the client has it.
    """
    held = ""
    async with aclosing(items) as rest:
        async for item in rest:
            if space and isinstance(item, str):
                held += item
                if space.startswith(held) and held != space:
                    continue
                held, space, item = "", "", held.removeprefix(space)
            elif held:
                yield held
                held, space = "", ""
            if item != "":
                yield item


async def thoughts_apart(
    items: AsyncGenerator[Item, None],
) -> AsyncGenerator[Item, None]:
    """Yield ``items`` with the thought that their text begins in apart from it."""
    held, thinks, begun = "", True, False
    async with aclosing(items) as rest:
        async for item in rest:
            if begun or not isinstance(item, str):
                if thinks and held.strip():
                    yield Delta(0, {THOUGHTS: held})
                    held = ""
                yield item
                continue
            held += item
            if thinks:
                thought, ended, text = held.partition(THOUGHT_ENDS.strip())
                if at := len(thought.rstrip()) if ended else _settled(held):
                    yield Delta(0, {THOUGHTS: held[:at]})
                thinks, held = not ended, text if ended else held[at:]
            if not thinks and (text := held.lstrip()):
                begun = True
                yield text


async def find_way(server: "OpenAIEngine", model: str) -> Way | None:
    """Return how the server continues answers of a model; None if in no proven way.

    Raises Unavailable if the server does not respond.
    """
    chat = Chat(model, QUESTION)
    if (prompt_size := await prompt_tokens(server, chat)) is None:
        return None
    for way in (Way.TEMPLATE, Way.TOKENS):
        try:
            begun = await _begin(server, chat, BEGINNING, way)
        except (ShoalError, *DECODE_ERRORS) as error:
            _raise_if_busy(error)
            continue
        if begun.prompt_tokens == prompt_size or begun.ends_thought:
            counted = await prompt_tokens(server, begun.work)
            if counted == begun.prompt_tokens + begun.answer_tokens > prompt_size:
                return way
    # The tokens of a text alone, without the one that may begin each text.
    alone = await prompt_tokens(server, Completion(model, BEGINNING))
    least = await prompt_tokens(server, Completion(model, "a"))
    if alone is None or least is None:
        return None
    begun_chat = _with_answer(chat, BEGINNING)
    for way, flags in ((Way.FLAGS, CONTINUE_FLAGS), (Way.MESSAGE, {})):
        counted = await prompt_tokens(server, begun_chat, flags)
        if counted is not None and counted - prompt_size == alone - (least - 1):
            return way
    return None


QUESTION = ({"role": "user", "content": "Count from one to ten, in words."},)
BEGINNING = "One, two, thr"
THOUGHT_BEGINS, THOUGHT_ENDS = "<think>", "\n</think>\n\n"
END_MAX = 16  # tokens, or characters, at the end of a prompt that begins a thought


SHOWN_ENDS: Mapping[str, JSON] = {
    "skip_special_tokens": False,
    "preserved_tokens": [THOUGHT_ENDS.strip()],
}
"""Options with which vLLM, and llama-server, show the end of a thought in a text, if
that is a special token.  Either ignores the other's."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """What continues the answer, and the tokens of the prompt and of the beginning.

    ``trimmed`` is white space at the end of the beginning that the model did not get,
    and may write again.  ``ends_thought``: the prompt has more than that of a new
    answer, for templates that begin a thought in it.  ``thinks``: the answer goes
    on in its thoughts.
    """

    work: TextWork
    prompt_tokens: int
    answer_tokens: int
    flags: Mapping[str, JSON]
    trimmed: str = ""
    ends_thought: bool = False
    thinks: bool = False


async def _begin(
    server: "OpenAIEngine", work: TextWork, beginning: str, way: Way, thoughts: str = ""
) -> _Begun:
    if isinstance(work, Completion):
        # Others than texts are never continued (domain.work.INDIVISIBLE_FEATURES).
        text = work.prompt if isinstance(work.prompt, str) else ""
        return await _begin_text(server, work, text, beginning, way)
    if work.needs & MULTIMODAL and way in (Way.TEMPLATE, Way.TOKENS):
        way = Way.MESSAGE  # images are no text, and no tokens of the tokenizer
    if way in (Way.FLAGS, Way.MESSAGE):
        return await _begin_message(server, work, beginning, way)
    read_chat = _templated if way is Way.TEMPLATE else _chat_tokens
    prompt: str | list[int] = await read_chat(server, work)
    plain = prompt if not thoughts else await read_chat(server, _thoughtless(work))
    tail = plain[len(prompt) :] if plain[: len(prompt)] == prompt else prompt[:0]
    parts = _parts(
        await _text_of(server, work.model, prompt[-END_MAX:]),
        await _text_of(server, work.model, tail),
        *(beginning, thoughts),
    )
    if parts is None:
        return await _begin_message(server, work, "", Way.MESSAGE)
    if isinstance(prompt, str):
        read = prompt + parts.read
        begun = await _begin_text(server, work, read, parts.answer, way)
    else:
        added: dict[str, JSON] = {"model": work.model, "add_special_tokens": False}
        if parts.read:
            prompt += await _tokenize(server, {**added, "prompt": parts.read})
        answer = await _tokenize(server, {**added, "prompt": parts.answer})
        completion = _completion(work, [*prompt, *answer])
        begun = _Begun(completion, len(prompt), len(answer), {})
    return replace(begun, ends_thought=bool(parts.read), thinks=parts.thinks)


async def _begin_text(
    server: "OpenAIEngine", work: TextWork, prompt: str, beginning: str, way: Way
) -> _Begun:
    """A chat is continued as a text: llama.cpp's tokens of a text have those of its
    beginning, and its tokenizer reads the texts of special tokens as such.
    """
    completion = _completion(work, prompt + beginning)
    if way is Way.TEMPLATE:
        read = await _count_text(server, prompt)
        both = await _count_text(server, prompt + beginning)
    else:
        read = await prompt_tokens(server, _completion(work, prompt)) or 0
        both = await prompt_tokens(server, completion) or 0
    return _Begun(completion, read, max(both - read, 0), {})


async def _begin_message(
    server: "OpenAIEngine", work: Chat, beginning: str, way: Way
) -> _Begun:
    # Many templates trim messages.  A model that was trained on them continues after a
    # trimmed one with the white space that it would have written.
    kept = beginning.rstrip()
    begun = _with_answer(work, kept)
    flags = CONTINUE_FLAGS if way is Way.FLAGS and is_begun(begun) else {}
    read = await prompt_tokens(server, work, flags if is_begun(work) else {}) or 0
    both = await prompt_tokens(server, begun, flags) or 0
    trimmed = beginning[len(kept) :]
    return _Begun(begun, read, max(both - read, 0), flags, trimmed)


def _with_answer(chat: Chat, text: str) -> Chat:
    """Return the chat with the beginning of its answer.

    Servers accept only one such message, and may begin a new turn after an empty one.
    """
    if not text:
        return chat
    *messages, last = chat.messages
    if last.get("role") == "assistant":
        joined = {**last, "content": f"{last.get('content') or ''}{text}"}
        return structs.replace(chat, messages=(*messages, joined))
    answer = {"role": "assistant", "content": text}
    return structs.replace(chat, messages=(*chat.messages, answer))


def _completion(work: TextWork, prompt: JSON) -> Completion:
    options = {
        name: work.options[name]
        for name in (*(each.name for each in COMPLETION_OPTIONS), LORA)
        if name in work.options
    }
    return Completion(work.model, prompt, temperature=work.temperature, options=options)


class _Parts(NamedTuple):
    """What follows the prompt of a chat: what is ``read``, then what is answered."""

    read: str
    answer: str
    thinks: bool


def _parts(prompt: str, tail: str, beginning: str, thoughts: str) -> _Parts | None:
    """Return what follows a prompt, of which some templates begin a thought; None if
    the answer is in its thoughts, and no text continues these.

    ``tail`` is what the template adds for an answer without thoughts.  If it is an
    empty thought, the model writes others so.
    """
    opened = prompt.rstrip().endswith(THOUGHT_BEGINS)
    empty = tail.replace("\n", "") == f"{THOUGHT_BEGINS}{THOUGHT_ENDS.strip()}"
    if thoughts and (opened or empty):
        begun = f"{'' if opened else THOUGHT_BEGINS}\n{thoughts}"
        whole = f"{begun}{THOUGHT_ENDS}{beginning}" if beginning else begun
        return _Parts("", whole.lstrip("\n"), not beginning)
    if thoughts and not beginning:
        return None
    return _Parts(THOUGHT_ENDS if opened else "", beginning, False)


def _settled(text: str) -> int:
    """Return how much of a thought is before what may be its end."""
    at = text.rfind("<")
    if at < 0 or not THOUGHT_ENDS.strip().startswith(text[at:]):
        at = len(text)
    return len(text[:at].rstrip())


def _thoughtless(work: Chat) -> Chat:
    given = work.options.get("chat_template_kwargs")
    known = given if isinstance(given, Mapping) else {}
    kwargs: JSON = {**known, "enable_thinking": False}
    return structs.replace(
        work, options={**work.options, "chat_template_kwargs": kwargs}
    )


def _counted(item: Finished, begun: _Begun) -> Finished:
    """Return the end, with the beginning among the tokens of the answer."""
    if item.usage is None:
        return item
    written = item.usage.completion_tokens + begun.answer_tokens
    return replace(item, usage=Usage(begun.prompt_tokens, written))


def _stops_of(work: TextWork) -> Sequence[str]:
    match work.options.get("stop"):
        case str() as stop:
            return [stop]
        case list() | tuple() as stops:
            return [each for each in stops if isinstance(each, str)]
        case _:
            return []


# Requests to the server.


class _TemplatedChat(msgspec.Struct, frozen=True):
    prompt: str


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


class _Detokenized(msgspec.Struct, frozen=True):
    prompt: str


async def prompt_tokens(
    server: "OpenAIEngine", work: TextWork, flags: Mapping[str, JSON] | None = None
) -> int | None:
    """Return how many tokens the model reads; None if the server says nothing.

    It costs one token of an answer; the server keeps what it has read for the request
    that follows.
    """
    probe = structs.replace(work, max_tokens=1, temperature=0.0)
    try:
        async with aclosing(server.generate(probe, flags or {})) as items:
            async for item in items:
                if isinstance(item, Finished) and item.usage is not None:
                    return item.usage.prompt_tokens or None
    except ShoalError as error:  # it refuses a last message, a flag, or tokens
        _raise_if_busy(error)
    return None


def _raise_if_busy(error: Exception) -> None:
    """Raise the error again, if it says nothing about what the server can do."""
    if isinstance(error, Unavailable) and not isinstance(error, NotServed):
        raise error


async def _templated(server: "OpenAIEngine", work: Chat) -> str:
    """Return the text that the model reads, from llama-server."""
    body = msgspec.json.decode(openai_request(work, work.model).body, type=dict)
    reply = await _query(server, "/apply-template", body)
    return msgspec.json.decode(reply, type=_TemplatedChat).prompt


async def _chat_tokens(server: "OpenAIEngine", work: Chat) -> list[int]:
    """Return the tokens that the model reads, from vLLM."""
    body = msgspec.json.decode(openai_request(work, work.model).body, type=dict)
    body |= CONTINUE_FLAGS if is_begun(work) else {"add_generation_prompt": True}
    return await _tokenize(server, body)


async def _text_of(server: "OpenAIEngine", model: str, read: str | list[int]) -> str:
    """Return a text, also of vLLM's tokens."""
    if isinstance(read, str) or not read:
        return "".join(map(str, read))
    reply = await _query(server, "/detokenize", {"model": model, "tokens": read})
    return msgspec.json.decode(reply, type=_Detokenized).prompt


async def _count_text(server: "OpenAIEngine", text: str) -> int:
    """Return the number of tokens of a prompt, from llama-server."""
    body: Mapping[str, JSON] = {
        "content": text,
        "add_special": True,
        "parse_special": True,
    }
    return len(await _tokenize(server, body))


async def _tokenize(server: "OpenAIEngine", body: Mapping[str, JSON]) -> list[int]:
    reply = await _query(server, "/tokenize", body)
    return msgspec.json.decode(reply, type=_Tokens).tokens


async def _query(server: "OpenAIEngine", path: str, body: Mapping[str, JSON]) -> bytes:
    query = ServerQuery(path, msgspec.json.encode(body), native=True)
    reply = await server.query(query)
    if reply.status != 200:
        raise refusal_error(reply.status, reply.content_type, reply.body, secret="")
    return reply.body
