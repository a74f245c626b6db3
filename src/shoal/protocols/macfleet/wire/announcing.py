"""How nodes are announced on a local network (DNS-SD), and what is believed of it.

Source: real peers (the document only says that they do).  A fleet with a token says no
more than an id and ports; whatever it says, anybody may have said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.domain.errors import PeerError
from shoal.protocols.crowd import Sighting
from shoal.protocols.macfleet.scores import score
from shoal.protocols.macfleet.wire.hardware import (
    CORES_MAX,
    PORTS,
    SIZE_MAX,
    UNKNOWN_PROFILE,
    WORD_MAX,
    Profile,
)

POOL_VERSION = "2.2.0"  # that of the programs whose wire this is
ID_MAX = 256  # characters


@dataclass(frozen=True, slots=True)
class Announced:
    """A node that may be there, and what it says that it is made of."""

    node_id: str
    data_port: int
    profile: Profile = UNKNOWN_PROFILE


def write_text(
    node_id: str, profile: Profile, data_port: int, links: Sequence[str] = ()
) -> Mapping[str, str]:
    """Return the TXT record of a node of an open fleet, in real peers' order.

    ``links`` are such as ``ethernet`` and ``wifi``.
    """
    return {
        "node_id": node_id,
        "gpu_cores": str(profile.gpu_cores),
        "ram_gb": str(int(profile.ram_gb)),
        "chip_name": profile.chip,
        "link_types": ",".join(links),
        "pool_version": POOL_VERSION,
        "compute_score": f"{score(profile):.1f}",
        "data_port": str(data_port),
    }


def write_secure_text(node_id: str, data_port: int) -> Mapping[str, str]:
    """Return the TXT record of a node of a fleet that has a token."""
    return {
        "node_id": node_id,
        "pool_version": POOL_VERSION,
        "data_port": str(data_port),
    }


def read_text(sighting: Sighting) -> Announced:
    """Read a TXT record; a node that tells no id is called by the service's name.

    Its score is not believed: it follows from the rest.

    Raises PeerError if a number is none, or the id cannot be one.
    """
    text = sighting.text
    node_id = text.get("node_id") or sighting.name
    if not 0 < len(node_id) <= ID_MAX or any(map(str.isspace, node_id)):
        raise PeerError(f"a node is announced as {node_id[:ID_MAX]!r}: that is no id")
    data_port = _number(text, "data_port", PORTS.stop - 1) or sighting.port + 1
    if data_port not in PORTS:
        raise PeerError(f"a node is announced with the port {data_port}")
    profile = replace(
        UNKNOWN_PROFILE,
        chip=text.get("chip_name", UNKNOWN_PROFILE.chip)[:WORD_MAX],
        gpu_cores=_number(text, "gpu_cores", CORES_MAX),
        ram_gb=float(_number(text, "ram_gb", int(SIZE_MAX))),
        data_port=data_port,
    )
    return Announced(node_id, data_port, profile)


def _number(text: Mapping[str, str], name: str, most: int) -> int:
    said = text.get(name, "0")
    if not said.isascii() or not said.isdecimal() or len(said) > len(str(most)):
        raise PeerError(f"a node is announced with {name}={said[:ID_MAX]!r}")
    if (number := int(said)) > most:
        raise PeerError(f"a node is announced with {name}={number}")
    return number
