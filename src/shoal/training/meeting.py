"""How the ranks of a run meet: at its coordinator, as the environment says.

``shoal train`` sets the variables, those of torchrun and the run's own.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from shoal.domain.addresses import is_loopback
from shoal.protocols import discover
from shoal.training.elastic_group import ElasticGroup
from shoal.training.generations.messages import RankState
from shoal.training.generations.sequence import (
    FORMATION_TIMEOUT,
    Greeting,
    RendezvousLink,
)
from shoal.training.group import TIMEOUT
from shoal.training.launch.script_environment import Coordinator, own_host
from shoal.training.rank_port import RankPort
from shoal.training.relayed_sockets import RelayedSockets
from shoal.transports.rank_socket import RankListener
from shoal.transports.tls import self_signed_tls

RUN_URL = "SHOAL_RUN_URL"
RUN_OUTPUT = "SHOAL_RUN_OUTPUT"
"""Set if files are wanted, which scripts leave as rank 0 or as the writer."""
DEFAULT_MASTER = ("127.0.0.1", "29500")

_groups: list[ElasticGroup] = []  # the one of this process, if it has one
_asks_for_writer: list[bool] = []  # whether its script has called ``is_writer``


def join_run(
    timeout: float = TIMEOUT,
    *,
    meeting: float = FORMATION_TIMEOUT,
    admits: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> ElasticGroup:
    """Return this rank's group of the run that the environment names.

    It waits until all ranks are there, for ``meeting`` seconds.  ``admits``: the caller
    lets new ranks in, by ``ElasticGroup.admit``.  ``timeout`` limits one operation, in
    seconds.

    Raises GroupEnded if the run goes on without this rank, or has ended.
    """
    host = own_address(environment)
    port = _open_run_port(host, environment)
    state = RankState(
        int(environment["RANK"]),
        (host,),
        port.port,
        port.id,
        admits=admits,
        saves=admits or bool(_asks_for_writer) or RUN_OUTPUT not in environment,
    )

    def connect(greeting: Greeting) -> RendezvousLink:
        from shoal.training.run_link import RunLink

        return RunLink(
            *_coordinator(environment),
            size=int(environment["WORLD_SIZE"]),
            round_number=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
            greeting=greeting,
        )

    run = environment["SHOAL_RUN"]
    group = ElasticGroup(
        *(connect, port, run, state, timeout),
        lambda hosts: reachable_hosts(hosts, host, environment),
        meeting,
    )
    _groups[:] = [group]
    return group


def reachable_hosts(
    hosts: Sequence[str], own: str, environment: Mapping[str, str] = os.environ
) -> Sequence[str]:
    """Return where this rank, at an address of its own, finds another of its run."""
    coordinator = urlsplit(environment.get(RUN_URL, "")).hostname
    if coordinator is None or is_loopback(own):
        return hosts
    # Whoever has a loopback address is on the coordinator's machine.
    return [coordinator if is_loopback(each) else each for each in hosts]


def is_writer() -> bool:
    """Return whether this process saves what the run has made: the lowest rank left.

    In a run of ``shoal train``, that is rank 0 until it is lost, and the next one then.
    A script that calls this before and after it trains goes on without rank 0; others
    begin anew, if their output is wanted.  Without a run, it is the process of rank 0.

        if shoal.is_writer():
            torch.save(model.state_dict(), f"{os.environ['SHOAL_OUTPUT']}/model.pt")
    """
    _asks_for_writer[:] = [True]
    if not _groups:
        return os.environ.get("RANK", "0") == "0"
    _groups[0].sequence.set_saves()
    return _groups[0].place.rank == 0


def _open_run_port(host: str, environment: Mapping[str, str]) -> RankPort:
    """Return a port for the ranks of a run, which may be on this machine or not.

    A machine that reaches rank 0 over loopback cannot know whether other ranks are
    elsewhere, so it listens on all its addresses.  Connections within the machine are
    plain, all others are encrypted.  Ranks that do not reach it dial it over the
    coordinator.
    """
    wire = next(each.ranks for each in discover().values() if each.ranks)
    listens_on = host
    if is_loopback(host):
        listens_on = "::" if ":" in host else "0.0.0.0"
    tls = self_signed_tls("rank")
    listener = RankListener(listens_on, 0, tls, plain_loopback=True)
    relay = RelayedSockets(*_coordinator(environment))
    return RankPort(wire(), listener, encrypts=None, local=True, relay=relay)


def _coordinator(environment: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the run's coordinator, its token, and the coordinator's fingerprint."""
    fingerprint = environment.get("SHOAL_RUN_FINGERPRINT", "")
    return environment[RUN_URL], environment["SHOAL_RUN_TOKEN"], fingerprint


def open_port(host: str, *, encrypts: bool) -> RankPort:
    """Return a port for other ranks at an address of this machine."""
    if RUN_URL in os.environ:
        return _open_run_port(host, os.environ)
    wire = next(each.ranks for each in discover().values() if each.ranks)
    tls = self_signed_tls("rank") if encrypts else None
    listener = RankListener(host, 0, tls)
    return RankPort(wire(), listener, encrypts=encrypts, local=True)


def own_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of this machine on the way to the coordinator, or rank 0."""
    host = environment.get("MASTER_ADDR", DEFAULT_MASTER[0])
    if is_loopback(host) and RUN_URL in environment:  # the store may be elsewhere
        return own_host(Coordinator(environment[RUN_URL], ""))
    port = environment.get("MASTER_PORT", DEFAULT_MASTER[1])
    family, _, _, _, address = socket.getaddrinfo(host, int(port))[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
        return own
