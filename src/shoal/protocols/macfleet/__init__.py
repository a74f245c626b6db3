"""MacFleet: nodes that find each other, trust each other by a token, and share tasks.

Source: MacFleet's document on heartbeats and transport, and exchanges recorded with the
real programs; see ``docs/protocols/macfleet.md``.
"""

from shoal.protocols import WireProtocol
from shoal.protocols.macfleet.addresses import SECURE, address
from shoal.protocols.macfleet.config import Config
from shoal.protocols.macfleet.coordinator import endpoints
from shoal.protocols.macfleet.dialer import FleetDialer
from shoal.protocols.macfleet.offers import CARRIED
from shoal.protocols.macfleet.pairing import FLEETS

__all__ = ["PROTOCOL", "Config"]

PROTOCOL = WireProtocol(
    name="macfleet",
    config=Config,
    endpoints=endpoints,
    token=lambda config: config.token,
    schemes=frozenset({SECURE}),  # the others are other wires' unless this is named
    dial=FleetDialer,
    kinds=CARRIED,
    signs=True,
    joint=True,
    address=address,
    fleets=FLEETS,
)
