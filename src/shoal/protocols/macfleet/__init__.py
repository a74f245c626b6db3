"""MacFleet: nodes that discover each other, share a token, and exchange tasks.

Sources: the MacFleet document on heartbeats and transport, and exchanges recorded with
MacFleet's own programs; see ``docs/protocols/macfleet.md``.
"""

from shoal.protocols.macfleet.addresses import FLEETS, SECURE_SCHEME, coordinator_url
from shoal.protocols.macfleet.dialer import FleetDialer
from shoal.protocols.macfleet.function_probe import CARRIED_KINDS
from shoal.protocols.macfleet.local_node import Config
from shoal.protocols.macfleet.node_endpoints import endpoints, worker_endpoints
from shoal.protocols.macfleet.ranks import FleetRanks
from shoal.protocols.seam.protocol import WireProtocol

__all__ = ["PROTOCOL", "Config"]

PROTOCOL = WireProtocol(
    name="macfleet",
    config=Config,
    endpoints=endpoints,
    token=lambda config: config.token,
    schemes=frozenset(
        {SECURE_SCHEME}
    ),  # other schemes belong to other protocols unless this one is named
    dial=FleetDialer,
    peers="MacFleet's nodes",
    kinds=CARRIED_KINDS,
    has_keys=True,
    joint=True,
    address=coordinator_url,
    fleets=FLEETS,
    mixed_ranks=FleetRanks,
    worker_endpoints=worker_endpoints,
    plain_peers=lambda config, tls, anyone: (
        "" if config.tls or not config.open else "nodes of the open fleet"
    ),
)
