"""The worker protocols: the seam, and one folder for each wire."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from shoal.protocols.seam.protocol import AnyWireProtocol

OWN = "shoal"


@cache
def own_wire() -> AnyWireProtocol:
    """Return Shoal's own protocol, without importing those of other programs."""
    protocol: AnyWireProtocol = importlib.import_module(f"{__name__}.{OWN}").PROTOCOL
    return protocol


@cache
def discover() -> Mapping[str, AnyWireProtocol]:
    """Return every protocol by name: each folder here is one, but for the seam."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        if module.ispkg and module.name != "seam":
            package = importlib.import_module(f"{__name__}.{module.name}")
            protocol: AnyWireProtocol = package.PROTOCOL
            found[protocol.name] = protocol
    return MappingProxyType(found)
