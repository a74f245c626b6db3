"""Runs over HTTP: where the members of a gang meet, report, and are watched.

Three WebSockets (docs/training.md): ``ranks`` hosts the rendezvous at which the ranks
form their group, ``events`` has what members report, and ``relay`` connects ranks that
cannot reach each other.  The bearer token of all is the run's own, which its members
and its submitter have.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest, NotFound, PeerError, TooLarge
from shoal.gateway.calls import digest_in, send_value
from shoal.gateway.context import RunsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.relay import RELAY_ROLES, open_socket, role_of
from shoal.gateway.http.responses import BYTES_TYPE
from shoal.gateway.runs import hosted_runs
from shoal.gateway.runs.progress import find_members
from shoal.training.launch.script import PIECE_MAX
from shoal.training.run_events import MESSAGE_MAX
from shoal.transports import http_server

api = Operations()

RUNS_PATH = "/v1/runs/"
RANKS_PATH = RUNS_PATH + "{run}/ranks"
EVENTS_PATH = RUNS_PATH + "{run}/events"
RELAY_PATH = RUNS_PATH + "{run}/relay"
PIECE_PATH = RUNS_PATH + "{run}/pieces/{digest}"
RESULT_PATH = RUNS_PATH + "{run}/results/{id}"
MEMBER_MAX = 64  # characters of a member's name
MESSAGES_PER_SECOND = 200  # of one connection; beyond, it is read more slowly
INVALID_DATA = 1007  # WebSocket close code (RFC 6455, section 7.4.1)


@api.put(PIECE_PATH, "Store a part of a file of a run", media=BYTES_TYPE, status=204)
async def store_piece(gateway: RunsGateway, request: web.Request) -> web.Response:
    """Store a part of a file that a member returns."""
    run = _admitted(request)
    data = await gateway.bodies.read(request, PIECE_MAX)
    run.count_piece(len(data))
    await gateway.hub.blobs.keep(data, digest_in(request))
    return web.Response(status=204)


@api.get(
    RESULT_PATH,
    "Fetch what a machine of a run has returned",
    Scope.READ,
    media=BYTES_TYPE,
)
async def fetch_result(
    gateway: RunsGateway, request: web.Request, caller: ApiCaller
) -> web.StreamResponse:
    """Send what a machine of a run has returned, in MessagePack."""
    run_id, node = request.match_info["run"], request.match_info["id"]
    members = dict(
        enumerate(await find_members(gateway.store, request, run_id, caller))
    )
    if (member := members.get(int(node) if node.isdecimal() else -1)) is None:
        raise NotFound(f"your key has no run {run_id[:64]} with a machine {node[:8]}")
    if member.outcome is None:
        raise InvalidRequest(f"machine {node} has no result: {member.state.value}")
    data: bytes | memoryview = member.outcome.value
    if not data and member.outcome.blobs:
        data = await gateway.hub.blobs.read(member.outcome.blobs[0])
    return await send_value(request, data)


@api.get(RANKS_PATH, "Form the groups of a run, over a WebSocket", status=101)
async def join_ranks(gateway: RunsGateway, request: web.Request) -> web.StreamResponse:
    run = _admitted(request)
    member = request.query.get("member", "")
    if not 0 < len(member) <= MEMBER_MAX:
        raise InvalidRequest(f"member: expected 1 to {MEMBER_MAX} characters", "member")
    query = request.query
    size = run.rank_count(query.get("size", ""), query.get("round", "0"))
    connection = await _open_socket(gateway, request, run)
    run.open_rank(member, connection, size)
    try:
        await _serve(
            connection, lambda each: run.on_rank_message(member, connection, each)
        )
    finally:
        run.close_rank(member, connection)
    return connection.socket


@api.get(EVENTS_PATH, "Report and watch a run, over a WebSocket", status=101)
async def open_run_events(
    gateway: RunsGateway, request: web.Request
) -> web.StreamResponse:
    run = _admitted(request)
    connection = await _open_socket(gateway, request, run)
    name = run.open_events(connection)
    try:
        await _serve(connection, lambda each: run.on_event(name, each))
    finally:
        run.close_events(name)
    return connection.socket


@api.get(RELAY_PATH, "Connect ranks with each other, over WebSockets", status=101)
async def relay_ranks(gateway: RunsGateway, request: web.Request) -> web.StreamResponse:
    run = _admitted(request)
    role, port_id = role_of(request)
    socket = (await _open_socket(gateway, request, run)).socket
    await RELAY_ROLES[role](run.relay, port_id, socket)
    return socket


def _admitted(request: web.Request) -> hosted_runs.HostedRun:
    """Return the run whose token a request has; raises NotFound."""
    _, _, token = request.headers.get("Authorization", "").partition(" ")
    run = request.app[hosted_runs.RUNS].admit(request.match_info["run"], token.strip())
    http_server.admit(request)
    return run


async def _open_socket(
    gateway: RunsGateway, request: web.Request, run: hosted_runs.HostedRun
) -> hosted_runs.RunConnection:
    if run.is_full:
        raise TooLarge(f"the run has {hosted_runs.CONNECTIONS_MAX} connections already")
    return hosted_runs.RunConnection(
        await open_socket(request, gateway.pages, MESSAGE_MAX)
    )


async def _serve(
    connection: hosted_runs.RunConnection, handle: Callable[[object], None]
) -> None:
    """Exchange messages until the connection is closed."""
    writing = asyncio.create_task(_write(connection))
    try:
        await _read(connection.socket, handle)
    finally:
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing


async def _read(
    socket: web.WebSocketResponse, handle: Callable[[object], None]
) -> None:
    loop = asyncio.get_running_loop()
    began, received = loop.time(), 0
    while (message := await socket.receive()).type is WSMsgType.TEXT:
        try:
            handle(_decode(message.data))
        except PeerError as error:
            await socket.close(code=INVALID_DATA, message=str(error).encode()[:123])
            return
        received += 1
        ahead = received / MESSAGES_PER_SECOND - (loop.time() - began)
        if ahead > 1:
            await asyncio.sleep(ahead - 1)
        elif ahead < -1:
            began, received = loop.time(), 0
        else:
            await asyncio.sleep(0)  # others get their turn


def _decode(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError(f"expected JSON: {error}") from error


async def _write(connection: hosted_runs.RunConnection) -> None:
    """Send messages as fast as the other end reads them."""
    with suppress(ConnectionError):  # it left; the reader notices by itself
        while (message := await connection.unread.get()) is not None:
            await connection.socket.send_str(msgspec.json.encode(message).decode())
        await connection.socket.close(code=connection.close_code)
