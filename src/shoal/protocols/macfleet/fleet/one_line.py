"""The first line of a byte stream, which is all that a heartbeat is."""

from shoal.domain.errors import LimitExceeded, PeerError
from shoal.protocols.macfleet.wire.lines import LINE_MAX
from shoal.protocols.session import Batch


class OneLine:
    """Puts together what arrives up to the end of the line; memory is bounded."""

    def __init__(self) -> None:
        self._held = bytearray()

    @property
    def so_far(self) -> bytes:
        """What came of the line."""
        return bytes(self._held)

    def take(self, batch: Batch) -> bytes | None:
        """Take what arrived; return the line when it is whole, without its end.

        Raises LimitExceeded if it gets too long.
        """
        for data in batch:
            if isinstance(data, str):
                raise PeerError("text message on a byte stream")
            piece, end, _ = data.partition(b"\n")
            self._held += piece
            if len(self._held) > LINE_MAX:
                raise LimitExceeded("heartbeat line", len(self._held), LINE_MAX)
            if end:
                return bytes(self._held)
        return None
