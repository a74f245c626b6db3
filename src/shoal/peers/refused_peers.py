"""The peers that are connected but not admitted, with the reasons, for operators."""

from collections.abc import Mapping

REFUSED_MAX = 256  # peers; anybody can connect, so beyond it the oldest are dropped


class RefusedPeers:
    """The reasons for which connected peers are not admitted, by wire and name."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    @property
    def reasons(self) -> Mapping[str, str]:
        """The reason for each peer, by ``WIRE:NAME``, the oldest first."""
        return self._reasons

    def add(self, peer: str, reason: str) -> None:
        """Add a peer, or replace its reason."""
        self._reasons[peer] = reason
        if len(self._reasons) > REFUSED_MAX:
            del self._reasons[next(iter(self._reasons))]

    def discard(self, peer: str) -> None:
        """Remove a peer that was admitted or has left, if it is here."""
        self._reasons.pop(peer, None)
