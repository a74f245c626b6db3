"""An engine that is a server elsewhere: anything that speaks OpenAI's protocol.

Source: OpenAI API reference, "Create chat completion", "Create completion", "Create
embeddings", "Streaming" and "List models".
"""

import asyncio
import base64
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from urllib.parse import unquote

import aiohttp

from shoal.domain.errors import (
    ConfigError,
    InvalidRequest,
    JobError,
    ShoalError,
    Unavailable,
)
from shoal.domain.work import INFERENCES, Embedding, Inference
from shoal.domain.worker import Model
from shoal.engines.answers import AnswerReader
from shoal.engines.catalog import Catalog, Listed, NoList, Question, Reply
from shoal.engines.embeddings import ANSWER_MAX, read_vectors
from shoal.engines.flavours import UNKNOWN, Flavour, describe
from shoal.engines.port import Finished, Item
from shoal.engines.reaching import read_some, reason_of, split_url
from shoal.engines.refusals import NotServed, failure, read_problem, refusal
from shoal.engines.requests import (
    Request,
    choices_in,
    prompts_in,
    refuse_ignored,
    request_of,
)
from shoal.engines.trials import Doubts, trial_of

CONNECT_LIMIT = 10.0  # seconds
LIST_LIMIT = 30.0  # seconds for the first look at a server, which may be busy
TRIAL_LIMIT = 3.0  # seconds
LIST_MAX = 4 * 1024 * 1024  # bytes
REPLY_MAX = 64 * 1024  # bytes of a refusal that are read
KEEP = 2.0  # seconds a connection is kept for the next job: less than servers do
STALE_MAX = 2  # kept connections in a row that may turn out to be closed
LARGE = 1024 * 1024  # bytes that are decoded beside the loop

LATEST = ":latest"  # Ollama answers to a name without it

NO_LIST = frozenset({404, 405})  # a small server may not list its models
JSON = {"Content-Type": "application/json"}


class OpenAIEngine:
    """Passes jobs on to a server.

    Args:
        url: what comes before ``/chat/completions``; ``/v1`` is added to a URL without
            a path, as that is where servers have it.  A user and password in it are
            sent as such, and shown nowhere.
        names: the models of a server that has no list of them.
        slots: jobs that the server is sent at the same time; 0: what it does well.
        api_key: sent as a bearer token; empty: none is sent.
    """

    def __init__(
        self, url: str, names: Sequence[str] = (), *, slots: int = 0, api_key: str = ""
    ) -> None:
        self.url, userinfo = split_url(url)
        self.slots = slots
        self._slots_given = slots > 0
        self._names = tuple(names)
        self._headers, self._secret = {}, api_key
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        elif userinfo:
            login = base64.b64encode(unquote(userinfo).encode()).decode()
            self._headers["Authorization"] = f"Basic {login}"
            self._secret = unquote(userinfo).partition(":")[2]
        self._session: aiohttp.ClientSession | None = None
        self._catalog: Catalog | None = None
        self._listed: dict[str, Listed] = {}
        self._doubts = Doubts()

    @property
    def models(self) -> Sequence[Model]:
        models = (self._doubts.without(each.model) for each in self._listed.values())
        return [model for model in models if model is not None]

    @property
    def flavour(self) -> Flavour | None:
        """What kind of server it is, once that is known."""
        return self._catalog.flavour if self._catalog is not None else None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            # How long an answer may take is for whoever waits for it to say.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP),
        )
        try:
            async with asyncio.timeout(LIST_LIMIT):
                await self.refresh()
        except TimeoutError as error:
            await self.close()
            raise ConfigError(f"{self.url}/models gives no answer") from error
        except Unavailable as error:
            await self.close()
            raise ConfigError(f"{self.url}/models: {error}") from error
        except BaseException:
            await self.close()
            raise
        if not self._listed:
            await self.close()
            raise ConfigError(f"{self.url} has no models: give it one to run")

    async def refresh(self) -> None:
        catalog = self._catalog or Catalog(self._ask)
        try:
            listed = await catalog.look()
        except NoList as error:
            if error.status not in NO_LIST or not self._names:
                self._catalog = None
                raise
            listed = [Listed(describe(UNKNOWN, name), name) for name in self._names]
        except BaseException:
            # What answers there next may be another server.
            self._catalog = None
            raise
        self._catalog = catalog
        self._listed = {each.model.name: each for each in listed}
        if not self._slots_given:
            self.slots = catalog.slots
        await self._try_doubtful()

    async def run(
        self, work: Inference, continues: str = ""
    ) -> AsyncGenerator[Item, None]:
        assert not continues, "going on is not offered"
        if self._session is None:
            raise Unavailable("the engine is not running")
        if (flavour := self.flavour) is not None:
            refuse_ignored(work, flavour)
        listed = self._find(work.model)
        request = request_of(work, listed.id if listed is not None else work.model)
        answer = AnswerReader(choices_in(work.options), prompts_in(work), self._secret)
        try:
            async with await self._post(self._session, request) as response:
                try:
                    if isinstance(work, Embedding):
                        for item in await self._vectors(response, len(work.inputs)):
                            yield item
                        return
                    await self._check(response, "text/event-stream")
                    async for data in response.content.iter_any():
                        for piece in answer.feed(data):
                            yield piece
                        if answer.done:
                            break
                finally:
                    # Hanging up is how a server learns to stop, and what a server
                    # sends after the end may never come.
                    if not response.content.at_eof():
                        response.close()
        except NotServed as error:
            if listed is not None:
                kinds = INFERENCES if error.model else frozenset({work.kind})
                self._doubts.add(listed.model.name, kinds)
            raise
        except aiohttp.ClientError as error:
            raise Unavailable(f"{self.url}: {reason_of(error)}") from error
        yield answer.finished()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _find(self, name: str) -> Listed | None:
        """Return the model that the server takes ``name`` for."""
        return self._listed.get(name) or self._listed.get(name + LATEST)

    async def _vectors(
        self, response: aiohttp.ClientResponse, inputs: int
    ) -> list[Item]:
        await self._check(response, "application/json")
        body = await read_some(response, ANSWER_MAX + 1)
        if len(body) > ANSWER_MAX:
            raise JobError(f"the engine sent more than {ANSWER_MAX} bytes")
        if len(body) > LARGE:
            read = asyncio.to_thread(read_vectors, body, inputs, self._secret)
            pieces, usage = await read
        else:
            pieces, usage = read_vectors(body, inputs, self._secret)
        return [*pieces, Finished("stop", usage)]

    async def _post(
        self, session: aiohttp.ClientSession, request: Request
    ) -> aiohttp.ClientResponse:
        """Send a job; return the answer's head.

        A server may close a connection that was kept just when it is used again; then
        the job is sent again on another, for at worst a model has begun it twice.
        """
        for tries_left in range(STALE_MAX, -1, -1):
            try:
                return await session.post(
                    f"{self.url}{request.path}",
                    data=request.body,
                    headers=JSON,
                    allow_redirects=False,
                )
            except aiohttp.ClientConnectorError:
                raise  # there was no connection to be closed
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _check(self, response: aiohttp.ClientResponse, expected: str) -> None:
        """Let only an answer of the type that is expected pass."""
        type_ = response.content_type
        if response.status != 200:
            raise refusal(
                response.status,
                type_,
                await read_some(response, REPLY_MAX),
                retry_after=response.headers.get("Retry-After", ""),
                secret=self._secret,
            )
        if type_ != expected:
            body = await read_some(response, REPLY_MAX)
            if "json" in type_ and read_problem(body) is not None:
                raise failure(body, self._secret)
            raise JobError(f"the engine sent {type_}, expected {expected}")

    async def _ask(self, question: Question) -> Reply:
        if self._session is None:
            raise Unavailable("the engine is not running")
        url = self.url.removesuffix("/v1") if question.own else self.url
        try:
            async with self._session.request(
                "GET" if question.body is None else "POST",
                f"{url}{question.path}",
                data=question.body,
                headers=JSON if question.body is not None else {},
                allow_redirects=False,
            ) as response:
                body = await read_some(response, LIST_MAX)
                return Reply(
                    response.status,
                    body.replace(self._secret.encode(), b"...")
                    if self._secret
                    else body,
                    response.content_type,
                    response.headers.get("Server", ""),
                )
        except aiohttp.ClientError as error:
            raise Unavailable(f"it cannot be reached: {reason_of(error)}") from error

    async def _try_doubtful(self) -> None:
        """Find out whether what was refused lately works now."""
        self._doubts.keep(self._listed)
        for name, kind in self._doubts.due():
            self._doubts.add(name, (kind,))
            try:
                async with (
                    asyncio.timeout(TRIAL_LIMIT),
                    aclosing(self.run(trial_of(name, kind))) as items,
                ):
                    await anext(items)
            except (InvalidRequest, TimeoutError):
                # What it lacks it refuses at once; a model that it has is loaded first.
                self._doubts.remove(name, kind)
            except ShoalError:
                continue
            else:
                self._doubts.remove(name, kind)
