"""Runs a front: a process that serves HTTP for a hub in another process."""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar, cast

from aiohttp import web

from shoal.app.endpoints import anonymous_http
from shoal.app.fleet_files import with_fleets
from shoal.app.https import open_https
from shoal.app.parts import HTTP_SOCKET, LINK_SOCKET, OLLAMA_SOCKET, FrontPart
from shoal.app.settings import read_settings
from shoal.batches.client_files import ClientFiles
from shoal.batches.runner import BatchRunner
from shoal.calls.durable import DurableCalls
from shoal.config import ServeConfig
from shoal.config.secret_files import new_secret
from shoal.coordinator.admission import WorkerAdmission
from shoal.coordinator.hub import Hub
from shoal.domain.errors import ShuttingDown, UnknownModel
from shoal.domain.ids import JobId
from shoal.front.front_access import FrontAccess
from shoal.front.linked_jobs import Elsewhere, LinkedJobs, OnlyAtHub, unix_connection
from shoal.front.relay import BODY, RequestRelay
from shoal.front.text_port import NAME_SIZE as TEXT_NAME_SIZE
from shoal.front.text_port import TextPort
from shoal.gateway.all_operations import OLLAMA_API, OLLAMA_PORT, OPERATIONS, on_fronts
from shoal.gateway.app import application, first_look
from shoal.gateway.context import Gateway
from shoal.gateway.http.access import Access
from shoal.gateway.http.body import BODY_MAX, BodyReader
from shoal.gateway.http.ids import new_id
from shoal.gateway.http.operation import Operation
from shoal.protocols.shoal.text import TEXT_PATH
from shoal.store.port import Store
from shoal.store.signing_keys import SigningKeys
from shoal.transports.acceptor import BoundAddress
from shoal.transports.clock import LoopClock
from shoal.transports.http_server import http_listener, public_urls
from shoal.transports.spans import open_spans
from shoal.transports.strangers import Strangers, bounded_strangers

STOPPING = ShuttingDown("the coordinator is stopping: try again shortly")

T = TypeVar("T")


class FrontBodies(BodyReader):
    """Keeps each body with its request, which may have to be relayed after all."""

    async def decode(
        self,
        request: web.Request,
        owner: str,
        decode: Callable[[bytes], T],
        size_max: int = BODY_MAX,
    ) -> T:
        def keep(data: bytes) -> T:
            request[BODY] = data
            return decode(data)

        return await super().decode(request, owner, keep, size_max)


@asynccontextmanager
async def run_front(
    config: ServeConfig,
    wires: Mapping[str, object],
    part: FrontPart,
    stop: asyncio.Event,
) -> AsyncIterator[Awaitable[None]]:
    """Run a front for the length of the block.

    Gives what ends with the hub after ``stop``, or with an error: OtherVersion if the
    hub's release does not fit.
    """
    settings = read_settings(config)
    wires = with_fleets(wires, config.data_dir)
    clock = LoopClock()
    https = open_https(config, settings.pages.hosts, clock.wall())
    tls = None if https is None else https.context
    sockets = [_socket(each) for each in part.http]
    port = sockets[0].getsockname()[1]
    urls = public_urls(config.host, port, secure=tls is not None)
    text_name = os.urandom(TEXT_NAME_SIZE)
    jobs = LinkedJobs(
        *(unix_connection(part.socket(LINK_SOCKET)), clock, lambda: JobId(new_id())),
        text_name,
        urls[0] if config.node else "",
    )
    access = FrontAccess(jobs, open_loopback=config.open_loopback)
    strangers = bounded_strangers(clock, part.of + 1)
    async with AsyncExitStack() as finally_:
        spans = await finally_.enter_async_context(
            open_spans(
                config.otlp_endpoint,
                os.environ,
                "shoal",
                config.name or socket.gethostname() or "shoal",
            )
        )
        elsewhere = Elsewhere()
        gateway = Gateway(
            cast(Hub, elsewhere),
            cast(DurableCalls, elsewhere),
            cast(Store, elsewhere),
            clock,
            cast(Access, access),
            cast(WorkerAdmission, elsewhere),
            settings.limits,
            cast(ClientFiles, elsewhere),
            cast(BatchRunner, elsewhere),
            new_secret,
            cast(SigningKeys, elsewhere),
            settings.moderation,
            prices=settings.prices,
            anonymous=anonymous_http(wires)
            | ({OLLAMA_API} if config.ollama_open else set()),
            pages=settings.pages,
            proxies=settings.proxies,
            bodies=FrontBodies(),
            spans=spans,
        )
        texts = TextPort(text_name, Path(part.folder), jobs, clock, strangers)
        await finally_.enter_async_context(texts.opened())
        loop = asyncio.get_running_loop()
        link = loop.create_task(jobs.run_link())
        stopping = loop.create_task(_stop(jobs, stop, is_node=bool(config.node)))
        finally_.callback(link.cancel)
        finally_.callback(stopping.cancel)
        for operations, name, listening in (
            (OPERATIONS, HTTP_SOCKET, sockets),
            (OLLAMA_PORT, OLLAMA_SOCKET, [_socket(each) for each in part.ollama]),
        ):
            if listening:
                served = front_listener(
                    *(gateway, operations, jobs, part.socket(name), config.host),
                    *(tls, strangers, texts if name == HTTP_SOCKET else None),
                    sockets=listening,
                )
                await finally_.enter_async_context(served)
        yield link
        jobs.close(STOPPING)


async def _stop(jobs: LinkedJobs, stop: asyncio.Event, *, is_node: bool) -> None:
    await stop.wait()
    if is_node:
        await jobs.leave()
    else:
        jobs.stop()


@asynccontextmanager
async def front_listener(
    gateway: Gateway,
    operations: Sequence[Operation],
    jobs: LinkedJobs,
    hub: Path,
    host: str,
    tls: ssl.SSLContext | None,
    strangers: Strangers,
    texts: TextPort | None = None,
    sockets: Sequence[socket.socket] = (),
) -> AsyncIterator[BoundAddress]:
    """Serve operations for the length of the block; gives the address and the port.

    ``gateway`` is a front's; what that does not answer goes to the socket ``hub``.
    ``texts`` serves workers that send text past the hub.
    """
    access = cast(FrontAccess, gateway.access)
    relay = RequestRelay(jobs, access, hub)
    own = (each.route(gateway) for each in on_fronts(operations))
    routes = [web.route(e.method, e.path, _here(e.handler, relay)) for e in own]
    if texts is not None:
        routes.insert(0, web.get(TEXT_PATH, texts.handle))
    routes.append(web.route("*", "/{path:.*}", relay.answer))
    app = application(gateway, operations, None, jobs, strangers, routes)

    async with (
        relay.opened(),
        http_listener(
            *(app, host, 0, tls, strangers), look=first_look(gateway), sockets=sockets
        ) as bound,
    ):
        yield bound


def _here(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], relay: RequestRelay
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a handler that relays what has to be answered where the hub is."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except (OnlyAtHub, UnknownModel):  # a model may have come a moment ago
            return await relay.answer(request)

    return answer


def _socket(number: int) -> socket.socket:
    given = socket.socket(fileno=number)
    given.setblocking(False)
    return given
