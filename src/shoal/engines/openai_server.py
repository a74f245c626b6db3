"""The engine for a model server with an OpenAI-compatible API.

Source: OpenAI API reference, "Create chat completion", "Create completion", "Create
embeddings", "Streaming" and "List models".
"""

import asyncio
import base64
import os
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from urllib.parse import unquote, urlsplit

import aiohttp
from msgspec import structs
from yarl import URL

from shoal.domain import errors
from shoal.domain import work as works
from shoal.domain.addresses import has_space
from shoal.domain.job_kinds import INFERENCE_KINDS
from shoal.domain.outcome import AnswerPiece, Delta, Usage
from shoal.domain.server_refusals import stated_context
from shoal.domain.worker import ServedModel
from shoal.engines import continuation, requests, server_errors
from shoal.engines.catalog import (
    LATEST,
    ListedModel,
    NoModelList,
    QueryServer,
    ServerCatalog,
    ServerQuery,
    ServerReply,
)
from shoal.engines.engine import TRACEPARENT, Finished, Item
from shoal.engines.input_answers import INPUT_ANSWER_MAX, decode_input_answer
from shoal.engines.messages import engine_messages
from shoal.engines.requests import FieldIgnored, check_heeded
from shoal.engines.server_control import ServerControl
from shoal.engines.server_kinds import NO_TEXT, UNKNOWN, ServerKind, Way, describe_model
from shoal.engines.streams.answers import AnswerReader


def split_url(url: str) -> tuple[str, str]:
    """Return the base URL, and the user and password in it.

    Raises ConfigError if the URL is invalid.
    """
    expected = "expected http://HOST:PORT/v1"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # an invalid port raises
    except ValueError as error:
        raise errors.ConfigError(f"engine URL: {error}; {expected}") from error
    if parts.scheme not in ("http", "https") or not host or has_space(url):
        raise errors.ConfigError(f"engine URL: {expected}")
    userinfo, _, location = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{location}{parts.path.rstrip('/') or '/v1'}", userinfo


async def read_prefix(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the body, or its first ``limit`` bytes."""
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) >= limit:
            break
    return bytes(body[:limit])


def describe_client_error(error: aiohttp.ClientError) -> str:
    """Describe why a request to a server failed, without the server's URL.

    It becomes the reason of a job's end, and only its owner needs to know the address.
    """
    match error:
        case aiohttp.ClientResponseError():  # raised only if the answer is not HTTP
            return "the server there does not speak HTTP"
        case aiohttp.InvalidURL():
            return "invalid address"
        case aiohttp.ServerTimeoutError():
            return "no answer"
        case aiohttp.ClientConnectorCertificateError():
            return f"invalid certificate: {error.certificate_error}"
        case aiohttp.ClientConnectorError():
            if isinstance(error.os_error, ConnectionRefusedError):
                return "connection refused"  # the system's own text has the address
            return _of_system(error.os_error)
        case aiohttp.ClientOSError():
            return _of_system(error)
        case _:
            return str(error) or type(error).__name__


def _of_system(error: OSError) -> str:
    # An event loop's text may repeat the address, but for names that are not found.
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or type(error).__name__
    return os.strerror(error.errno)


def form_data(form: requests.AudioForm) -> aiohttp.FormData:
    """Return a form for one request."""
    data = aiohttp.FormData(form.fields)
    data.add_field(
        *("file", form.audio),
        filename=form.file_name,
        content_type="application/octet-stream",
    )
    return data


def _of_choice(item: Item, choice: int) -> AnswerPiece:
    """Return an item of an answer with one choice as a piece of this choice."""
    match item:
        case str():
            return Delta(choice, {"content": item})
        case Delta():
            return structs.replace(item, choice=choice)
        case Finished():
            return Delta(choice, finish_reason=item.finish_reason)


def _with_usage_of(one: Finished, end: Finished) -> Finished:
    """Return the end of an answer with the tokens of one more choice."""
    if one.usage is None or end.usage is None:
        return replace(end, usage=None)
    written = one.usage.completion_tokens + end.usage.completion_tokens
    return replace(end, usage=Usage(end.usage.prompt_tokens, written))


CONNECT_LIMIT = 10.0  # seconds
LIST_LIMIT = 30.0  # seconds for the first list of a server, which may be busy
TRIAL_LIMIT = 3.0  # seconds
WAY_LIMIT = 6.0  # seconds for the trial of how a model continues answers
BUSY_TRIALS_MAX = 5  # such trials that a busy server may leave without a result
RESIDENT_MAX = 4  # models that a server has loaded: adapters of one, say
LIST_MAX = 4 * 1024 * 1024  # bytes
REPLY_MAX = 64 * 1024  # bytes of an error response that are read
KEEPALIVE = 2.0  # seconds an idle connection is kept: less than servers keep it
END_WITHIN = 1.0  # seconds after the last event, for a connection to be used again
STALE_MAX = 2  # consecutive kept connections that may turn out to be closed
DECODE_INLINE_MAX = 1024 * 1024  # bytes that are decoded in the event loop's thread

LOADING_STATUS = 503  # of a server that loads its model, or of a proxy before one
NO_LIST_STATUSES = frozenset({404, 405})  # a small server may not list its models
MEDIA = ("image/", "audio/", "video/")
JSON_HEADERS = {"Content-Type": "application/json"}


class EngineLoading(errors.ConfigError):
    """The server has no list of models yet: it is starting."""


class OpenAIEngine:
    """Forwards jobs to a server.

    Args:
        url: base URL before ``/chat/completions``; ``/v1`` is appended to a URL without
            a path.  A user and password in it are sent as basic authentication, and
            never shown.
        names: models of a server that does not list them.
        slots: concurrent jobs; 0: the default for this kind of server.
        api_key: bearer token; empty: none.
        any_field: whether it gets fields that Shoal does not know; None: if its kind
            has many.
        control: returns what loads and unloads its models; None: it has all models
            that it lists, and else those that are loaded.
    """

    def __init__(
        self,
        url: str,
        names: Sequence[str] = (),
        *,
        slots: int = 0,
        api_key: str = "",
        any_field: bool | None = None,
        control: Callable[[QueryServer], ServerControl] | None = None,
    ) -> None:
        self.control = None if control is None else control(self.query)
        self.url, userinfo = split_url(url)
        self._any_field = any_field
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
        self._ending: set[aiohttp.ClientResponse] = set()  # see ``_await_end``
        self._catalog: ServerCatalog | None = None
        self.server_kind: ServerKind | None = None  # once it is known
        self._listed: dict[str, ListedModel] = {}
        self._refused = server_errors.RefusedWork()
        # How models continue answers, by name, once it was tried; those that have
        # answered, and so are loaded; and how often a trial found the server busy.
        self._ways: dict[str, Way | None] = {}
        self._answered: set[str] = set()
        self._busy_trials: Counter[str] = Counter()
        # Features that models have been found to lack, by name.
        self._lacking: dict[str, frozenset[works.Feature]] = {}
        # Parts of requests that the server refuses, by the model's name on it.
        self._refused_parts: dict[str, frozenset[str]] = {}

    @property
    def models(self) -> Sequence[ServedModel]:
        models = (
            self._refused.supported(each.model)
            for each in self._listed.values()
            if self.control is None or not self.control.is_leaving(each.id)
        )
        return [
            structs.replace(model, features=self._features(model))
            for model in models
            if model is not None
        ]

    def _features(self, model: ServedModel) -> frozenset[works.Feature]:
        features = set(model.features)
        if self._any_field is not None and not model.kinds <= NO_TEXT:
            features -= {works.Feature.FIELDS}
            features |= {works.Feature.FIELDS} if self._any_field else set()
        if self._ways.get(model.name):
            features.add(works.Feature.CONTINUE)
        return frozenset(features - self._lacking.get(model.name, frozenset()))

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            # The caller limits the time of an answer.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE),
        )
        try:
            async with asyncio.timeout(LIST_LIMIT):
                await self.refresh()
        except TimeoutError as error:
            await self.close()
            raise errors.ConfigError(f"{self.url}/models does not answer") from error
        except errors.Unavailable as error:
            await self.close()
            loads = isinstance(error, NoModelList) and error.status == LOADING_STATUS
            kind = EngineLoading if loads else errors.ConfigError
            raise kind(f"{self.url}/models: {error}") from error
        except BaseException:
            await self.close()
            raise
        if not self._listed and not (self.control and self.control.served):
            await self.close()
            raise errors.ConfigError(f"{self.url} has no models: give it one to run")

    async def refresh(self) -> None:
        catalog = self._catalog or ServerCatalog(self.query)
        try:
            listed = await catalog.refresh()
        except NoModelList as error:
            if error.status not in NO_LIST_STATUSES or not self._names:
                self._forget_server()
                raise
            listed = [
                ListedModel(describe_model(UNKNOWN, name), name) for name in self._names
            ]
        except BaseException:
            self._forget_server()
            raise
        self._catalog, self.server_kind = catalog, catalog.server_kind
        if self.control is not None:
            listed = await self.control.refresh(catalog.server_kind, listed)
        self._listed = {each.model.name: each for each in listed}
        if not self._slots_given:
            self.slots = catalog.slots
        await self._retry_refused()
        await self._find_ways()

    async def run(
        self, work: works.Inference, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Item, None]:
        control = self.control
        running = "" if control is None else control.begin(work.model)
        try:
            answer = await self._answer(work, continues, thoughts)
            async with aclosing(answer) as items:
                async for item in items:
                    yield item
        except FieldIgnored as error:
            if (listed := self._find(work.model)) is not None and error.feature:
                lacking = self._lacking.get(listed.model.name, frozenset())
                self._lacking[listed.model.name] = lacking | {error.feature}
            raise
        except server_errors.NotServed as error:
            if (listed := self._find(work.model)) is not None:
                kinds = INFERENCE_KINDS if error.model else frozenset({work.kind})
                self._refused.add(listed.model.name, kinds)
            raise
        finally:
            if control is not None:
                control.end(running)

    async def _answer(
        self, work: works.Inference, continues: str, thoughts: str
    ) -> AsyncGenerator[Item, None]:
        """Return the answer, whose request is not sent yet."""
        if (listed := self._find(work.model)) is not None and listed.fields:
            work = structs.replace(work, options={**listed.fields, **work.options})
        if requests.is_begun(work):
            await self._check_continues(work)
        answer = self.generate(work)
        if (continues or thoughts) and isinstance(work, works.Chat | works.Completion):
            if (way := self._way_of(work)) is None:
                raise errors.Unavailable(
                    "the engine cannot continue an answer of this model"
                )
            begun = work if listed is None else structs.replace(work, model=listed.id)
            if isinstance(begun, works.Chat):
                refused = self._refused_by(begun.model)
                messages = engine_messages(begun.messages, refused)
                begun = structs.replace(begun, messages=tuple(messages))
            answer = continuation.continue_answer(self, begun, continues, way, thoughts)
        return check_heeded(work, answer) if self.server_kind is UNKNOWN else answer

    async def generate(
        self, work: works.Inference, flags: Mapping[str, works.JSON] | None = None
    ) -> AsyncGenerator[Item, None]:
        """Run ``work`` from its beginning; ``flags`` are more fields of a chat."""
        if (server := self.server_kind) is not None:
            if not server.chooses_tools:
                work = requests.with_chosen_tools(work)
            requests.reject_ignored_options(work, server)
        listed = self._find(work.model)
        if flags is None and requests.is_begun(work):
            way = self._proven_way(work.model)
            takes_flags = way in (Way.FLAGS, Way.TOKENS)
            if way is None and server is not None:
                takes_flags = server.continues
            # Without the flags, it would begin a new answer.
            flags = requests.CONTINUE_FLAGS if takes_flags else None
        name = listed.id if listed is not None else work.model
        answer = AnswerReader(
            requests.choice_count(work.options),
            requests.prompt_count(work),
            self._secret,
        )
        try:
            response = await self._open(work, name, flags)
            try:
                if isinstance(work, works.InputWork):
                    for item in await self._read_whole(response, work):
                        yield item
                    return
                if refused := self._refused_by(name):
                    answer.stop_at(requests.unsent_stops(work, refused))
                while data := await response.content.readany():
                    for piece in answer.feed(data):
                        yield piece
                    if answer.done:
                        break
                for piece in answer.end():
                    yield piece
            finally:
                if answer.done and not response.content.at_eof():
                    self._await_end(response)
                elif not response.content.at_eof():
                    response.close()  # which stops the server
        except aiohttp.ClientError as error:
            reason = describe_client_error(error)
            raise server_errors.ServerLost(f"the model's server: {reason}") from error
        if listed is not None:
            self._answered.add(listed.model.name)
        end = answer.finished()
        for choice in answer.missing:
            # The server makes one at a time, and may not say so.
            single = self.generate(requests.single_choice(work, choice), flags)
            async with aclosing(single) as items:
                async for item in items:
                    if isinstance(item, Finished):
                        end = _with_usage_of(item, end)
                    yield _of_choice(item, choice)
        yield end

    async def query(self, query: ServerQuery) -> ServerReply:
        """Query the server.  Raises Unavailable if it does not respond."""
        if self._session is None:
            raise errors.Unavailable("the engine is not running")
        url = self.url.removesuffix("/v1") if query.native else self.url
        try:
            async with await self._request(
                self._session, f"{url}{query.path}", query.body
            ) as response:
                body = await read_prefix(response, LIST_MAX)
                return ServerReply(
                    response.status,
                    body.replace(self._secret.encode(), b"...")
                    if self._secret
                    else body,
                    response.content_type,
                    response.headers.get("Server", ""),
                )
        except aiohttp.ClientError as error:
            raise server_errors.ServerLost(
                f"it cannot be reached: {describe_client_error(error)}"
            ) from error

    async def close(self) -> None:
        for response in list(self._ending):
            self._end(response)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _await_end(self, response: aiohttp.ClientResponse) -> None:
        """Keep the connection of a whole answer, if its body ends soon as well.

        Servers send that end in a packet of its own, and some never do.
        """
        self._ending.add(response)
        asyncio.get_running_loop().call_later(END_WITHIN, self._end, response)

    def _end(self, response: aiohttp.ClientResponse) -> None:
        self._ending.discard(response)
        response.close()

    def _find(self, name: str) -> ListedModel | None:
        """Return the model that ``name`` refers to on the server."""
        return self._listed.get(name) or self._listed.get(name + LATEST)

    def _way_of(self, work: works.Chat | works.Completion) -> Way | None:
        """Return the proven way in which an answer is continued."""
        if isinstance(work, works.Completion):
            return Way.MESSAGE  # a text is continued by any server
        return self._proven_way(work.model)

    def _proven_way(self, name: str) -> Way | None:
        listed = self._find(name)
        return None if listed is None else self._ways.get(listed.model.name)

    async def _check_continues(self, work: works.Chat) -> None:
        """Raise CannotDo if the server would begin a new answer to a begun chat."""
        if (listed := self._find(work.model)) is None:
            return
        if listed.model.name not in self._ways:
            self._ways[listed.model.name] = await continuation.find_way(self, listed.id)
        if self._ways[listed.model.name] is None:
            kind = self.server_kind
            if kind is not None and kind.continues:
                counted = await continuation.prompt_tokens(
                    self, works.Chat(listed.id, continuation.QUESTION)
                )
                if counted is None:
                    return  # nothing can be proved
            raise errors.CannotDo(
                "messages: the last one is the assistant's, and the engine of this "
                "model cannot continue it. End with a message of the user, or use a "
                "model whose engine continues answers, as `shoal status` shows",
                "messages",
            )

    def _refused_by(self, name: str) -> frozenset[str]:
        """Return the parts of requests to a model that the server refuses."""
        return self._refused_parts.get(name, frozenset())

    async def _open(
        self, work: works.Inference, name: str, flags: Mapping[str, works.JSON] | None
    ) -> aiohttp.ClientResponse:
        """Send a job; return the response, whose body is the answer.

        What the server refuses and can do without is left out, now and henceforth.
        """
        if self._session is None:
            raise errors.Unavailable("the engine is not running")
        expected = "application/json"
        if not isinstance(work, works.InputWork):
            expected = "text/event-stream"
        refused, clamped = self._refused_by(name), False
        while True:
            request = requests.openai_request(work, name, flags, refused)
            response = await self._request(
                self._session, f"{self.url}{request.path}", request.form or request.body
            )
            try:
                await self._check(response, expected)
            except errors.ContextExceeded as error:
                response.close()
                if clamped or isinstance(work, works.InputWork):
                    raise
                work, clamped = await self._clamped(work, flags, error), True
            except errors.ShoalError as error:
                response.close()
                parts = request.parts - refused
                if (part := requests.refused_part(error, parts)) is None:
                    raise
                refused |= {part}
            except BaseException:
                response.close()
                raise
            else:
                if refused:
                    self._refused_parts[name] = refused
                return response

    async def _clamped(
        self,
        work: works.Chat | works.Completion,
        flags: Mapping[str, works.JSON] | None,
        error: errors.ContextExceeded,
    ) -> works.Chat | works.Completion:
        """Return a job with what the context leaves as the limit of its answer.

        Raises ``error`` if that is not what exceeds the context.  Many servers end such
        an answer at the end of the context, and others refuse it.
        """
        limit, listed = work.max_tokens, self._find(work.model)
        context = stated_context(str(error)) or (listed and listed.model.context)
        if not (limit and limit > 1 and context):
            raise error
        read = await continuation.prompt_tokens(self, work, flags)
        if read is None or not 0 < context - read < limit:
            raise error
        return structs.replace(work, max_tokens=context - read)

    async def _read_whole(
        self, response: aiohttp.ClientResponse, work: works.InputWork
    ) -> list[Item]:
        body = await read_prefix(response, INPUT_ANSWER_MAX + 1)
        if len(body) > INPUT_ANSWER_MAX:
            raise errors.JobError(f"the engine sent more than {INPUT_ANSWER_MAX} bytes")
        if len(body) > DECODE_INLINE_MAX:
            read = asyncio.to_thread(decode_input_answer, work, body, self._secret)
            pieces, usage = await read
        else:
            pieces, usage = decode_input_answer(work, body, self._secret)
        return [*pieces, Finished("stop", usage)]

    async def _request(
        self,
        session: aiohttp.ClientSession,
        url: str,
        body: bytes | requests.AudioForm | None,
    ) -> aiohttp.ClientResponse:
        """Send a request, GET without a body; return the response, its body unread.

        A server may close a kept connection just as it is reused.  The request is then
        sent again on another: at worst, a model starts a job twice.
        """
        headers = JSON_HEADERS if isinstance(body, bytes) else {}
        if traceparent := TRACEPARENT.get():
            headers = headers | {"traceparent": traceparent}
        for retries_left in range(STALE_MAX, -1, -1):
            try:
                return await session.request(
                    "GET" if body is None else "POST",
                    # As it was given; yarl only encodes a name in another script.
                    URL(url, encoded=url.isascii()),
                    # A form can be sent only once.
                    data=form_data(body)
                    if isinstance(body, requests.AudioForm)
                    else body,
                    headers=headers,
                    allow_redirects=False,
                )
            except aiohttp.ClientConnectorError:
                raise  # no connection was made, so none was stale
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                if not retries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _check(self, response: aiohttp.ClientResponse, expected: str) -> None:
        """Raise if the response is an error, or of a type that is never ``expected``.

        Some servers give JSON and streams another type than they should.
        """
        type_ = response.content_type
        if not 200 <= response.status < 300:
            raise server_errors.refusal_error(
                response.status,
                type_,
                await read_prefix(response, REPLY_MAX),
                retry_after=response.headers.get("Retry-After", ""),
                secret=self._secret,
            )
        if "html" in type_ or type_.startswith(MEDIA):
            raise errors.JobError(f"the engine sent {type_}, expected {expected}")

    def _forget_server(self) -> None:
        """Another server may answer at this address next."""
        self._catalog = self.server_kind = None
        if self.control is not None:
            self.control.forget()
        self._ways.clear()
        self._lacking.clear()
        self._answered.clear()
        self._busy_trials.clear()
        self._refused_parts.clear()

    async def _find_ways(self) -> None:
        """Try how models continue answers: those that are loaded, each once."""
        resident = (
            self.server_kind is not None
            and self.server_kind.resident
            and len(self._listed) <= RESIDENT_MAX
        )
        for name, listed in self._listed.items():
            loaded = (resident and listed.is_loaded) or name in self._answered
            chats = works.JobKind.CHAT in listed.model.kinds
            tried = name in self._ways or self._busy_trials[name] >= BUSY_TRIALS_MAX
            if tried or not (loaded and chats):
                continue
            try:
                async with asyncio.timeout(WAY_LIMIT):
                    self._ways[name] = await continuation.find_way(self, listed.id)
            except (errors.Unavailable, TimeoutError):
                self._busy_trials[name] += 1

    async def _retry_refused(self) -> None:
        """Retry refused work with minimal jobs."""
        self._refused.retain(self._listed)
        for name, kind in self._refused.due():
            self._refused.add(name, (kind,))
            try:
                async with (
                    asyncio.timeout(TRIAL_LIMIT),
                    aclosing(self.run(server_errors.minimal_job(name, kind))) as items,
                ):
                    await anext(items)
            except (errors.InvalidRequest, TimeoutError):
                # A server rejects a missing model at once; it loads others first.
                self._refused.remove(name, kind)
            except errors.ShoalError:
                continue
            else:
                self._refused.remove(name, kind)
