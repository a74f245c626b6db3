"""What the conversations of one process share: who is connected which way already.

Source: what real peers do when both sides have dialled each other; see
``docs/protocols/tealenet.md``.
"""

from dataclasses import dataclass, field

SEATS_FIRST = 64  # seats at which those that were left without a word are looked for


@dataclass(slots=True)
class Seat:
    """A connection to a device; ``heard`` is when it last said that it is there."""

    device_id: str
    outbound: bool
    heard: float


@dataclass(slots=True)
class Desk:
    """Who sits where, by device.

    ``silence_max`` is how long a device that says nothing keeps its seat, in seconds:
    a session is not told when its connection is cut.
    """

    own_id: str
    silence_max: float
    _seats: dict[str, Seat] = field(default_factory=dict)
    _clear_at: int = SEATS_FIRST

    def take(self, device_id: str, *, outbound: bool, now: float) -> Seat | None:
        """Give a new connection to a device its seat; None: the older one keeps it.

        Of two that were made from different sides, the one made by the device with the
        smaller id stays; both sides come to the same.  Of two made from one side the
        newer stays, for who dials again has lost the older one.
        """
        self._clear(now)
        seated = self._seats.get(device_id) if self.has(device_id, now) else None
        if seated is not None and seated.outbound is not outbound:
            ours_wins = self.own_id < device_id
            if ours_wins is not outbound:
                return None
        seat = Seat(device_id, outbound, now)
        self._seats[device_id] = seat
        return seat

    def has(self, device_id: str, now: float) -> bool:
        """Say whether there is a connection to a device, and it has not gone silent."""
        seated = self._seats.get(device_id)
        return seated is not None and now - seated.heard <= self.silence_max

    def leave(self, seat: Seat) -> None:
        """Free a seat, if nobody has taken it meanwhile."""
        if self._seats.get(seat.device_id) is seat:
            del self._seats[seat.device_id]

    def _clear(self, now: float) -> None:
        # Only now and then: it looks at all of them, and nearly all are still there.
        if len(self._seats) < self._clear_at:
            return
        for seat in [*self._seats.values()]:
            if now - seat.heard > self.silence_max:
                del self._seats[seat.device_id]
        self._clear_at = 2 * max(len(self._seats), SEATS_FIRST // 2)
