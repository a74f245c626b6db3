"""Connects by the first of several ways that leads somewhere.

An address may swallow packets for as long as one waits, so the next way is tried a
while after the one before, or as soon as that has failed.  After RFC 8305 ("Happy
Eyeballs"), section 5, but for connections that are authenticated, too.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from shoal.domain.errors import PeerError, Unavailable
from shoal.transports.tcp import describe_socket_error

ConnectionT = TypeVar("ConnectionT")


@dataclass(frozen=True, slots=True)
class ConnectionWay(Generic[ConnectionT]):
    """A way to a machine, which is tried ``after`` seconds, for up to ``timeout``.

    They count from the begin of the way before.  ``connect`` may raise PeerError and
    OSError; if it is cancelled, it leaves nothing open.
    """

    name: str
    after: float
    timeout: float
    connect: Callable[[], Awaitable[ConnectionT]]


async def connect_first(
    ways: Sequence[ConnectionWay[ConnectionT]], close: Callable[[ConnectionT], None]
) -> tuple[ConnectionWay[ConnectionT], ConnectionT]:
    """Return the first connection, and its way; ``close`` ends other ones.

    Raises Unavailable with the reason of each way.
    """
    reasons: dict[str, str] = {}
    waiting = [*reversed(ways)]
    trying: dict[asyncio.Task[ConnectionT], ConnectionWay[ConnectionT]] = {}
    try:
        while waiting or trying:
            done = set[asyncio.Task[ConnectionT]]()
            if trying:
                done, _ = await asyncio.wait(
                    trying,
                    timeout=waiting[-1].after if waiting else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            for task in done:
                if (error := task.exception()) is None:
                    return trying.pop(task), task.result()
                if not isinstance(error, PeerError | OSError):
                    raise error
                reasons[trying.pop(task).name] = describe_socket_error(error)
            if waiting:
                way = waiting.pop()
                trying[asyncio.create_task(_try(way))] = way
    finally:
        for task in trying:
            task.cancel()
        for ended in await asyncio.gather(*trying, return_exceptions=True):
            if not isinstance(ended, BaseException):
                close(ended)
    tried = [f"{each.name}: {reasons[each.name]}" for each in ways]
    raise Unavailable("; ".join(tried) or "it has no address")


async def _try(way: ConnectionWay[ConnectionT]) -> ConnectionT:
    async with asyncio.timeout(way.timeout):
        return await way.connect()
