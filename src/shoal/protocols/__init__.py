"""The worker protocols: the seam, and one folder for each wire."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.protocols.session import Admission, Dialer, Endpoint, Member


@dataclass(frozen=True, slots=True)
class Protocol:
    """A worker protocol, as the rest of the program sees it.

    ``config`` is a frozen dataclass whose fields become the section, the flags and the
    variables of that name; each field's metadata holds its ``help``.  It stays ``Any``
    here because every protocol has a type of its own and takes only that.
    """

    name: str
    config: type[Any]
    endpoints: Callable[[Any, int, Admission], Sequence[Endpoint]]
    """Takes the configuration, a number that grows with every start, and who decides
    whether a worker may join."""
    schemes: frozenset[str]
    """The URL schemes for which this wire is taken when none is named."""
    dial: Callable[[str, Member], Dialer]
    """Takes the coordinator's URL; raises ConfigError if it is no good."""


def discover() -> Mapping[str, Protocol]:
    """Return every protocol by name: each folder here is one."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        if module.ispkg:
            package = importlib.import_module(f"{__name__}.{module.name}")
            protocol: Protocol = package.PROTOCOL
            found[protocol.name] = protocol
    return found
