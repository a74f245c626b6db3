"""Messages by which peers share the files of models.

Both ends query and both ends answer: the messages are the same in either direction.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias


class ModelMessage:
    """Any of what follows."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ModelQuery(ModelMessage):
    """Do you have this model, to be copied?"""

    model: str


@dataclass(frozen=True, slots=True)
class ModelAnswer(ModelMessage):
    """Whether it is there, and how many bytes it has in all, about."""

    model: str
    available: bool
    size: int | None = None


@dataclass(frozen=True, slots=True)
class ModelRequest(ModelMessage):
    """Send this model, under this number."""

    transfer_id: str
    model: str


@dataclass(frozen=True, slots=True)
class ModelChunk(ModelMessage):
    """A piece of one of the model's files; ``offset`` is in bytes.

    ``last`` is not to be relied on: peers differ in what it is the last of.
    """

    transfer_id: str
    file_name: str
    offset: int
    data: bytes
    last: bool = False


@dataclass(frozen=True, slots=True)
class ModelDone(ModelMessage):
    """All files of the model have been sent."""

    transfer_id: str
    model: str


SendModelMessage: TypeAlias = Callable[[ModelMessage], bool]
"""Sends a message to a peer; returns False if its connection is closed."""

WaitUntilWritable: TypeAlias = Callable[[], Awaitable[None]]
"""Waits until a peer has read most of what was sent to it, or its connection closes."""
