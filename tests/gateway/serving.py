"""A complete coordinator on 127.0.0.1, and nodes that join it."""

import asyncio
import json
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType, web

from harness.databases import put_new_database
from harness.speed import scaled
from ledger.builders import PRICES
from protocols.contexts import SIGNER, protocol_context
from shoal.app.endpoints import anonymous_http
from shoal.app.front import FrontBodies, front_listener
from shoal.app.parts import HTTP_SOCKET, LINK_SOCKET
from shoal.batches.client_files import ClientFiles
from shoal.batches.runner import BatchRunner
from shoal.calls.durable import DurableCalls
from shoal.config.secret_files import new_secret
from shoal.coordinator.admission import WorkerAdmission, load_join_tokens
from shoal.coordinator.blob_transfer import BlobTransfer
from shoal.coordinator.hub import Hub
from shoal.domain.errors import Refused
from shoal.domain.ids import JobId
from shoal.domain.job import TimeLimits
from shoal.domain.moderation import Moderation
from shoal.front.front_access import FrontAccess
from shoal.front.hub_links import FrontLinks
from shoal.front.linked_jobs import Elsewhere, LinkedJobs, unix_connection
from shoal.gateway.all_operations import OPERATIONS
from shoal.gateway.app import Gateway, make_app
from shoal.gateway.batches.line_runner import PoolLineJobs
from shoal.gateway.http.access import Access, key_cache
from shoal.gateway.http.authentication import Keyring
from shoal.gateway.http.body import BodyReader
from shoal.gateway.http.browser_sessions import BrowserSessions
from shoal.gateway.http.ids import new_id
from shoal.gateway.http.web_origins import PagePolicy
from shoal.gateway.jobs.payments import NO_PAYMENTS, Payments
from shoal.gateway.jobs.webhooks import EgressPolicy
from shoal.gateway.metrics.monitoring import METRICS
from shoal.gateway.operators.event_log import EVENT_LOG, EventLog
from shoal.ledger.accounts import PriceList
from shoal.peers.connections import PeerConnections
from shoal.protocols import discover
from shoal.protocols.seam.endpoints import UpgradeRequest, WebSocketRoute
from shoal.store.blobs import BlobFiles
from shoal.store.file_folder import FileFolder
from shoal.store.signing_keys import SigningKeys
from shoal.store.sqlite.database import SqliteStore
from shoal.transports import websocket
from shoal.transports.clock import Clock, LoopClock
from shoal.transports.link_encryption import accept_encryption
from shoal.transports.strangers import Strangers

KEY = "sk-test-uZ5kq2Xv8RbN4tYw7Hc3"  # strong, as generated ones are
TOKEN = "nt"
WAIT_MAX = scaled(30.0)  # seconds until an expected event counts as missing
EPOCH = 1_700_000_000.0  # Unix time at which the clock was at 0


@dataclass(slots=True)
class Pool:
    """A running coordinator, and a client's session to talk to it.

    ``log`` has its events; ``close`` closes its port.  ``ports`` are those of wires
    beside that of HTTP.
    """

    url: str
    hub: Hub
    session: ClientSession
    gateway: Gateway | None = None
    log: EventLog | None = None
    close: Callable[[], Awaitable[None]] | None = None
    ports: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    front: "Front | None" = None

    @property
    def access(self) -> Access:
        """The authentication of clients."""
        assert self.gateway is not None, "only a pool of `serving` has one"
        return self.gateway.access

    def headers(self, key: str = KEY) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    @asynccontextmanager
    async def node(
        self, name: str = "n1", model: str = "m1", slots: str = "8", path: str = ""
    ) -> AsyncIterator["Node"]:
        """Join as a node within the block."""
        path = path or (
            f"/ws?name={name}&model={model}&token={TOKEN}&max_concurrency={slots}"
        )
        socket = await self.session.ws_connect(self.url + path, max_msg_size=0)
        node = Node(socket)
        reading = asyncio.create_task(node.read())
        try:
            yield node
        finally:
            await socket.close()
            await reading

    async def wait_joined(self, workers: int = 1) -> None:
        """Wait until that many workers are in the pool, and seen to be connected."""

        def joined() -> bool:
            ids = self.hub.pool.workers.keys()
            connected = all(self.hub.connected_at(each) is not None for each in ids)
            return len(ids) == workers and connected

        await eventually(joined)


@dataclass(frozen=True, slots=True)
class Front:
    """A front: its URL, and both ends of its link, which ``linking`` keeps."""

    url: str
    jobs: LinkedJobs
    links: FrontLinks
    linking: asyncio.Task[None]


@dataclass(slots=True)
class Node:
    """A scripted node."""

    socket: ClientWebSocketResponse
    texts: list[str] = field(default_factory=list)
    closed: tuple[int, str] | None = None

    async def read(self) -> None:
        """Collect texts until the connection ends."""
        while True:
            message = await self.socket.receive()
            match message.type:
                case WSMsgType.TEXT:
                    self.texts.append(message.data)
                case WSMsgType.CLOSE:
                    self.closed = (message.data, message.extra or "")
                    return
                case _:
                    self.closed = self.closed or (1006, "")
                    return

    @property
    def tasks(self) -> list[dict[str, Any]]:
        return [each for each in map(json.loads, self.texts) if "stop" not in each]

    @property
    def stopped(self) -> list[int]:
        return [each["id"] for each in map(json.loads, self.texts) if "stop" in each]

    async def task(self, number: int = 0) -> dict[str, Any]:
        """Wait for a task, by default the first."""
        await eventually(lambda: len(self.tasks) > number)
        return self.tasks[number]

    async def wait_stopped(self, task_id: int) -> None:
        await eventually(lambda: task_id in self.stopped)

    async def write(self, task_id: int, *texts: str) -> None:
        for text in texts:
            await self.send(task_id.to_bytes(4, "big") + text.encode())

    async def end(self, task_id: int) -> None:
        await self.send(task_id.to_bytes(4, "big"))

    async def send(self, data: bytes | str) -> None:
        with suppress(ConnectionError):  # data for a closed connection is lost
            if isinstance(data, str):
                await self.socket.send_str(data)
            else:
                await self.socket.send_bytes(data)

    async def answer(self, *texts: str, number: int = 0) -> None:
        """Wait for a task and answer it."""
        task = await self.task(number)
        await self.write(task["id"], *texts)
        await self.end(task["id"])

    def abort(self) -> None:
        """Abort the connection without a close frame."""
        connection = self.socket._conn  # aiohttp itself only closes with a close frame
        assert connection is not None
        assert connection.transport is not None
        connection.transport.abort()


@asynccontextmanager
async def serving(
    folder: Path,
    *,
    queue_max: int = 1000,
    limits: TimeLimits | None = None,
    keys: Mapping[str, str] | None = None,
    moderation: Moderation | None = None,
    bypass: frozenset[str] = frozenset(),
    open_loopback: bool = False,
    webhooks: EgressPolicy = EgressPolicy.ANY,
    payments: Payments = NO_PAYMENTS,
    wires: Mapping[str, Any] | None = None,
    pages: PagePolicy | None = None,
    open_store: Callable[[Path, BlobFiles], SqliteStore] = SqliteStore,
    file_limits: tuple[int, int] = (200_000_000, 10_000_000_000),
    clock: Clock | None = None,
    restarted: bool = False,
    prices: PriceList = PRICES,
    approve_nodes: bool = False,
    front: bool = False,
    front_clock: Clock | None = None,
) -> AsyncIterator[Pool]:
    """Run a coordinator within the block; its clients reach it through a ``front``.

    The front may have a clock of its own.  ``wires`` holds protocols' configurations by
    name; ``file_limits`` are the bytes of a file, and of all files of a key.
    ``restarted``: it goes on with the jobs in the folder.
    """
    clock = clock or LoopClock()
    files = BlobFiles(folder / "blobs")
    files.open()
    put_new_database(folder / "shoal.db")
    store = open_store(folder / "shoal.db", files)
    await store.open()
    numbers = count(1001 if restarted else 1)
    hub = Hub(
        store,
        clock,
        lambda: JobId(f"job{next(numbers)}"),
        SIGNER,
        queue_max,
        blobs=BlobTransfer(files),
        approve_nodes=approve_nodes,
        call_secret=b"drawn at the start",
    )
    calls = hub.carried = DurableCalls(hub, store, clock)
    if restarted:
        await hub.restore()
    keyring = Keyring(await key_cache(store.keys), keys or {"default": KEY})
    admission = WorkerAdmission(await load_join_tokens(store.keys), store.keys, clock)
    uploads = ClientFiles(
        store.files, FileFolder(folder / "files"), new_id, *file_limits
    )
    await uploads.open()
    bodies = BodyReader()
    sessions = BrowserSessions(store.sign_ins, pages or PagePolicy())
    await sessions.open()
    gateway = Gateway(
        hub,
        calls,
        store,
        clock,
        Access(
            hub,
            clock,
            keyring,
            store.keys,
            sessions,
            open_loopback=open_loopback,
        ),
        admission,
        limits or TimeLimits(),
        uploads,
        BatchRunner(store.batches, uploads, clock, hub.store_health, bodies.share),
        new_secret,
        SigningKeys(SIGNER),
        moderation,
        bypass,
        prices=prices,
        anonymous=anonymous_http(wires or {}),
        pages=pages or PagePolicy(),
        egress_policy=webhooks,
        payments=payments,
        bodies=bodies,
    )
    app = make_app(
        *(gateway, _upgrades(hub, clock, admission, wires or {})), from_fronts=front
    )
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        auto_decompress=False,
        shutdown_timeout=0.1,
    )
    await runner.setup()
    ending = AsyncExitStack()
    at_front: Front | None = None
    if front:
        sockets = await asyncio.to_thread(tempfile.mkdtemp)  # of a short name
        ending.callback(shutil.rmtree, sockets)
        await web.UnixSite(runner, f"{sockets}/{HTTP_SOCKET}").start()
        serving_front = front_of(
            *(gateway, app, Path(sockets), front_clock or clock),
            open_loopback=open_loopback,
        )
        at_front = await ending.enter_async_context(serving_front)
        url = at_front.url
    else:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    running = asyncio.gather(
        hub.run(), calls.run(), gateway.batches.run(PoolLineJobs(gateway))
    )
    try:
        async with ClientSession() as session:
            log = app[EVENT_LOG]
            yield Pool(
                *(url, hub, session, gateway, log, runner.cleanup), front=at_front
            )
    finally:
        await ending.aclose()
        await runner.cleanup()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await store.close()


@asynccontextmanager
async def front_of(
    gateway: Gateway,
    app: web.Application,
    folder: Path,
    clock: Clock,
    *,
    open_loopback: bool,
) -> AsyncIterator[Front]:
    """Run a front of a coordinator within the block."""
    links = FrontLinks(
        *(gateway.hub, gateway.access, gateway.clock), app[METRICS].requests.add_counted
    )
    jobs = LinkedJobs(unix_connection(folder / LINK_SOCKET), clock, gateway.hub.new_id)
    elsewhere: Any = Elsewhere()
    access: Any = FrontAccess(jobs, open_loopback=open_loopback)
    here = replace(
        gateway,
        hub=elsewhere,
        calls=elsewhere,
        store=elsewhere,
        admission=elsewhere,
        files=elsewhere,
        batches=elsewhere,
        access=access,
        bodies=FrontBodies(),
    )
    async with (
        links.listening(folder / LINK_SOCKET),
        front_listener(
            *(here, OPERATIONS, jobs, folder / HTTP_SOCKET, "127.0.0.1"),
            *(None, Strangers()),
        ) as bound,
    ):
        linking = asyncio.create_task(jobs.run_link())
        try:
            await jobs.wait_up()
            yield Front(f"http://127.0.0.1:{bound.port}", jobs, links, linking)
        finally:
            linking.cancel()


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail after WAIT_MAX seconds."""
    async with asyncio.timeout(WAIT_MAX):
        while not condition():  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.001)


def _upgrades(
    hub: Hub, clock: Clock, admission: WorkerAdmission, wires: Mapping[str, Any]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    peers, strangers = PeerConnections(hub, clock, admission), Strangers()
    routes = []
    for name, protocol in discover().items():
        config = wires.get(name) or protocol.config()
        context = protocol_context(EPOCH, admission.policy_for(name, TOKEN))
        context = replace(context, random_bytes=secrets.token_bytes)
        routes += [
            (name, route)
            for route in protocol.endpoints(config, context)
            if isinstance(route, WebSocketRoute)
        ]
    routes.sort(key=lambda each: each[1].rank)

    async def upgrade(request: web.Request) -> web.StreamResponse:
        path, _, query = request.raw_path.partition("?")
        headers = {name.lower(): value for name, value in request.headers.items()}
        hello = UpgradeRequest(path, query, headers, request.remote or "")
        wire, route = next(each for each in routes if each[1].claims(hello))
        try:
            accepted = route.accept(hello, clock.now())
        except Refused as refused:
            link, response = await websocket.accept(
                request, {}, route.message_max, strangers
            )
            await link.close(refused.code, str(refused))
            return response
        await admission.record_use(accepted.grant)
        link, response = await websocket.accept(
            request,
            accepted.headers,
            route.message_max,
            strangers,
            route.idle_max,
        )
        if route.encrypts:
            await accept_encryption(link)
        await peers.serve(wire, accepted.session, link)
        return response

    return upgrade
