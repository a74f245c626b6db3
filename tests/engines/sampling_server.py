"""Servers of a model that counts from one to ten and samples how it writes numbers.

Each behaves as a real server does when it is asked to continue an answer; they differ
in what they know and in what they ignore without a word.  An answer that two of them
have written is right if it counts once from one to ten.

Source: requests to the real programs, in November 2026.
"""

import asyncio
import json
import random
import re
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

NUMBERS = [
    *("one", "two", "three", "four", "five"),
    *("six", "seven", "eight", "nine", "ten"),
]
TURN = {"system": "<s>", "user": "<u>", "assistant": "<a>"}
END = "<end>"
THOUGHT = "<think>\n"

_TOKEN = re.compile(r"<[^>]*>| ?\w+|\W")


@dataclass(frozen=True, slots=True)
class Habits:
    """What a server knows.

    ``template`` and ``tokenizer``: llama-server's, and vLLM's, endpoints.  ``flags``
    and ``message``: what continues a last message of the assistant.  ``trims``: so does
    the template with each message; ``thinks``: it begins a thought in the prompt;
    ``reasons``: the model begins it, and the server tells thoughts apart in a chat.
    ``silent``: it says nothing about tokens.
    """

    owner: str
    template: bool = False
    tokenizer: bool = False
    flags: bool = False
    message: bool = False
    trims: bool = False
    thinks: bool = False
    reasons: bool = False
    silent: bool = False


LLAMA_SERVER = Habits("llamacpp", template=True, message=True)
VLLM = Habits("vllm", tokenizer=True, flags=True)
SGLANG = Habits("sglang", flags=True)
LMDEPLOY = Habits("lmdeploy", message=True)
OLLAMA = Habits("library", message=True)
NEW_TURN = Habits("somebody")


class SamplingServer:
    """One server; ``asked`` has the requests for answers.

    For each number in ``breaks``, which servers may share, the connection of an answer
    breaks after so many tokens.
    """

    def __init__(
        self, habits: Habits, seed: int, breaks: list[int] | None = None
    ) -> None:
        self.habits = habits
        self.asked: list[Mapping[str, Any]] = []
        self._breaks = breaks if breaks is not None else []
        self._random = random.Random(seed)
        self._vocabulary: dict[str, int] = {}

    @property
    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        if self.habits.template:
            app.router.add_post("/apply-template", self._apply_template)
        if self.habits.template or self.habits.tokenizer:
            app.router.add_post("/tokenize", self._tokenize)
        if self.habits.tokenizer:
            app.router.add_post("/detokenize", self._detokenize)
        return app

    async def _list(self, _: web.Request) -> web.Response:
        listed = {"id": "counter", "owned_by": self.habits.owner}
        return web.json_response({"object": "list", "data": [listed]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, self._render(body), is_chat=True)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        if isinstance(prompt, list):
            texts = {number: text for text, number in self._vocabulary.items()}
            prompt = "".join(texts[number] for number in prompt)
        return await self._answer(request, body, prompt, is_chat=False)

    async def _apply_template(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": self._render(await request.json())})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.habits.template:  # it reads nothing else, and answers all the same
            return web.json_response({"tokens": self._tokens(body.get("content", ""))})
        text = self._render(body) if "messages" in body else body["prompt"]
        tokens = self._tokens(text)
        return web.json_response({"tokens": tokens, "count": len(tokens)})

    async def _detokenize(self, request: web.Request) -> web.Response:
        texts = {number: text for text, number in self._vocabulary.items()}
        numbers = (await request.json())["tokens"]
        return web.json_response({"prompt": "".join(texts[each] for each in numbers)})

    def _render(self, body: Mapping[str, Any]) -> str:
        *messages, last = body["messages"]
        open_end = last["role"] == "assistant" and (
            self.habits.message
            or (
                self.habits.flags
                and body.get("continue_final_message") is True
                and body.get("add_generation_prompt") is False
            )
        )
        texts = [self._turn(each) + END for each in messages]
        texts.append(self._turn(last) + ("" if open_end else END))
        if not open_end:
            texts.append(TURN["assistant"] + (THOUGHT if self.habits.thinks else ""))
            kwargs = body.get("chat_template_kwargs") or {}
            if self.habits.reasons and kwargs.get("enable_thinking") is False:
                texts.append(f"{THOUGHT}\n</think>\n\n")
        return "".join(texts)

    def _turn(self, message: Mapping[str, Any]) -> str:
        content: str = message["content"]
        text = content.strip() if self.habits.trims else content
        return TURN[message["role"]] + text

    def _tokens(self, text: str) -> list[int]:
        known = self._vocabulary
        return [known.setdefault(each, len(known)) for each in _TOKEN.findall(text)]

    async def _answer(
        self,
        request: web.Request,
        body: Mapping[str, Any],
        prompt: str,
        *,
        is_chat: bool,
    ) -> web.StreamResponse:
        self.asked.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        stops = body.get("stop") or []
        text, written, reason = "", 0, "stop"
        is_trial = body.get("max_tokens") == 1
        breaks_after = self._breaks.pop() if self._breaks and not is_trial else -1
        while piece := self._next(prompt + text):
            if written == body.get("max_tokens"):
                reason = "length"
                break
            if written == breaks_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            text, written = text + piece, written + 1
            if any(stop in text for stop in stops):
                break
            choice = (
                {"delta": self._delta(prompt + text)} if is_chat else {"text": piece}
            )
            await response.write(_event({"choices": [{"index": 0, **choice}]}))
        last: Mapping[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        end = {"choices": [{"index": 0, **last, "finish_reason": reason}]}
        usage = {
            "prompt_tokens": len(self._tokens(prompt)),
            "completion_tokens": written,
        }
        await response.write(
            _event(end if self.habits.silent else {**end, "usage": usage})
        )
        await response.write(b"data: [DONE]\n\n")
        return response

    def _delta(self, text: str) -> dict[str, str]:
        """Return the last piece after a prompt in the form of a chat."""
        answer = text.rpartition(TURN["assistant"])[2]
        piece = _TOKEN.findall(text)[-1]
        if not self.habits.reasons:
            return {"content": piece}
        if piece in ("<think>", "</think>", "\n"):
            return {}
        thinks = answer.startswith("<think>") and "</think>" not in answer
        return {"reasoning_content" if thinks else "content": piece}

    def _next(self, text: str) -> str:
        """Return the next token after a prompt and what was written; empty: the end."""
        _, begun, answer = text.rpartition(TURN["assistant"])
        if not begun:
            answer = text
        _, ended, visible = answer.rpartition("</think>")
        if self.habits.reasons and not answer:
            return "<think>"
        if answer.startswith("<think>") and not ended:
            if self.habits.reasons:
                counted = counts(answer)
                if len(counted) < len(NUMBERS):
                    return f" {NUMBERS[len(counted)]}"
                return "</think>"
            return "</think>" if "well" in answer else " well"
        counted = counts(visible if ended else answer)
        if len(counted) >= len(NUMBERS):
            return ""
        number = len(counted) + 1
        gap = " " if (visible if ended else answer).strip() else ""
        if answer[-1:].isspace():
            gap = ""
        return gap + self._random.choice([str(number), NUMBERS[number - 1]])


def counts(text: str) -> list[int]:
    """Return the numbers in an answer."""
    return [
        int(word) if word.isdecimal() else NUMBERS.index(word) + 1
        for word in re.findall(r"\w+", text)
        if word.isdecimal() or word in NUMBERS
    ]


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


@contextmanager
def serving_beside(*servers: SamplingServer) -> Iterator[Sequence[str]]:
    """Serve them from a thread; yield their base URLs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Coroutine[None, None, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    block = serving(*servers)
    try:
        yield run(block.__aenter__())
    finally:
        run(block.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@asynccontextmanager
async def serving(*servers: SamplingServer) -> AsyncIterator[Sequence[str]]:
    """Serve them; yield their base URLs."""
    runners = [web.AppRunner(each.app, shutdown_timeout=0) for each in servers]
    urls = []
    try:
        for runner in runners:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0]
            urls.append(f"http://{host}:{port}/v1")
        yield urls
    finally:
        for runner in runners:
            await runner.cleanup()
