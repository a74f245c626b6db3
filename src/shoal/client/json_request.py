"""Requests to a coordinator's HTTP API whose answers are JSON, or values of calls."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlencode

import msgspec
from aiohttp import ClientError, ClientSession

from shoal.client.blobs import raise_for_status
from shoal.client.coordinator import CoordinatorAddress, unreachable_error
from shoal.domain.errors import InvalidRequest, NotFound, PeerError
from shoal.tasks.limits import BLOB_MAX
from shoal.transports.http_client import read_body

ANSWER_MAX = 16 << 20  # bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JsonRequest(Generic[T]):
    """A request; ``path`` is percent-encoded, and a ``body`` is sent as JSON."""

    path: str
    answer: type[T]
    method: str = "GET"
    query: Mapping[str, str] = field(default_factory=dict)
    body: object = None

    async def send(self, session: ClientSession, address: CoordinatorAddress) -> T:
        """Return the answer.

        Raises ShoalError if the coordinator refuses, ConnectionLost if it is
        unreachable.
        """
        query = f"?{urlencode(self.query)}" if self.query else ""
        path = f"{self.path}{query}"
        body = await _answer(session, address, self.method, path, self.body, ANSWER_MAX)
        try:
            return msgspec.json.decode(body, type=self.answer)
        except msgspec.MsgspecError as error:
            url = address.url + path
            raise PeerError(f"{url}: invalid answer: {error}") from error


@dataclass(frozen=True, slots=True)
class ResultRequest(Generic[T]):
    """A request for a value as bytes, which ``read`` reads."""

    path: str
    read: Callable[[bytes], T]

    async def send(self, session: ClientSession, address: CoordinatorAddress) -> T:
        """Return the value; raises as ``JsonRequest.send`` does."""
        data = await _answer(session, address, "GET", self.path, None, BLOB_MAX)
        return self.read(data)


async def _answer(
    session: ClientSession,
    address: CoordinatorAddress,
    method: str,
    path: str,
    body: object,
    limit: int,
) -> bytes:
    """Send a request and return what answers it.  Raises as ``send`` does."""
    url = f"{address.url}{path}"
    try:
        async with session.request(
            method, url, json=body, allow_redirects=False
        ) as response:
            try:
                await raise_for_status(response)
            except InvalidRequest as error:
                if response.status == HTTPStatus.NOT_FOUND:
                    raise NotFound(str(error)) from None
                raise
            return await read_body(response, limit, f"{url}: the answer")
    except (ClientError, OSError) as error:
        # Not from the error: its long traceback hides the reason.
        raise unreachable_error(address, error) from None


class SendRequest(Protocol):
    """Sends a request and returns the answer."""

    def __call__(self, request: JsonRequest[T]) -> T: ...


class AsyncSendRequest(Protocol):
    """Sends a request and returns the answer."""

    def __call__(self, request: JsonRequest[T]) -> Awaitable[T]: ...
