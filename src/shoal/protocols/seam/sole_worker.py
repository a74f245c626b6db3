"""The coordinator's end of a wire on which a connection is one worker.

Such a wire's session names no peers: it yields the worker's events and accepts commands
for it.  This module adapts it to a session with a single peer.
"""

from collections.abc import Sequence
from typing import Protocol, cast

from shoal.domain.vocabulary import AnswerChunk, CancelJob, Command, Event, Joined
from shoal.protocols.seam import session
from shoal.protocols.seam.admission import AdmissionGrant
from shoal.protocols.seam.peer_session import PeerJoined, PeerMessage, ToPeer

THE_WORKER = ""
"""The key of the single peer."""


class SoleWorkerEnd(session.Session[Event, Command], Protocol):
    """A wire's session with a worker.

    It may change ``accepts`` and ``grant`` until the worker joins.
    """

    @property
    def grant(self) -> AdmissionGrant:
        """The permission that the worker was admitted by."""


class SoleWorkerSession:
    """Adds the key of the single peer to every message."""

    def __init__(self, worker: SoleWorkerEnd) -> None:
        self._worker = worker

    @property
    def accepts(self) -> frozenset[type]:
        return self._worker.accepts

    @property
    def deadline(self) -> float | None:
        return self._worker.deadline

    def receive(
        self, batch: session.Batch, now: float
    ) -> Sequence[PeerMessage | session.Output]:
        return self._tagged(self._worker.receive(batch, now))

    def send(self, message: ToPeer, now: float) -> Sequence[session.Output]:
        command = cast(Command, message.message)  # ``accepts`` names commands only
        return self._worker.send(command, now)

    def tick(self, now: float) -> Sequence[PeerMessage | session.Output]:
        return self._tagged(self._worker.tick(now))

    def _tagged(
        self, outputs: Sequence[Event | session.Output]
    ) -> Sequence[PeerMessage | session.Output]:
        tagged: list[PeerMessage | session.Output] = []
        for output in outputs:
            match output:
                case AnswerChunk():  # first: one per token
                    tagged.append(PeerMessage(THE_WORKER, output))
                case (
                    session.Send() | session.Bulk() | session.Close() | session.Notice()
                ):
                    tagged.append(output)
                case Joined(name):
                    cancels = CancelJob in self._worker.accepts
                    grant = self._worker.grant
                    peer = PeerJoined(
                        name, cancels=cancels, grant=grant, sole_worker=True
                    )
                    tagged.append(PeerMessage(THE_WORKER, peer))
                    tagged.append(PeerMessage(THE_WORKER, output))
                case event:
                    tagged.append(PeerMessage(THE_WORKER, event))
        return tagged
