"""The peers of this coordinator, for people: who is connected, and who was refused.

What a peer says about itself is unverified and decides nothing.
"""

from shoal.protocols.seam.peer_session import PeerJoined
from shoal.protocols.seam.session import UNDESCRIBED, PeerProfile

REFUSED_MAX = 256  # peers; anybody can connect, so beyond it the oldest are dropped
PROFILES_MAX = 4096  # of peers, also of those that have left; then the oldest go


class PeerDirectory:
    """The peers, each by ``WIRE:NAME``.

    A peer's profile outlives its connection, because its account does.
    """

    def __init__(self) -> None:
        self.connected: dict[str, PeerJoined] = {}  # admitted, but no single workers
        self._addresses: dict[str, str] = {}
        self.refusals: dict[str, str] = {}  # of connected peers, the oldest first
        self._profiles: dict[str, PeerProfile] = {}

    def profile_of(self, peer: str) -> PeerProfile:
        """Return what a peer says about itself; an empty profile if it says nothing."""
        return self._profiles.get(peer, UNDESCRIBED)

    def address_of(self, peer: str) -> str:
        """Return the URL at which a connected peer was dialled; empty if it dialled."""
        return self._addresses.get(peer, "")

    def add(self, peer: str, joined: PeerJoined, address: str = "") -> None:
        """Add an admitted peer, and the URL at which it was dialled."""
        self.connected[peer] = joined
        self._addresses[peer] = address

    def remove(self, peer: str) -> None:
        """Remove a peer that has left."""
        self.connected.pop(peer, None)
        self._addresses.pop(peer, None)

    def describe(self, peer: str, profile: PeerProfile) -> bool:
        """Set a peer's profile; return whether it has changed."""
        if self._profiles.pop(peer, UNDESCRIBED) == profile:
            self._profiles[peer] = profile
            return False
        self._profiles[peer] = profile
        if len(self._profiles) > PROFILES_MAX:
            del self._profiles[next(iter(self._profiles))]
        return True

    def refuse(self, peer: str, reason: str) -> None:
        """Add a peer that is not admitted, or replace its reason."""
        self.refusals[peer] = reason
        if len(self.refusals) > REFUSED_MAX:
            del self.refusals[next(iter(self.refusals))]

    def remove_refused(self, peer: str) -> None:
        """Remove a peer that was admitted after all, or has left."""
        self.refusals.pop(peer, None)
