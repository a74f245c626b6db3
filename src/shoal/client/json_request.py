"""Requests to a coordinator's HTTP API whose answers are JSON."""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlencode

import msgspec
from aiohttp import ClientError, ClientSession

from shoal.client.blobs import raise_for_status
from shoal.client.coordinator import CoordinatorAddress, unreachable_error
from shoal.domain.errors import InvalidRequest, NotFound, PeerError
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
        url = f"{address.url}{self.path}{query}"
        try:
            async with session.request(
                self.method, url, json=self.body, allow_redirects=False
            ) as response:
                try:
                    await raise_for_status(response)
                except InvalidRequest as error:
                    if response.status == HTTPStatus.NOT_FOUND:
                        raise NotFound(str(error)) from None
                    raise
                body = await read_body(response, ANSWER_MAX, f"{url}: the answer")
        except (ClientError, OSError) as error:
            # Not from the error: its long traceback hides the reason.
            raise unreachable_error(address, error) from None
        try:
            return msgspec.json.decode(body, type=self.answer)
        except msgspec.MsgspecError as error:
            raise PeerError(f"{url}: invalid answer: {error}") from error


class SendRequest(Protocol):
    """Sends a request and returns the answer."""

    def __call__(self, request: JsonRequest[T]) -> T: ...


class AsyncSendRequest(Protocol):
    """Sends a request and returns the answer."""

    def __call__(self, request: JsonRequest[T]) -> Awaitable[T]: ...
