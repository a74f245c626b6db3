"""Timing, sizes and rules of the two kinds of links: local network and relay.

Source: what real peers do on each; see ``docs/protocols/tealenet.md``.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """The parameters of a link; times are in seconds.

    ``requires_hello``: the dialling peer must send a hello first; otherwise plain peers
    need not.  ``degraded_after`` and ``disconnected_after`` count from a peer's last
    heartbeat.  ``shares_models``: models may be copied over the link.
    """

    requires_hello: bool
    heartbeat_interval: float
    degraded_after: float
    disconnected_after: float
    shares_models: bool
    message_max: int
    worker_request_max: int

    def request_max(self, *, to_worker: bool) -> int:
        """Return the maximum size of a request, in bytes."""
        return self.worker_request_max if to_worker else self.message_max


LAN = LinkProfile(
    requires_hello=True,
    heartbeat_interval=5.0,
    degraded_after=15.0,
    disconnected_after=30.0,
    shares_models=True,
    message_max=4 << 20,
    worker_request_max=64 << 20,
)
WAN = LinkProfile(
    requires_hello=False,
    heartbeat_interval=15.0,
    # Three intervals, because a relay may be slow.
    degraded_after=45.0,
    disconnected_after=90.0,
    shares_models=False,
    # A relay accepts 16 MiB, of which base64 leaves three quarters.
    message_max=11 << 20,
    worker_request_max=11 << 20,
)
