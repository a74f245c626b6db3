"""Passes a model of one peer on to another one, without storing it.

The source sends ``WINDOW`` bytes ahead, and more as the receiver reads them: its
connection carries answers as well, so that reading must never pause.
"""

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias
from uuid import uuid4

from msgspec.structs import replace

from shoal.domain.errors import Unavailable
from shoal.domain.model_messages import (
    ModelChunk,
    ModelDone,
    ModelPull,
    ModelRequest,
    SendModelMessage,
    WaitUntilWritable,
)
from shoal.models.sources import ModelSource

WINDOW = 8 << 20  # bytes that a source may send ahead
BUFFER_MAX = 2 * WINDOW  # bytes; a source that sends more breaks the agreement
FORWARDED_MAX = 2  # models at a time from one source, which sends no more to one peer
SILENCE_TIMEOUT = 20.0
"""Seconds for the source to send something: less than receivers wait (``download``)."""
STALL_TIMEOUT = 60.0  # seconds for the receiver to read a chunk

Part: TypeAlias = ModelChunk | ModelDone


@dataclass(frozen=True, slots=True)
class Receiver:
    """The peer that gets a model, with its connection."""

    name: str
    send: SendModelMessage
    wait_writable: WaitUntilWritable


@dataclass(slots=True)
class _Transfer:
    """A transfer from a source; ``parts`` wait for the receiver."""

    source: str
    model: str
    parts: deque[Part] = field(default_factory=deque)
    size: int = 0  # bytes of the parts
    failure: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, part: Part) -> None:
        self.parts.append(part)
        self.size += len(part.data) if isinstance(part, ModelChunk) else 0
        if self.size > BUFFER_MAX:
            self.fail(f"{self.source} sends more than was requested")
        self.changed.set()

    def fail(self, why: str) -> None:
        self.failure = self.failure or why
        self.changed.set()

    async def next(self) -> Part:
        """Return the next part.  Raises Unavailable."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_TIMEOUT):
                while not self.parts and not self.failure:
                    self.changed.clear()
                    await self.changed.wait()
        if not self.parts:
            self.fail(f"{self.source} sent nothing for {SILENCE_TIMEOUT:g} s")
        if self.failure:
            raise Unavailable(self.failure)
        part = self.parts.popleft()
        self.size -= len(part.data) if isinstance(part, ModelChunk) else 0
        return part


class ForwardedTransfers:
    """The models that are passed on at present."""

    def __init__(self) -> None:
        self._transfers: dict[str, _Transfer] = {}  # by their ids at the sources

    def is_busy(self, source: ModelSource) -> bool:
        """Return whether a source sends as many models as it can."""
        names = [each.source for each in self._transfers.values()]
        return names.count(source.name) >= FORWARDED_MAX

    def receive(self, source: str, part: Part) -> None:
        """Process a part from a source; ignore one of a transfer that has ended."""
        transfer = self._transfers.get(part.transfer_id)
        if transfer is not None and transfer.source == source:
            transfer.add(part)

    def on_unavailable(self, source: str, model: str) -> None:
        """End the transfers of a model that its source does not send any more."""
        for transfer in self._transfers.values():
            if (transfer.source, transfer.model) == (source, model):
                transfer.fail(f"{source} no longer sends it")

    def on_source_left(self, source: str) -> None:
        """End the transfers of a source that has left."""
        for transfer in self._transfers.values():
            if transfer.source == source:
                transfer.fail(_left(source))

    async def forward(
        self, source: ModelSource, request: ModelRequest, receiver: Receiver
    ) -> bool:
        """Pass a model on; return False if the receiver disconnected.

        Raises Unavailable if the source fails, and TimeoutError if the receiver is too
        slow.
        """
        transfer_id = str(uuid4())
        transfer = self._transfers[transfer_id] = _Transfer(source.name, request.model)
        complete = False
        try:
            if not source.send(ModelRequest(transfer_id, request.model, WINDOW)):
                raise Unavailable(_left(source.name))  # since its answer
            while True:
                part = await transfer.next()
                if isinstance(part, ModelDone):
                    complete = True
                    return receiver.send(ModelDone(request.transfer_id, request.model))
                async with asyncio.timeout(STALL_TIMEOUT):
                    await receiver.wait_writable()
                if not receiver.send(replace(part, transfer_id=request.transfer_id)):
                    return False
                if part.data:  # 0 would end the transfer
                    source.send(ModelPull(transfer_id, len(part.data)))
        finally:
            del self._transfers[transfer_id]
            if not complete:
                source.send(ModelPull(transfer_id, 0))


def _left(source: str) -> str:
    return f"{source} has left"
