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
    """Request the transfer of a whole model under a number."""

    transfer_id: str
    model: str


class ModelChunk(ModelMessage, msgspec.Struct, frozen=True):
    """A chunk of one of the model's files; ``offset`` is in bytes.

    ``last`` is unreliable: peers disagree whether it ends a file or the model.
    """

    transfer_id: str
    file_name: str
    offset: int
    data: bytes
    last: bool = False


class ModelDone(ModelMessage, msgspec.Struct, frozen=True):
    """All files of the model have been sent."""

    transfer_id: str
    model: str


class ManifestRequest(ModelMessage, msgspec.Struct, frozen=True):
    """Ask for the manifest of a model; the answer may take as long as hashing it.

    ``bulk``: this end can dial a connection for the chunks alone.
    """

    model: str
    bulk: bool = False


class HashingModel(ModelMessage, msgspec.Struct, frozen=True):
    """The manifest of a model takes a while: so many bytes are ``hashed`` by now.

    Other models may be among them, which are hashed first: a count that grows says that
    an answer will follow.
    """

    model: str
    hashed: int


class ManifestAnswer(ModelMessage, msgspec.Struct, frozen=True):
    """The manifest of a model; an empty one: it is not available, for a ``reason``.

    ``held`` has a bit for each chunk that the peer has, the first in the lowest bit;
    empty: it has all.  ``bulk`` is the name and the key of a connection for the chunks
    alone; empty: there is none.
    """

    model: str
    manifest: bytes
    reason: str = ""
    held: bytes = b""
    bulk: bytes = b""


class ChunksRequest(ModelMessage, msgspec.Struct, frozen=True):
    """Request chunks of the model with this address; each is sent once."""

    root: bytes
    chunks: list[int]


class ChunksHeld(ModelMessage, msgspec.Struct, frozen=True):
    """The peer has more chunks of a model whose manifest it has sent."""

    root: bytes
    chunks: list[int]


class ChunksRefused(ModelMessage, msgspec.Struct, frozen=True):
    """No requested chunk of the model follows, nor later ones, for a ``reason``."""

    root: bytes
    reason: str


class ChunkSent(ModelMessage, msgspec.Struct, frozen=True):
    """A requested chunk of a model."""

    root: bytes
    chunk: int
    data: memoryview | bytes


class ChunksElsewhere(ModelMessage, msgspec.Struct, frozen=True):
    """Requested chunks do not follow: another seeder has got them, or soon will have.

    Requested again, they are sent.
    """

    root: bytes
    chunks: list[int]


class SeederAt(ModelMessage, msgspec.Struct, frozen=True):
    """Who fetches the model, too, sends what it has at this URL.

    It admits those that prove the passcode.  Without a URL it sends nothing, and asks
    who does.
    """

    root: bytes
    url: str
    passcode: str


CHUNK_MESSAGES: frozenset[type] = frozenset(
    {ManifestRequest, HashingModel, ManifestAnswer, ChunksRequest, ChunksHeld}
    | {ChunksRefused, ChunkSent, ChunksElsewhere, SeederAt}
)
"""Those that peers of other programs, and of older releases, do not know."""


def refusal(message: ModelMessage) -> ModelMessage | None:
    """Return the answer of a peer that shares no models; None: there is none."""
    match message:
        case ModelQuery(model) | ModelRequest(model=model):
            return ModelAnswer(model, available=False)
        case ManifestRequest(model):
            return ManifestAnswer(model, b"", "it shares no models")
        case _:
            return None


SendModelMessage: TypeAlias = Callable[[ModelMessage], bool]
"""Sends a message to a peer; returns False if its connection is closed."""

WaitUntilWritable: TypeAlias = Callable[[], Awaitable[None]]
"""Waits until a peer has read most of the data sent to it, or has disconnected."""
