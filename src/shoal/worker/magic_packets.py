"""Wake-on-LAN: this machine's hardware addresses, and packets that wake another one.

The format is AMD's *Magic Packet Technology* (publication 20213, 1995): six bytes of
255, then the hardware address 16 times.
"""

import logging
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.domain.worker import valid_hardware_addresses
from shoal.transports.own_networks import own_addresses

PORT = 9  # of the service "discard"

log = logging.getLogger("shoal.worker")


class _Network(NamedTuple):
    """A network of this machine; ``hardware`` is that of its interface, or empty."""

    hardware: str
    address: str
    broadcast: str


def hardware_addresses() -> tuple[str, ...]:
    """Return the hardware addresses of this machine's interfaces on networks."""
    return valid_hardware_addresses(each.hardware for each in _networks())


def magic_packet(address: str) -> bytes:
    """Return the packet that wakes the machine with a hardware address."""
    return b"\xff" * 6 + bytes.fromhex(address.replace(":", "")) * 16


def call_machine(addresses: Sequence[str]) -> None:
    """Send the packets for a machine into each network of this one.

    Only there: nobody can have them sent elsewhere.
    """
    wanted = valid_hardware_addresses(addresses)
    log.info("calling machine=%s", ",".join(wanted))
    for network in _networks():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            try:
                sender.bind((network.address, 0))
                for address in wanted:
                    sender.sendto(magic_packet(address), (network.broadcast, PORT))
            except OSError as error:
                log.info("no call from=%s: %s", network.address, error.strerror)


def _networks() -> Iterator[_Network]:
    """Yield the networks of interfaces that are up, and can broadcast."""
    for each in own_addresses():
        # What the system calls its broadcast is often the machine's own address.
        network = each.interface.network
        if (
            network.version == 4
            and network.num_addresses > 2
            and not (each.to_one or network.is_loopback)
        ):
            broadcast = str(network.broadcast_address)
            yield _Network(each.hardware, str(each.interface.ip), broadcast)
