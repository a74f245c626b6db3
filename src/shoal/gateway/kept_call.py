"""A call that is a job like any other, as its client hears of it."""

from typing import Protocol

from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import LaneReturn
from shoal.gateway.call_items import ACCEPTED, BEGUN, PROGRESS, Told
from shoal.runtime.asker import Ended
from shoal.runtime.peers import Peer


class Client(Protocol):
    """Who made a call."""

    def tell(self, item: Told) -> None:
        """Tell the client something."""
        ...

    def ended(self, number: int, job: Ended) -> None:
        """Tell the client how a call ended."""
        ...


class KeptCall:
    """Passes on what becomes of a job, under the number that its client gave it."""

    __slots__ = ("_client", "_number", "_progress")

    def __init__(self, client: Client, number: int, *, progress: bool) -> None:
        self._client = client
        self._number = number
        self._progress = progress

    def accepted(self, job_id: JobId) -> None:
        self._client.tell((ACCEPTED, self._number, job_id))

    def leased(self, job_id: JobId, lease: LeaseNumber, peer: Peer) -> None:
        self._client.tell((BEGUN, self._number, lease))

    def advanced(self, job_id: JobId, share: float | None, remark: str) -> None:
        if self._progress:
            self._client.tell((PROGRESS, self._number, share, remark))

    def returned(self, returns: list[LaneReturn]) -> None:
        pass  # only lanes return so

    def ended(self, job: Ended) -> None:
        self._client.ended(self._number, job)
