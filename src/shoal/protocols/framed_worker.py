"""A worker's session whose messages a link can cut, as it can those of its peers."""

from collections.abc import Sequence
from typing import Protocol

from shoal.domain.vocabulary import Command, Event
from shoal.protocols.as_worker import AsWorker
from shoal.protocols.crowd import From
from shoal.protocols.framing import Framed, Whole
from shoal.protocols.session import Batch, Output, Parting, Welcome


class FramedCrowd(Framed[From], Parting, Protocol):
    """A session with peers, as it is on a byte stream whose messages a link cuts."""


class FramedWorker:
    """Cuts messages for the session that ``worker`` begins.

    That has to be there before the time is known, for a link asks it first.
    """

    def __init__(self, worker: AsWorker, framed: FramedCrowd) -> None:
        self._worker = worker
        self._framed = framed
        self.accepts = worker.accepts
        self.head_size = framed.head_size
        self.body_size = framed.body_size
        self.place = framed.place
        self.checksum = framed.checksum
        self.opened = framed.opened
        self.parted = framed.parted

    @property
    def deadline(self) -> float | None:
        return self._worker.deadline

    def take(
        self, messages: Sequence[Whole], now: float
    ) -> Sequence[Command | Welcome | Output]:
        return self._worker.hear(self._framed.take(messages, now), now)

    def receive(self, batch: Batch, now: float) -> Sequence[Command | Welcome | Output]:
        return self._worker.receive(batch, now)

    def issue(self, message: Event, now: float) -> Sequence[Output]:
        return self._worker.issue(message, now)

    def tick(self, now: float) -> Sequence[Command | Welcome | Output]:
        return self._worker.tick(now)
