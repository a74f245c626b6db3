"""Request bodies, with their limits."""

import asyncio
from dataclasses import dataclass

from aiohttp import web

from shoal.domain.errors import InvalidRequest, QueueFull, TooLarge, TooSlow
from shoal.gateway.http.request_record import record_of

BODY_MAX = 16 << 20  # bytes: the longest contexts there are take a few
BODY_TIMEOUT = 120.0  # seconds to send one
BODIES_MAX = 512 << 20  # bytes of all requests that are not yet answered


@dataclass(slots=True)
class BodyReader:
    """Reads the bodies of requests, and counts what they hold of the memory.

    A body counts until its request is answered, for until then the job made of it is
    about as large.
    """

    held_bytes: int = 0  # bytes

    async def read(self, request: web.Request, size_max: int = BODY_MAX) -> bytes:
        """Return a whole body.  Check who is asking before: reading costs memory.

        ``size_max`` is in bytes, ``BODY_MAX`` at most.

        Raises TooLarge, TooSlow, QueueFull if all bodies together are too large, or
        InvalidRequest if it is damaged.
        """
        if (request.content_length or 0) > size_max:
            raise _too_large(size_max)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                # What has come, not what was announced, or else announcing would do.
                while chunk := await request.content.readany():
                    self._hold(request, len(chunk))
                    body += chunk
                    if len(body) > size_max:
                        raise _too_large(size_max)
        except web.RequestPayloadError as error:
            raise InvalidRequest(f"the body is damaged: {error}") from error
        except TimeoutError:
            raise TooSlow(
                f"the body did not arrive within {BODY_TIMEOUT:g} s: {len(body)} bytes "
                "of it came"
            ) from None
        return bytes(body)

    def release(self, request: web.Request) -> None:
        """Count the body of a request no longer, if it had one."""
        record = record_of(request)
        self.held_bytes -= record.held_bytes
        record.held_bytes = 0

    def _hold(self, request: web.Request, size: int) -> None:
        if self.held_bytes + size > BODIES_MAX:
            raise QueueFull(
                f"the requests that are open have more than {BODIES_MAX} bytes: try "
                "again shortly"
            )
        self.held_bytes += size
        record_of(request).held_bytes += size


def _too_large(size_max: int) -> TooLarge:
    return TooLarge(f"the body exceeds the limit of {size_max} bytes")
