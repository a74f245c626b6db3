"""Request bodies, with their limits."""

import asyncio

from aiohttp import web

from shoal.domain.errors import InvalidRequest, TooLarge

BODY_MAX = 16 << 20  # bytes: the longest contexts there are take a few
BODY_TIMEOUT = 120.0  # seconds to send one


async def read_body(request: web.Request) -> bytes:
    """Return the whole body.  Check who is asking before: reading costs memory.

    Raises TooLarge, or InvalidRequest if it does not come whole.
    """
    if (request.content_length or 0) > BODY_MAX:
        raise _too_large()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large() from None
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"the body is damaged: {error}") from error
    except TimeoutError:
        raise InvalidRequest(
            f"the body did not arrive within {BODY_TIMEOUT:g} s"
        ) from None


def _too_large() -> TooLarge:
    return TooLarge(f"the body exceeds the limit of {BODY_MAX} bytes")
