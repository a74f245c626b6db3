"""WebSocket links over aiohttp, for both ends."""

import asyncio
import ssl
import struct
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import aiohttp
from aiohttp import ClientError, ClientWebSocketResponse, WSMessage, WSMsgType, web

from shoal.domain.errors import PeerError
from shoal.protocols.seam.encrypted_stream import RecordOpener, RecordSealer
from shoal.protocols.seam.noise import TransportKeys
from shoal.protocols.seam.session import Batch, CloseCode, Data
from shoal.transports.http_client import as_given, describe_http_error
from shoal.transports.link import (
    CLOSE_TIMEOUT,
    CONNECT_TIMEOUT,
    WRONG_CERTIFICATE,
    LinkClosed,
)
from shoal.transports.link_encryption import encrypt_dialled
from shoal.transports.strangers import Strangers
from shoal.transports.tls import WrongServerKey, context_of_any, context_pinning
from shoal.transports.unadmitted_connection import UnadmittedConnection

T = TypeVar("T")

CLOSE_TEXT_MAX = 123  # bytes that a close frame holds (RFC 6455, section 5.5)
NOT_FOUND = 404
OTHER_PROGRAM = (
    ": another program answers there, or a release of Shoal that has to be upgraded"
)
BUSY = frozenset({429, 503})  # HTTP statuses of a server that may be tried again
BATCH_MAX = 255  # messages handed on together, so that other peers get their turn
ANY_CERTIFICATE = "wss-any"  # a scheme: the session authenticates the peer
NOISE = "noise+"  # before the scheme of a URL
PING_EVERY = 20.0  # seconds: a server that vanished sends no farewell
JOINED_MAX = (
    1 << 14
)  # bytes of a frame that is copied in order to be written with others

_HEAD = struct.Struct("!BB").pack
_HEAD_16 = struct.Struct("!BBH").pack
_HEAD_64 = struct.Struct("!BBQ").pack
DATA = frozenset({WSMsgType.TEXT, WSMsgType.BINARY})

Receive: TypeAlias = Coroutine[Any, Any, WSMessage]


class WebSocketMessages:
    """Receives the messages of a socket, in their order.

    aiohttp gives out one message at a time, and does not say whether there are more.
    So the next ``receive`` begins early: if it returns without waiting, its message had
    come with the last one; if it waits, ``next`` goes on with it.  A message of a burst
    of 16 or 64 then costs a driver 1.4 µs, and 2.0 µs where each takes a turn.

    The socket must not close by itself (``autoclose=False``): the close frame of a peer
    may come with messages that are still to be answered.
    """

    def __init__(self, socket: web.WebSocketResponse | ClientWebSocketResponse) -> None:
        self._receive = cast(Callable[[], Receive], socket.receive)
        self._waiting: _WaitingReceive | None = None
        self._held: WSMessage | Exception | None = None  # came early, and is no data

    async def next(self) -> WSMessage:
        """Wait for a message.  Raises ConnectionError or ClientError."""
        if (held := self._held) is not None:
            self._held = None
            if isinstance(held, Exception):
                raise held
            return held
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return await self._receive()
        return await waiting

    def at_hand(self, count_max: int) -> list[Data]:
        """Return the next texts and bytes, as far as they have come."""
        found: list[Data] = []
        while len(found) < count_max and not (self._held or self._waiting):
            receive = self._receive()
            try:
                self._waiting = _WaitingReceive(receive, receive.send(None))
            except StopIteration as returned:
                message: WSMessage = returned.value
                if message.type in DATA:
                    found.append(message.data)
                else:
                    self._held = message
            except (ConnectionError, ClientError) as error:
                self._held = error
        return found

    def stop(self) -> None:
        """Stop waiting, as the socket has to before it can be closed."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()


class _WaitingReceive(Awaitable[WSMessage]):
    """A ``receive`` that waits for a future; awaiting it resumes it."""

    def __init__(self, receive: Receive, future: object) -> None:
        self._receive = receive
        self._future = future

    def __await__(self) -> Generator[Any, Any, WSMessage]:
        future = self._future
        while True:
            try:
                yield future
            except BaseException as error:  # the future's, or a cancellation
                step = partial(self._receive.throw, error)
            else:
                step = partial(self._receive.send, None)
            try:
                future = step()
            except StopIteration as returned:
                message: WSMessage = returned.value
                return message

    def cancel(self) -> None:
        """End it, as a cancelled task would."""
        with suppress(asyncio.CancelledError):
            self._receive.throw(asyncio.CancelledError())


class WebSocketLink:
    """A WebSocket of either end."""

    def __init__(
        self,
        socket: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
        transport: asyncio.WriteTransport,
        peer: str,
        unadmitted: UnadmittedConnection | None = None,
    ) -> None:
        self.peer = peer
        self._socket = socket
        self._messages = WebSocketMessages(socket)
        self._transport = transport
        self._unadmitted = unadmitted  # None: the peer is no stranger
        self._farewell = ""  # the text of our close frame
        self.binding = b""
        self.joined_max = 0
        self._sealer: RecordSealer | None = None
        self._opener: RecordOpener | None = None
        self._put_back: list[Data] = []

    def put_back(self, data: bytes) -> None:
        self._put_back.append(data)

    def encrypt(self, keys: TransportKeys, received: bytes = b"") -> None:
        self._sealer = RecordSealer(keys.sealer)
        self._opener = RecordOpener(keys.opener)
        self.binding = keys.hash
        # One call of the cipher, and one frame, cost more than most messages.
        self.joined_max = JOINED_MAX
        if received:
            self._put_back.extend(self._opened([received]))

    async def receive(self) -> Batch:
        if self._put_back:
            batch, self._put_back = self._put_back, []
            return batch
        return self._opened(await self._receive())

    def _opened(self, batch: list[Data]) -> list[Data]:
        """Decrypt messages, each for itself."""
        if (opener := self._opener) is None:
            return batch
        opened: list[Data] = []
        try:
            for each in batch:  # no comprehension, which is a call for each chunk
                if isinstance(each, bytes):
                    opened.append(opener.open(each))
            return opened
        except PeerError as error:
            raise LinkClosed(f"connection broken: {error}") from error

    async def _receive(self) -> list[Data]:
        try:
            message = await self._messages.next()
        except (ConnectionError, aiohttp.ClientError) as error:
            # aiohttp answers a ping before it returns, which may fail.
            raise LinkClosed(f"connection lost: {error}") from error
        if self._unadmitted is not None and self._unadmitted.refusal:
            raise LinkClosed(f"refused: {self._unadmitted.refusal}")
        match message.type:
            case aiohttp.WSMsgType.TEXT | aiohttp.WSMsgType.BINARY:
                batch = [message.data, *self._messages.at_hand(BATCH_MAX)]
                if self._unadmitted is not None:
                    self._unadmitted.progressed()
                return batch
            case aiohttp.WSMsgType.CLOSE:
                code, text = message.data or 1005, message.extra or ""
                await self.close(CloseCode.NORMAL, "")
                raise LinkClosed(_closed_by_peer(code, text), code, text)
            case aiohttp.WSMsgType.ERROR:
                code = self._socket.close_code or 1006
                raise LinkClosed(f"broken WebSocket: {message.data}", code)
            case _:
                reason = f"closed here: {self._farewell}" if self._farewell else ""
                code = self._socket.close_code or 1006
                raise LinkClosed(reason or "connection lost", code)

    async def send(self, data: Data | memoryview) -> None:
        if self._sealer is not None:
            assert isinstance(data, bytes), "an encrypted link has no text messages"
            data = self._sealer.seal(data)
        try:
            if isinstance(data, str):
                await self._socket.send_str(data)
            else:
                # Of any buffer, whatever its annotation says.
                await self._socket.send_bytes(cast(bytes, data))
        except (ConnectionError, aiohttp.ClientError, RuntimeError) as error:
            # aiohttp says with a RuntimeError that the socket is closing.
            raise LinkClosed(f"connection lost: {error}") from error

    def pack(self, data: Data) -> bytes:
        """Write a message as a frame (RFC 6455, section 5.2): of a server's end only.

        aiohttp sends one message at a time, through two coroutines and with a write for
        each, which is most of what it costs to pass a small one on.
        """
        if isinstance(data, str):
            payload, opcode = data.encode(), 0x81  # a text, and the last of its frames
        else:
            payload, opcode = data, 0x82
        size = len(payload)
        if size < 126:
            return _HEAD(opcode, size) + payload
        if size < 1 << 16:
            return _HEAD_16(opcode, 126, size) + payload
        return _HEAD_64(opcode, 127, size) + payload

    def write(self, packs: Sequence[Data]) -> None:
        """Write frames of ``pack`` together.  Raises LinkClosed."""
        transport = self._transport
        if transport.is_closing() or self._socket.closed:
            raise LinkClosed("connection lost")
        frames = cast(Sequence[bytes], packs)  # pack makes no others
        if len(frames) == 1:
            transport.write(frames[0])
        elif len(frames[0]) < JOINED_MAX:
            transport.write(b"".join(frames))
        else:
            transport.writelines(frames)

    @property
    def unread(self) -> int:
        """How many bytes wait for the peer to read."""
        try:
            return self._transport.get_write_buffer_size()
        except AttributeError:  # TLS that was closed twice has forgotten its protocol
            return 0

    @property
    def is_stranger(self) -> bool:
        return self._unadmitted is not None

    def admit(self) -> None:
        """Lift the limits of a stranger."""
        if self._unadmitted is not None:
            self._unadmitted.admit()
            self._unadmitted = None

    def charge(self, seconds: float) -> None:
        """Charge a stranger CPU time that was used for its connection."""
        if self._unadmitted is not None:
            self._unadmitted.charge(seconds)

    def run(self, call: Callable[..., T], *args: object) -> T:
        if self._unadmitted is None:
            return call(*args)
        return self._unadmitted.run(call, *args)

    def holding(self, size: int) -> AbstractContextManager[None]:
        if self._unadmitted is None:
            return nullcontext()
        return self._unadmitted.holding(size)

    def share_budget(
        self, strangers: Strangers, message_max: int | None = None
    ) -> None:
        if self._unadmitted is not None:
            self._unadmitted.share_budget(strangers, message_max)

    def abort(self) -> None:
        """Abort the connection; unsent data is lost."""
        self._transport.abort()

    async def close(self, code: int, text: str) -> None:
        self._farewell = self._farewell or text
        self._messages.stop()
        message = text.encode()[:CLOSE_TEXT_MAX].decode(errors="ignore").encode()
        try:
            # aiohttp waits for as long as the peer goes on talking.
            async with asyncio.timeout(2 * CLOSE_TIMEOUT):
                await self._socket.close(code=code, message=message)
        except (ConnectionError, RuntimeError, TimeoutError):
            pass  # it is closed already, or the peer does not listen
        except asyncio.CancelledError:
            # aiohttp also raises it for an earlier write that was cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
        finally:
            if self.unread:
                # The peer had its time.  asyncio would keep the connection, with what
                # is still to be sent, for as long as the peer does not read.
                self.abort()


def _closed_by_peer(code: int, text: str) -> str:
    # The peer's text, which may be printed on a terminal.
    return f"closed by peer: {code} {ascii(text)[1:-1]}".rstrip()


async def accept(
    request: web.Request,
    headers: Mapping[str, str],
    message_max: int,
    strangers: Strangers,
    idle_max: float | None = None,
) -> tuple[WebSocketLink, web.StreamResponse]:
    """Answer an upgrade request; return the link and what the handler must return.

    Until ``admit`` is called, the peer counts as one of ``strangers``; from then on, a
    message has ``message_max`` bytes at most.

    A peer that sends nothing for ``idle_max`` seconds, not even a pong, is lost.

    Raises ConnectionResetError if the peer has left already.
    """
    socket = web.WebSocketResponse(
        timeout=CLOSE_TIMEOUT,
        autoclose=False,
        max_msg_size=message_max,
        compress=False,
        # aiohttp waits half as long for an answer to its ping.
        heartbeat=None if idle_max is None else idle_max / 1.5,
    )
    socket.headers.update(headers)
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the peer has left")
    unadmitted = UnadmittedConnection.begin_messages(
        transport, strangers, request.remote or ""
    )
    await socket.prepare(request)
    return WebSocketLink(socket, transport, request.remote or "?", unadmitted), socket


@asynccontextmanager
async def connect_websocket(
    url: str,
    headers: Mapping[str, str],
    message_max: int,
    *,
    fingerprint: bytes | None = None,
) -> AsyncIterator[tuple[WebSocketLink, Mapping[str, str]]]:
    """Open a WebSocket; yield the link and the headers of the answer.

    It is encrypted, with or without TLS, if the URL begins with ``noise+``.  With a
    ``fingerprint``, only the server with that key is accepted, regardless of who issued
    its certificate; it needs TLS.  With ``wss-any://`` any certificate is: the session
    authenticates the peer.

    Raises LinkClosed if the connection fails.
    """
    encrypted = url.startswith(NOISE)
    url = url.removeprefix(NOISE)
    context: ssl.SSLContext | bool = True
    if url.startswith(ANY_CERTIFICATE):
        url, context = f"wss{url.removeprefix(ANY_CERTIFICATE)}", context_of_any()
    elif fingerprint is not None:
        context = context_pinning(fingerprint)
    peer = url.partition("?")[0]  # what follows may hold a token
    upgrade = _Upgrade()
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse_redirect)
    trace.on_request_end.append(upgrade.on_answer)
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), trace_configs=[trace]
    ) as session:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                socket = await session.ws_connect(
                    as_given(url),
                    headers=headers,
                    autoclose=False,
                    max_msg_size=message_max,
                    heartbeat=PING_EVERY,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT),
                    ssl=context,
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status in BUSY:
                reason = f"{peer} refuses connections for now: HTTP {error.status}"
                raise LinkClosed(reason) from error
            reason = f"{peer} does not speak WebSocket here: HTTP {error.status}"
            if error.status == NOT_FOUND:
                reason += OTHER_PROGRAM
            raise LinkClosed(reason) from error
        except aiohttp.ClientResponseError as error:
            # It would print the whole URL.
            raise LinkClosed(f"{peer} does not speak HTTP here") from error
        except aiohttp.ClientConnectorCertificateError as error:
            if isinstance(error.certificate_error, WrongServerKey):
                reason = f"{peer}: {error.certificate_error}"
                raise LinkClosed(reason, WRONG_CERTIFICATE, reason) from error
            raise LinkClosed(
                f"the certificate of {peer} is not signed by a trusted authority "
                f"({error.certificate_error}); a token that the coordinator prints "
                "names its certificate"
            ) from error
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise LinkClosed(
                f"cannot connect to {peer}: {describe_http_error(error)}"
            ) from error
        link = WebSocketLink(socket, upgrade.transport, peer)
        try:
            if encrypted:
                await encrypt_dialled(link, peer)
            yield link, upgrade.headers
        finally:
            await link.close(CloseCode.NORMAL, "")


class _Upgrade:
    """What a link needs of the answer to an upgrade, which aiohttp only traces."""

    transport: asyncio.WriteTransport
    headers: Mapping[str, str]

    async def on_answer(
        self, _session: object, _context: object, ended: aiohttp.TraceRequestEndParams
    ) -> None:
        """Take the headers and the transport.  Raises ClientConnectionError."""
        answer = ended.response
        self.headers = {name.lower(): value for name, value in answer.headers.items()}
        if answer.connection is None:
            return  # released: it is a refusal
        if answer.connection.transport is None:
            raise aiohttp.ClientConnectionError("connection lost")
        self.transport = answer.connection.transport


async def _refuse_redirect(*_: object) -> None:
    # A token must not follow a redirect to another server.
    raise aiohttp.ClientError("the server redirects to another address")
