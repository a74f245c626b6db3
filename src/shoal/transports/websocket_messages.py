"""The messages of an aiohttp WebSocket, with those that came together at once."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, cast

from aiohttp import (
    ClientError,
    ClientWebSocketResponse,
    WSMessage,
    WSMsgType,
    web,
)

from shoal.protocols.seam.session import Data

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
