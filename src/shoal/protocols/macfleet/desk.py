"""What the connections of one node share: who is there already, and as whom.

Real nodes let a later connection with the same id take the place of the earlier one,
whoever makes it; here it takes the same key, or the same address.
"""

from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from shoal.domain.errors import NotAdmitted


@dataclass(slots=True, eq=False, weakref_slot=True)
class Seat:
    """A connection to a peer; ``heard`` is when it last said that it is there.

    ``outbound``: it was us who made it.  After ``silence_max`` seconds without a word
    it is free; None: it need not say any.
    """

    name: str
    public_key: bytes
    address: str
    outbound: bool
    heard: float
    silence_max: float | None

    def is_free(self, now: float) -> bool:
        """Say whether it has been silent for too long."""
        return self.silence_max is not None and now - self.heard > self.silence_max


@dataclass(slots=True)
class Desk:
    """Who sits where, by name.

    Only its connection keeps a seat, so that none outlives it however that ends: a
    session is not told of every end.
    """

    _seats: WeakValueDictionary[str, Seat] = field(default_factory=WeakValueDictionary)

    def take(self, seat: Seat, now: float) -> None:
        """Give a new connection its seat; an older one of the same peer gives way.

        Raises NotAdmitted if somebody else sits there.
        """
        seated = self._seats.get(seat.name)
        if seated is not None and not seated.is_free(now):
            if seat.public_key != seated.public_key:
                raise NotAdmitted(
                    f"another machine is here by the name {seat.name!r}: choose "
                    "another --name"
                )
            if not seat.public_key and seat.address != seated.address:
                raise NotAdmitted(
                    f"{seat.name!r} is here already, from {seated.address}: while that "
                    "lasts it may connect anew only from there"
                )
        self._seats[seat.name] = seat

    def has_called(self, name: str) -> bool:
        """Say whether a peer of that name is here, and it was not us who called.

        It may have been silent for too long: its connection then ends at any moment.
        """
        seated = self._seats.get(name)
        return seated is not None and not seated.outbound

    def leave(self, seat: Seat) -> None:
        """Free a seat, if nobody has taken it meanwhile."""
        if self._seats.get(seat.name) is seat:
            del self._seats[seat.name]
