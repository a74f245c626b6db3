"""Which coordinator a worker calls functions for, and by which wire."""

from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from shoal.cli.fleet_files import kept_fleet
from shoal.cli.whereto import HTTP, Target, direct_now, stands_for_direct, target
from shoal.domain.credentials import without_fingerprint
from shoal.domain.errors import ConfigError, Unavailable
from shoal.domain.work import Kind
from shoal.protocols import Protocol, discover


async def target_of_calls(url: str, wire: str, token: str, data: Path) -> Target:
    """Return where to call functions; the arguments are as for ``target``.

    A wire that calls functions can be named, and is then spoken at whatever address;
    else it is one of our own coordinators that is joined, at its port for them.

    Raises ConfigError if no wire calls functions, or it is no coordinator of ours, or
    has no such port.
    """
    wires = {each.name: each for each in discover().values() if calls(each)}
    if not wires:
        raise ConfigError(
            "--tasks: there is no wire here by which functions are called"
        )
    if url and urlsplit(url).scheme not in HTTP:
        if wire not in wires:
            raise ConfigError(
                f"{url.partition('?')[0]}: functions are called for a coordinator at "
                f"http://HOST:PORT, or for a peer with --wire {' or '.join(wires)}"
            )
        plain, fingerprint = without_fingerprint(token)
        if not plain:
            url, plain = _in_kept_fleet(url, wires[wire], data)
        return Target(url, wires[wire], plain, fingerprint)
    ours = await target(url, "auto", token, data)
    there = replace(ours, protocol=wires.get(wire) or next(iter(wires.values())))
    if urlsplit(ours.url).scheme not in HTTP:
        raise ConfigError(
            f"{ours.shown} was found on the local network; to call functions for it, "
            "give its address: shoal join http://HOST:PORT --tasks MODULE"
        )
    if not ours.protocol.preferred:
        raise ConfigError(
            f"{ours.shown}: what answers there calls no functions; leave out --tasks, "
            "or join a coordinator that `shoal serve` runs"
        )
    try:
        direct = await direct_now(there)
    except Unavailable:  # machines start in any order
        return replace(there, direct=stands_for_direct(there.url))
    if not direct:
        raise ConfigError(
            f"{ours.shown} has no port for those that call functions: its --join-token "
            "is too short for that (its log tells when it starts), or a proxy stands "
            "before it"
        )
    return replace(there, direct=direct)


def _in_kept_fleet(url: str, protocol: Protocol, data: Path) -> tuple[str, str]:
    """Return a peer's URL, and the token of the fleet that this machine was let into.

    Empty: it was let into none, or the peer is not of that one.

    Raises ConfigError if the file with the token is damaged.
    """
    fleets = protocol.fleets
    kept = None if fleets is None else kept_fleet(data, fleets)
    if fleets is None or kept is None:
        return url, ""
    token, name = kept
    within = fleets.within(url, name)
    return (url, "") if within is None else (within, token)


def calls(protocol: Protocol) -> bool:
    """Say whether functions are called by a wire."""
    return Kind.CALL in protocol.kinds
