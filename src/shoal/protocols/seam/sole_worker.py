"""The coordinator's end of a wire on which a connection is one worker.

Such a wire's session names no peers: it yields the worker's events and accepts commands
for it.  This module adapts it to a session with a single peer.
"""

from collections.abc import Sequence
from typing import cast

from shoal.domain.vocabulary import AnswerChunk, CancelJob, Command, Event, Joined
from shoal.protocols.seam.admission import AdmissionGrant
from shoal.protocols.seam.peer_session import PeerJoined, PeerMessage, ToPeer
from shoal.protocols.seam.session import (
    Batch,
    Bulk,
    Close,
    CoordinatorEnd,
    Notice,
    Output,
    Send,
)

THE_WORKER = ""
"""The key of the single peer."""


class SoleWorkerSession:
    """Adds the key of the single peer to every message.

    Args:
        worker: the wire's session.  It may change ``accepts`` until the worker joins.
        grant: the permission that the worker was admitted by.
    """

    def __init__(self, worker: CoordinatorEnd, grant: AdmissionGrant) -> None:
        self._worker = worker
        self._grant = grant

    @property
    def accepts(self) -> frozenset[type]:
        return self._worker.accepts

    @property
    def deadline(self) -> float | None:
        return self._worker.deadline

    def receive(self, batch: Batch, now: float) -> Sequence[PeerMessage | Output]:
        return self._tagged(self._worker.receive(batch, now))

    def send(self, message: ToPeer, now: float) -> Sequence[Output]:
        command = cast(Command, message.message)  # ``accepts`` names commands only
        return self._worker.send(command, now)

    def tick(self, now: float) -> Sequence[PeerMessage | Output]:
        return self._tagged(self._worker.tick(now))

    def _tagged(
        self, outputs: Sequence[Event | Output]
    ) -> Sequence[PeerMessage | Output]:
        tagged: list[PeerMessage | Output] = []
        for output in outputs:
            match output:
                case AnswerChunk():  # first: one per token
                    tagged.append(PeerMessage(THE_WORKER, output))
                case Send() | Bulk() | Close() | Notice():
                    tagged.append(output)
                case Joined(name):
                    cancels = CancelJob in self._worker.accepts
                    peer = PeerJoined(
                        name, cancels=cancels, grant=self._grant, sole_worker=True
                    )
                    tagged.append(PeerMessage(THE_WORKER, peer))
                    tagged.append(PeerMessage(THE_WORKER, output))
                case event:
                    tagged.append(PeerMessage(THE_WORKER, event))
        return tagged
