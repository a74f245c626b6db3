"""Sends and receives of one rank over sockets.

Any thread begins them, and none waits here.  One thread a connection reads what
arrives, where it belongs; each outgoing connection has a thread of its own, too.
"""

import struct
import threading
from collections.abc import Callable, Sequence

from shoal.domain.errors import PeerError
from shoal.training.collectives import Kind, segments
from shoal.training.links import GroupStep, IncomingLink
from shoal.training.point_to_point.matcher import (
    ArrayTransfer,
    Envelope,
    Note,
    Parcel,
    TransferMatcher,
)
from shoal.training.rank_port import GroupEnded, GroupLinks, LinkUse
from shoal.transports.rank_socket import Disconnected

ENVELOPE = struct.Struct("<BQqQ")


class PointToPoint:
    """The sends and receives of one rank in one generation of a group.

    A transfer ends when the group ends.  The group ends if a transfer waits for a rank
    that is lost; that others have disconnected is no failure.  A rank that is done may
    disconnect while this one has not noticed yet that all was sent, or has not read all
    that it sent: for sends, only the failure of a send counts, and for what comes, only
    the end of the connection that it comes by.
    """

    def __init__(self, links: GroupLinks) -> None:
        self._links = links
        membership = links.membership
        self._others = {*range(membership.size)} - {membership.rank}
        self._at = GroupStep(membership.generation)
        self._matcher = TransferMatcher()
        self._lock = threading.Lock()
        self._lost: dict[int, str] = {}
        self._unreachable: set[int] = set()  # of these: nothing can be sent to them
        self._read_from: set[int] = set()  # ranks whose connections have not ended
        links.attend(self._read, self._on_unreachable, self._on_end)

    def send(self, transfer: ArrayTransfer) -> None:
        """Begin to send an array.  Raises GroupEnded."""
        self._act(self._matcher.send, transfer)

    def receive(self, transfer: ArrayTransfer) -> None:
        """Begin to receive an array.  Raises GroupEnded."""
        self._act(self._matcher.receive, transfer)

    @property
    def is_busy(self) -> bool:
        """Whether a transfer has not ended."""
        with self._lock:
            return any((*self._matcher.leaving(), *self._matcher.waiting()))

    def _act(
        self,
        begin: Callable[[ArrayTransfer], Sequence[Parcel]],
        transfer: ArrayTransfer,
    ) -> None:
        peer = transfer.peer
        with self._lock:
            self._links.check()
            # The connections of both directions show whether the other is still there.
            for each in self._others if peer is None else [peer]:
                self._links.outgoing(each, LinkUse.POINT_TO_POINT)
        self._handle(lambda: begin(transfer), peer)
        self._end_if_stuck()

    def _handle(
        self, handle: Callable[[], Sequence[Parcel]], suspect: int | None
    ) -> None:
        """Let the matcher handle something, and do what follows."""
        try:
            with self._lock:
                self._links.check()
                for parcel in handle():
                    self._send(parcel)
                ended, self._matcher.ended = self._matcher.ended, []
        except PeerError as error:
            name = "" if suspect is None else self._links.membership.name(suspect)
            self._links.abort(f"{name}: {error}", suspect, out_of_step=True)
            self._links.check()
        else:
            for each in ended:
                each.on_end(None)

    def _send(self, parcel: Parcel) -> None:
        to, envelope, transfer = parcel
        link = self._links.outgoing(to, LinkUse.POINT_TO_POINT)
        link.begin(Kind.POINT_TO_POINT)
        link.send(memoryview(ENVELOPE.pack(*envelope)), self._at)
        if transfer is not None:
            for segment in segments(transfer.memory):
                link.send(segment, self._at)
            link.call(lambda: self._on_sent(transfer))

    def _on_sent(self, transfer: ArrayTransfer) -> None:
        with self._lock:
            self._matcher.sent(transfer)
            ended, self._matcher.ended = self._matcher.ended, []
        for each in ended:
            each.on_end(None)

    def _read(self, source: int, link: IncomingLink) -> None:
        """Read what a rank sends, until the connection ends."""
        try:
            self._links.outgoing(source, LinkUse.POINT_TO_POINT)
            with self._lock:
                self._read_from.add(source)
            while True:
                self._receive(source, link)
        except GroupEnded:
            pass
        except Disconnected as error:
            with self._lock:
                self._read_from.discard(source)
            self._on_lost(source, str(error))
        except PeerError as error:
            self._links.abort(f"{self._links.membership.name(source)}: {error}", source)
        finally:
            link.close()

    def _receive(self, source: int, link: IncomingLink) -> None:
        head = memoryview(bytearray(ENVELOPE.size))
        link.begin(Kind.POINT_TO_POINT)
        link.receive_into(head, self._at)
        envelope = _decode(head)
        memory: memoryview | None = None

        def begin() -> Sequence[Parcel]:
            nonlocal memory
            parcels = self._matcher.begin(source, envelope)
            memory = self._matcher.memory_for(source, envelope)
            return parcels

        def end() -> Sequence[Parcel]:
            self._matcher.end(source, envelope)
            return ()

        self._handle(begin, source)
        if memory is not None:
            for segment in segments(memory):
                link.receive_into(segment, self._at)
            self._handle(end, source)

    def _on_unreachable(self, rank: int, reason: str) -> None:
        """The connection to a rank has ended."""
        with self._lock:
            self._unreachable.add(rank)
        self._on_lost(rank, reason)

    def _on_lost(self, rank: int, reason: str) -> None:
        """A connection from or to a rank has ended."""
        with self._lock:
            self._lost.setdefault(rank, reason)
        self._end_if_stuck()

    def _end_if_stuck(self) -> None:
        """End the group if something waits for ranks that are lost."""
        with self._lock:
            unsent = {each.peer for each in self._matcher.leaving()}
            awaited = {each.peer for each in self._matcher.waiting()}
            if self._lost.keys() >= self._others and None in awaited:
                awaited |= self._others
            awaited -= self._read_from
            stuck = next(
                (
                    rank
                    for rank in self._lost
                    if rank in awaited or (rank in unsent and rank in self._unreachable)
                ),
                None,
            )
        if stuck is not None:
            name = self._links.membership.name(stuck)
            self._links.abort(f"{name}: {self._lost[stuck]}", stuck)

    def _on_end(self) -> None:
        """The group has ended: so do all transfers."""
        with self._lock:
            matcher, self._matcher = self._matcher, TransferMatcher()
        for each in (*matcher.leaving(), *matcher.waiting()):
            try:
                self._links.check()
            except GroupEnded as ended:
                each.on_end(ended)


def _decode(head: memoryview) -> Envelope:
    note, number, tag, size = ENVELOPE.unpack(head)
    try:
        return Envelope(Note(note), number, tag, size)
    except ValueError as error:
        raise PeerError(f"a message of kind {note}") from error
