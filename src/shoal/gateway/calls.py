"""Function calls over HTTP: the functions, a WebSocket to call them, and large values.

``/v1/tasks`` lists functions, ``/v1/calls`` is a WebSocket for many calls at a time
(docs/protocols/calls.md), and ``/v1/blobs`` holds large values by the SHA-256 of their
bytes.
"""

import asyncio
import re
from collections import Counter
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import msgspec
from aiohttp import WSMsgType, web

from shoal.calls.messages import SendQueue, decode_items
from shoal.calls.session import CallSession
from shoal.coordinator.answer_reader import AnswerCursor
from shoal.domain.credentials import Scope
from shoal.domain.errors import ClientError, InvalidRequest
from shoal.domain.ids import JobId
from shoal.domain.job import Job, Policy, Priority
from shoal.domain.work import CALL_QUEUE, Feature, JobKind
from shoal.gateway.context import CallsGateway
from shoal.gateway.http.access import Access, ApiCaller
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.request_record import record_of
from shoal.gateway.http.responses import BYTES_TYPE
from shoal.gateway.metrics.monitoring import METRICS
from shoal.store.blobs import BLOB_MAX, blob_not_found
from shoal.transports.loop_share import LARGE, LoopShare

api = Operations()

CALLS_PATH = "/v1/calls"
MESSAGE_MAX = (64 << 20) + (1 << 16)  # bytes: about what workers of any wire accept
ITEMS_AT_ONCE = 256  # items of a message handled together: about 5 ms
MANY_ITEMS = 1024  # of a message, as many as Shoal's clients send: more wait for turns
PING_EVERY = 20.0  # seconds
CLOSE_TIMEOUT = 2.0  # seconds for the client's half of the closing handshake
POLICY_VIOLATION = 1008  # WebSocket close codes (RFC 6455, section 7.4.1)
INVALID_DATA = 1007
QUEUE_OVERFLOW = "the client left too many messages unread"


NAMES_MAX = 10_000  # functions in one answer: the first ones by name


class FunctionInfo(msgspec.Struct, frozen=True):
    """A function, its number of workers, and the calls they run at a time."""

    name: str
    workers: int
    slots: int


class FunctionList(msgspec.Struct, frozen=True):
    """The functions by name.

    ``workers`` and ``slots`` count all workers that run functions, ``code`` those that
    run functions sent with a call, and ``unnamed`` those that do not list theirs.
    """

    tasks: list[FunctionInfo]
    workers: int
    slots: int
    code: int
    unnamed: int


@api.get("/v1/tasks", "List the functions", Scope.READ, by_calls=True)
async def list_functions(gateway: CallsGateway) -> FunctionList:
    found = gateway.hub.pool.roster.with_model.get(CALL_QUEUE, {})
    offers = [worker.offer for worker in found.values() if worker.accepts_jobs]
    workers: Counter[str] = Counter()
    slots: Counter[str] = Counter()
    for offer in offers:
        for name in offer.tasks:
            workers[name] += 1
            slots[name] += offer.slots
    functions = [
        FunctionInfo(name, workers[name], slots[name])
        for name in sorted(workers)[:NAMES_MAX]
    ]
    features = [offer.features for offer in offers]
    return FunctionList(
        functions,
        len(offers),
        sum(offer.slots for offer in offers),
        sum(Feature.CODE in each for each in features),
        sum(
            not offer.tasks and Feature.VALUES not in offer.features for offer in offers
        ),
    )


@api.get(
    CALLS_PATH, "Call functions, over a WebSocket", Scope.USE, by_calls=True, status=101
)
async def open_calls(
    gateway: CallsGateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    socket = web.WebSocketResponse(
        timeout=CLOSE_TIMEOUT,
        heartbeat=PING_EVERY,
        max_msg_size=MESSAGE_MAX,
        compress=False,
    )
    gateway.pages.check_upgrade(request.headers)
    if not socket.can_prepare(request):
        raise InvalidRequest(
            f"{CALLS_PATH} is a WebSocket: connect with ws:// or wss://"
        )
    await socket.prepare(request)
    record_of(request).upgraded = True
    async with asyncio.TaskGroup() as tasks:
        replies = SendQueue()
        session = CallSession(
            gateway.hub,
            gateway.calls,
            gateway.clock,
            _ClientAccess(gateway.access, caller),
            gateway.prices.price(Policy.FAST, JobKind.CALL),
            tasks.create_task,
            replies,
            request.app[METRICS].jobs.count_calls,
        )
        writing = tasks.create_task(_write(socket, replies))
        watching = tasks.create_task(
            _close_on_overflow(socket, replies, request.transport)
        )
        try:
            await _read(socket, session, gateway.bodies.share, caller.name)
        finally:
            session.close()
            writing.cancel()
            watching.cancel()
    return socket


@dataclass(frozen=True, slots=True)
class _ClientAccess:
    """The access of one HTTP client, as its call session needs it."""

    access: Access
    caller: ApiCaller

    @property
    def name(self) -> str:
        return self.caller.name

    def ensure_active(self) -> None:
        self.access.ensure_active(self.caller)

    def permitted_priority(self, wanted: Priority | None) -> Priority:
        return self.caller.permitted_priority(wanted)

    def count_call(self) -> None:
        self.access.count_call(self.caller)

    def submit(self, job: Job) -> AbstractAsyncContextManager[AnswerCursor]:
        return self.access.submit(job, self.caller)

    def on_submitted(self, job_id: JobId) -> None:
        self.caller.on_submitted(job_id)


async def _read(
    socket: web.WebSocketResponse, session: CallSession, share: LoopShare, owner: str
) -> None:
    """Receive the client's messages until the connection closes."""
    while True:
        message = await socket.receive()
        if message.type is not WSMsgType.BINARY:
            if message.type is WSMsgType.TEXT:
                await _close(
                    socket, INVALID_DATA, "expected MessagePack in binary messages"
                )
            return
        try:
            if len(message.data) < LARGE:
                items = decode_items(message.data)
            else:
                async with share.turn(owner):
                    items = decode_items(message.data)
            for begin in range(0, len(items) or 1, ITEMS_AT_ONCE):
                some = items[begin : begin + ITEMS_AT_ONCE]
                if len(items) > MANY_ITEMS:
                    async with share.turn(owner):
                        session.receive(some)
                    continue
                if begin:
                    await asyncio.sleep(0)  # others get their turn
                session.receive(some)
        except ClientError as error:
            await _close(socket, INVALID_DATA, str(error))
            return


async def _write(socket: web.WebSocketResponse, unread: SendQueue) -> None:
    """Send queued messages, as fast as the client reads."""
    try:
        while True:
            await socket.send_bytes(await unread.next_message())
    except ConnectionError:
        pass  # the client left; the reader notices by itself


async def _close_on_overflow(
    socket: web.WebSocketResponse,
    unread: SendQueue,
    transport: asyncio.Transport | None,
) -> None:
    """Disconnect a client that does not read."""
    await unread.wait_overflow()
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await _close(socket, POLICY_VIOLATION, QUEUE_OVERFLOW)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        if transport is not None:
            transport.abort()


async def _close(socket: web.WebSocketResponse, code: int, text: str) -> None:
    await socket.close(code=code, message=text.encode()[:123])


BLOB_PATH = "/v1/blobs/{digest}"
PIECE = 1 << 18  # bytes read and written at a time
PIECE_TIMEOUT = 60.0  # seconds for a client to read a piece
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


@api.add(
    "HEAD",
    BLOB_PATH,
    "Check whether a value is stored",
    Scope.USE,
    by_calls=True,
    documented=False,
)
async def check_blob(gateway: CallsGateway, request: web.Request) -> web.Response:
    """Check whether a value is stored; this also delays its eviction."""
    digest = digest_in(request)
    if gateway.hub.blobs.missing([digest]):
        raise blob_not_found(digest)
    return web.Response(content_type=BYTES_TYPE)


@api.get(BLOB_PATH, "Fetch a value", Scope.READ, by_calls=True, media=BYTES_TYPE)
async def fetch_blob(gateway: CallsGateway, request: web.Request) -> web.StreamResponse:
    # The digest is a capability: only clients that were given it, or have the value,
    # know it.
    return await send_value(request, await gateway.hub.blobs.read(digest_in(request)))


async def send_value(
    request: web.Request, data: bytes | memoryview
) -> web.StreamResponse:
    """Send a value, which may be large, as fast as the client reads it."""
    response = web.StreamResponse()
    response.content_type = BYTES_TYPE
    response.content_length = len(data)
    await response.prepare(request)
    # In pieces: it is a mapped file that may not be in memory.
    try:
        for begin in range(0, len(data), PIECE):
            async with asyncio.timeout(PIECE_TIMEOUT):
                await response.write(data[begin : begin + PIECE])
        await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # the client left
    return response


@api.put(
    BLOB_PATH, "Store a value", Scope.USE, by_calls=True, media=BYTES_TYPE, status=204
)
async def store_blob(
    gateway: CallsGateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    digest = digest_in(request)
    data = await gateway.bodies.read(request, BLOB_MAX)
    await gateway.hub.blobs.keep(data, digest, caller.name)
    return web.Response(status=204)


def digest_in(request: web.Request) -> bytes:
    text = request.match_info["digest"]
    if _DIGEST.fullmatch(text) is None:
        raise InvalidRequest(
            "digest: expected a SHA-256 of 64 hexadecimal digits", "digest"
        )
    return bytes.fromhex(text)
