"""TealeNet: peers on the local network and through relays, who serve and ask alike.

Source: TealeNet's documents on cluster and relay messages, and exchanges recorded with
the real programs; see ``docs/protocols/tealenet.md``.
"""

from collections.abc import Sequence
from functools import partial
from urllib.parse import parse_qsl

from shoal.protocols import Endpoint, WireProtocol
from shoal.protocols.contacts import Contacting
from shoal.protocols.crowd import (
    Browser,
    CrowdSession,
    Listener,
    Outgoing,
    Protection,
    Security,
    Service,
    Sighting,
    SwitchRoute,
)
from shoal.protocols.session import Hello, Setting
from shoal.protocols.tealenet.addresses import (
    NODE,
    RELAY_PATH,
    peer_url,
    relay_url,
    sighted_url,
)
from shoal.protocols.tealenet.config import Config
from shoal.protocols.tealenet.desk import Desk
from shoal.protocols.tealenet.dialer import TealeDialer, call_on, called_on
from shoal.protocols.tealenet.lan import MESSAGE_MAX, lan_session
from shoal.protocols.tealenet.manners import LAN
from shoal.protocols.tealenet.node.known import Pinned
from shoal.protocols.tealenet.node.node import Node
from shoal.protocols.tealenet.ourselves import Ourselves, coordinator
from shoal.protocols.tealenet.peer import Caller
from shoal.protocols.tealenet.relay.messages import MESSAGE_MAX as RELAYED_MAX
from shoal.protocols.tealenet.relay.relay import Relay

__all__ = ["PROTOCOL", "Config"]

SERVICE = "_teale._tcp"
VERSION = "1"  # of what is announced
RANK = 10  # before wires on which any query means a worker


def endpoints(config: Config, setting: Setting) -> Sequence[Endpoint]:
    """Return every way to peers that the configuration allows, and our own relay.

    Raises ConfigError for an address that cannot be dialled.
    """
    own = coordinator(config, setting)
    desk = Desk(own.device_id, LAN.gone_after)
    pinned = Pinned()
    found: list[Endpoint] = [_relay(own, setting, pinned)]
    if config.lan:
        found += _listeners(config, own, desk)
    for address in config.peers:
        url = peer_url(address)
        found.append(_call(own, url, desk, named=True))
    if setting.contacts:
        found.append(
            Contacting(
                "tealenet",
                setting.contacts,
                lambda address: _call(own, peer_url(address), desk, named=True),
            )
        )
    found += [_membership(own, url, pinned) for url in config.relays]
    if config.browse:
        found.append(Browser(SERVICE, partial(_meet, own, desk)))
    return found


def _relay(own: Ourselves, setting: Setting, pinned: Pinned) -> SwitchRoute:
    """Return our own relay, on which we are a node like any other."""
    relay = Relay(setting)
    return SwitchRoute(
        RANK,
        claims,
        relay,
        RELAYED_MAX,
        resident=lambda now: Node(own, now, pinned, relay.address_of),
    )


def claims(hello: Hello) -> bool:
    """Say whether a connection is for the relay: all real nodes say who they are."""
    names = {name for name, _ in parse_qsl(hello.query, keep_blank_values=True)}
    return hello.path == RELAY_PATH and NODE in names


def _listeners(config: Config, own: Ourselves, desk: Desk) -> Sequence[Listener]:
    def accept(protection: Protection, address: str, now: float) -> CrowdSession:
        caller = Caller(dialled=False, address=address, protection=protection)
        return lan_session(own, caller, desk)

    return [
        Listener(config.port, partial(accept, Protection.PLAIN), _service(own)),
        # Real peers know of none: it is found by whoever asks over HTTPS.
        Listener(0, partial(accept, Protection.TLS), security=Security.VOUCHED),
    ]


def _service(own: Ourselves) -> Service:
    text = {
        "deviceID": own.device_id,
        "chip": own.hardware.chip,
        "ram": str(round(own.hardware.memory_gb)),
        "version": VERSION,
        "shoal": VERSION,  # real peers skip it
    }
    return Service(SERVICE, own.name, text)


def _call(own: Ourselves, url: str, desk: Desk, *, named: bool) -> Outgoing:
    def open_(now: float) -> CrowdSession:
        return called_on(own, url, desk, named=named)

    return Outgoing(url, open_, message_max=MESSAGE_MAX)


def _membership(own: Ourselves, url: str, pinned: Pinned) -> Outgoing:
    """Return how we take part in another relay."""
    assert own.identity is not None, "a coordinator has one"
    return Outgoing(
        relay_url(url, own.identity.public_key.hex()),
        lambda now: Node(own, now, pinned),
        message_max=RELAYED_MAX,
    )


def _meet(
    own: Ourselves, desk: Desk, sighting: Sighting, now: float
) -> Outgoing | None:
    """Return how to connect to a peer that was found.

    That is not to be with ourselves, nor with whom we are connected already.
    """
    found = sighting.text.get("deviceID")
    if found is not None and desk.has(found.upper(), now):
        return None
    if found == own.device_id or (found is None and sighting.name == own.name):
        return None
    url = sighted_url(sighting)
    return None if url is None else _call(own, url, desk, named=False)


PROTOCOL = WireProtocol(
    name="tealenet",
    config=Config,
    endpoints=endpoints,
    token=lambda config: config.token,
    schemes=frozenset({"http", "https", "ws", "wss", "tcp", "tls"}),
    dial=TealeDialer,
    signs=True,
    joint=True,
    preferred=True,
    service=SERVICE,
    peering=call_on,
)
