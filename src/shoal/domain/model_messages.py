"""Messages that transfer the files of models between peers.

The protocol is symmetric: both ends query and answer.
"""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec


class ModelMessage:
    """Base class of these messages."""

    __slots__ = ()


class ModelQuery(ModelMessage, msgspec.Struct, frozen=True):
    """Ask whether the peer can send a model."""

    model: str


class ModelAnswer(ModelMessage, msgspec.Struct, frozen=True):
    """Whether the model is available, and its approximate size in bytes."""

    model: str
    available: bool
    size: int | None = None


class ModelRequest(ModelMessage, msgspec.Struct, frozen=True):
    """Request the transfer of a model under a number.

    ``window``: how many bytes the peer may send before a ModelPull asks for more; 0: as
    many as it can.
    """

    transfer_id: str
    model: str
    window: int = 0


class ModelChunk(ModelMessage, msgspec.Struct, frozen=True):
    """A chunk of one of the model's files; ``offset`` is in bytes.

    ``last`` is unreliable: peers disagree whether it ends a file or the model.
    """

    transfer_id: str
    file_name: str
    offset: int
    data: bytes
    last: bool = False


class ModelPull(ModelMessage, msgspec.Struct, frozen=True):
    """Send ``size`` more bytes of a transfer that has a window; 0: end it."""

    transfer_id: str
    size: int


class ModelDone(ModelMessage, msgspec.Struct, frozen=True):
    """All files of the model have been sent."""

    transfer_id: str
    model: str


SendModelMessage: TypeAlias = Callable[[ModelMessage], bool]
"""Sends a message to a peer; returns False if its connection is closed."""

WaitUntilWritable: TypeAlias = Callable[[], Awaitable[None]]
"""Waits until a peer has read most of the data sent to it, or has disconnected."""
