"""An engine that is a server elsewhere: anything that speaks OpenAI's protocol.

Source: OpenAI API reference, "Create chat completion", "Streaming" and "List models".
"""

import asyncio
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

import aiohttp
import msgspec

from shoal.domain.errors import ConfigError, JobError, LimitExceeded, Unavailable
from shoal.domain.work import Chat, Feature, Usage
from shoal.engines.chunks import ERROR_MAX, Chunk
from shoal.engines.port import Finished, Piece
from shoal.engines.sse import EventReader

CONNECT_LIMIT = 10.0  # seconds
LIST_LIMIT = 30.0  # seconds
LIST_MAX = 4 * 1024 * 1024  # bytes
REPLY_MAX = 64 * 1024  # bytes of a refusal that are read
RETRY_AFTER_MAX = 600  # seconds

# What msgspec raises, which includes what is no UTF-8 or nested too deeply.
UNREADABLE = (ValueError, RecursionError)

# Too many requests, no capacity, still loading, and a proxy whose server is away.
BUSY = frozenset({429, 502, 503, 504})
NO_LIST = frozenset({404, 405})  # a small server may not list its models


class Model(msgspec.Struct, frozen=True):
    id: str


class Models(msgspec.Struct, frozen=True):
    """The answer of ``GET /models``."""

    data: tuple[Model, ...]


class OpenAIEngine:
    """Passes chats on to a server.

    Args:
        url: what comes before ``/chat/completions``; ``/v1`` is added to a URL without
            a path, as that is where servers have it.
        model: a name that the server knows.  Empty: its first model, known from
            ``start`` on.
        slots: chats that the server is sent at the same time.
        api_key: sent as a bearer token; empty: none is sent.
    """

    # Whether a server goes on from a beginning cannot be known: so it is not claimed.
    features = frozenset({Feature.OPTIONS, Feature.STOP})

    def __init__(
        self, url: str, model: str = "", *, slots: int = 4, api_key: str = ""
    ) -> None:
        self.model = model
        self.slots = slots
        self._url = url.rstrip("/")
        if not urlsplit(self._url).path:
            self._url += "/v1"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            # How long an answer may take is for whoever waits for it to say.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT),
            # A connection for each chat: one that was kept may be closed by the server
            # just when a chat is sent, and a POST is not repeated.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        try:
            self.model = await self._choose_model(self._session)
        except BaseException:
            await self.close()
            raise

    async def chat(
        self, chat: Chat, continues: str = ""
    ) -> AsyncGenerator[Piece, None]:
        assert not continues
        if self._session is None:
            raise Unavailable("the engine is not running")
        answer = AnswerReader()
        try:
            async with self._session.post(
                f"{self._url}/chat/completions",
                data=request_of(chat, self.model),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response:
                try:
                    await check_answer(response)
                    async for data in response.content.iter_any():
                        if text := answer.feed(data):
                            yield text
                        if answer.done:
                            break
                finally:
                    # Hanging up is how a server learns to stop, and what a server
                    # sends after the end may never come.
                    response.close()
        except aiohttp.ClientError as error:
            raise Unavailable(f"{self._url}: {error}") from error
        yield answer.finished()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _choose_model(self, session: aiohttp.ClientSession) -> str:
        """Return the model to ask for.  Raises ConfigError if the server lacks it."""
        names = await self._list_models(session)
        if names is None or self.model in names:
            return self.model
        if any(name.startswith(f"{self.model}:") for name in names if self.model):
            return self.model  # Ollama adds a tag, and answers to the name without it
        if not names:
            raise ConfigError(f"{self._url} has no models")
        if self.model:
            some = ascii(", ".join(names[:10]))[1:-1][:ERROR_MAX]
            raise ConfigError(f"{self._url} does not have {self.model!r}, but {some}")
        return names[0]

    async def _list_models(self, session: aiohttp.ClientSession) -> list[str] | None:
        """Return the models of the server, or None if it has no list, but we a name.

        Raises ConfigError if it tells none.
        """
        url = f"{self._url}/models"
        try:
            async with asyncio.timeout(LIST_LIMIT), session.get(url) as response:
                status, body = response.status, await read_some(response, LIST_MAX)
        except aiohttp.ClientError as error:
            raise ConfigError(f"{url} cannot be reached: {error}") from error
        except TimeoutError as error:
            raise ConfigError(f"{url} gives no answer") from error
        if status in NO_LIST and self.model:
            return None
        if status != 200:
            raise ConfigError(
                f"{url} answers with status {status}: {complaint(body)} (a base URL "
                "usually ends in /v1)"
            )
        try:
            return [model.id for model in msgspec.json.decode(body, type=Models).data]
        except UNREADABLE as error:
            raise ConfigError(f"{url} lists no models: {error}") from error


class AnswerReader:
    """Turns the bytes of a streamed answer into its text.

    ``done`` once the server has said that nothing follows.
    """

    def __init__(self) -> None:
        self.done = False
        self._events = EventReader()
        self._finish_reason: str | None = None
        self._usage: Usage | None = None

    def feed(self, data: bytes) -> str:
        """Take a read; return the text that it completes.

        Raises JobError if the server reports one or breaks the format.
        """
        try:
            return "".join([self._take(event) for event in self._events.feed(data)])
        except LimitExceeded as error:
            raise JobError(f"the server sent too much: {error}") from error

    def finished(self) -> Finished:
        """Say how the answer ended.  Raises Unavailable if it only broke off."""
        if not self.done and self._finish_reason is None:
            raise Unavailable("the server's answer ended in the middle")
        return Finished(self._finish_reason or "stop", self._usage)

    def _take(self, event: bytes) -> str:
        if self.done:
            return ""
        if event == b"[DONE]":
            self.done = True
            return ""
        try:
            chunk = msgspec.json.decode(event, type=Chunk)
        except UNREADABLE as error:
            raise JobError(f"the server sent no chat chunk: {error}") from error
        if chunk.problem is not None:
            raise JobError(chunk.problem)
        self._finish_reason = chunk.finish_reason or self._finish_reason
        if (tokens := chunk.usage) is not None and tokens.plausible:
            self._usage = Usage(tokens.prompt_tokens, tokens.completion_tokens)
        return chunk.text


def request_of(chat: Chat, model: str) -> bytes:
    """Return the chat as the body of a streamed request."""
    request: dict[str, object] = {
        **chat.options,
        "model": model,
        "messages": chat.messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if chat.max_tokens is not None:
        request["max_tokens"] = chat.max_tokens
    if chat.temperature is not None:
        request["temperature"] = chat.temperature
    return msgspec.json.encode(request)


async def check_answer(response: aiohttp.ClientResponse) -> None:
    """Let only a stream pass.

    Raises Unavailable if the server is busy or starting, and JobError if it refuses
    the chat or sends something else.
    """
    if response.status in BUSY:
        message = complaint(await read_some(response, REPLY_MAX))
        wait = response.headers.get("Retry-After", "")
        if wait.isascii() and wait.isdigit() and len(wait) < 10:
            raise Unavailable(message, retry_after=min(int(wait), RETRY_AFTER_MAX))
        raise Unavailable(message)
    if response.status != 200:
        message = complaint(await read_some(response, REPLY_MAX))
        raise JobError(f"the server answers with status {response.status}: {message}")
    if response.content_type != "text/event-stream":
        raise JobError(
            f"the server sent {response.content_type}, expected text/event-stream"
        )


async def read_some(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the body, or its first ``limit`` bytes."""
    body = b""
    async for data in response.content.iter_any():
        body += data
        if len(body) >= limit:
            break
    return body[:limit]


def complaint(body: bytes) -> str:
    """Return the message in the body of a refusal, or else how it begins."""
    try:
        problem = msgspec.json.decode(body, type=Chunk).problem
    except UNREADABLE:
        problem = None
    return problem or body.decode(errors="replace").strip()[:ERROR_MAX] or "no message"
