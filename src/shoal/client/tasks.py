"""Which functions the workers of a coordinator have (``GET /v1/tasks``)."""

import msgspec
from aiohttp import ClientError, ClientSession

from shoal.client.blobs import check
from shoal.client.dialling import unreachable
from shoal.client.place import Place
from shoal.domain.errors import PeerError

ANSWER_MAX = 16 << 20  # bytes


class TaskThere(msgspec.Struct, frozen=True):
    """A function, how many workers have it, and how many calls they make at a time."""

    name: str
    workers: int
    slots: int


class Tasks(msgspec.Struct, frozen=True):
    """All functions that have names.

    ``workers`` and ``slots`` are of all that call functions, ``code`` says how many of
    these workers run functions that are sent along, and ``unnamed`` how many do not say
    which functions they have.
    """

    tasks: tuple[TaskThere, ...]
    workers: int
    slots: int
    code: int
    unnamed: int = 0


async def ask_tasks(session: ClientSession, place: Place) -> Tasks:
    """Return what the workers of a coordinator have.

    Raises ShoalError if it does not say, ConnectionLost if it cannot be reached.
    """
    url = f"{place.url}/v1/tasks"
    body = bytearray()
    try:
        async with session.get(url, allow_redirects=False) as answer:
            await check(answer)
            async for data in answer.content.iter_any():
                body += data
                if len(body) > ANSWER_MAX:
                    raise PeerError(f"{url}: the answer exceeds {ANSWER_MAX} bytes")
    except (ClientError, OSError) as error:
        raise unreachable(place, error) from None  # the rest is of libraries
    try:
        return msgspec.json.decode(body, type=Tasks)
    except msgspec.MsgspecError as error:
        raise PeerError(f"{url} says nothing about tasks: {error}") from error
