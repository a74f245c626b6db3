"""What comes back of a call, as a value again."""

from collections.abc import Callable
from typing import TypeAlias

from shoal.domain.errors import InvalidRequest
from shoal.tasks.reading import Reader, unpickled
from shoal.tasks.schemas import by_return_hint

Read: TypeAlias = Callable[[bytes], object]
"""Returns the value that is written in MessagePack.  Raises InvalidRequest."""


def reading_of(name: str, function: Callable[..., object], *, trust: bool) -> Read:
    """Return what reads the results of a task, and makes of them what its hint says."""
    read, rebuild = plain_reading(trust=trust), by_return_hint(function)
    if rebuild is None:
        return read

    def rebuilt(data: bytes) -> object:
        try:
            return rebuild(read(data))
        except ValueError as error:
            raise InvalidRequest(f"what {name} returned: {error}") from error

    return rebuilt


def plain_reading(*, trust: bool) -> Read:
    """Return what reads values as they are; with ``trust`` they may be pickled."""
    return Reader(unpickle=_unpickled if trust else _not_unpickled).read


def _unpickled(data: memoryview) -> object:
    try:
        return unpickled(data)
    except Exception as error:
        # Whatever comes of running what a worker wrote.
        raise InvalidRequest(f"the result cannot be unpickled: {error!r}") from error


def _not_unpickled(data: memoryview) -> object:
    raise InvalidRequest(
        "the result is pickled, and reading it runs code of the worker: it is not read "
        "here; return lists, dictionaries, texts, numbers or arrays, or trust the "
        "workers by shoal.Pool(trust_code=True)"
    )
