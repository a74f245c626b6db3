"""How a conversation is held on either carrier: what is said when, and what is not.

Source: what real peers do, on a local network and through a relay; see
``docs/protocols/tealenet.md``.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Manners:
    """The habits of a carrier; times are in seconds.

    ``greets`` says that whoever dialled has to say hello, and nothing else is heard
    before; otherwise peers that are not ours go without.  ``degraded_after`` and
    ``gone_after`` count from a peer's last heartbeat.  ``shares`` says that models may
    be copied over it.
    """

    greets: bool
    heartbeat: float
    degraded_after: float
    gone_after: float
    shares: bool
    message_max: int
    task_max: int

    def request_max(self, *, to_worker: bool) -> int:
        """Return how many bytes a request may have."""
        return self.task_max if to_worker else self.message_max


LAN = Manners(
    greets=True,
    heartbeat=5.0,
    degraded_after=15.0,
    gone_after=30.0,
    shares=True,
    message_max=4 << 20,
    task_max=64 << 20,
)
WAN = Manners(
    greets=False,
    heartbeat=15.0,
    # Twice a heartbeat and then some: the relay may be slow without being lost.
    degraded_after=45.0,
    gone_after=90.0,
    shares=False,
    # A relay takes 16 MiB, of which base64 leaves three quarters.
    message_max=11 << 20,
    task_max=11 << 20,
)
