"""How ranks meet: at the coordinator of their run, or at PyTorch's store.

``shoal train`` sets the variables, those of torchrun and the run's own.  A group of the
coordinator goes on without lost ranks; one of PyTorch's store does not change.
"""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

from shoal.domain.addresses import is_loopback
from shoal.protocols import own_wire
from shoal.protocols.seam.ranks import SegmentWire
from shoal.training.elastic_group import ElasticGroup
from shoal.training.generations import sequence
from shoal.training.generations.messages import RankState
from shoal.training.group import TIMEOUT, RankGroup
from shoal.training.launch import script
from shoal.training.rank_port import GroupMembership, RankAddress, RankPort
from shoal.training.run_link import RunLink, relay_of
from shoal.transports.blocking.rank_socket import RankListener, address_towards
from shoal.transports.tls import self_signed_tls

if TYPE_CHECKING:
    import torch.distributed as dist

SECRET_SIZE = 32  # random bytes of a group that meets at PyTorch's store
DEFAULT_MASTER = ("127.0.0.1", "29500")

_groups: list[ElasticGroup] = []  # the one of this process, if it has one
_asks_for_writer: list[bool] = []  # whether its script has called ``is_writer``


def join_run(
    timeout: float = TIMEOUT,
    *,
    meeting: float = sequence.FORMATION_TIMEOUT,
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
        saves=admits or bool(_asks_for_writer) or script.RUN_OUTPUT not in environment,
    )

    def connect(greeting: sequence.Greeting) -> sequence.RendezvousLink:
        return RunLink(
            *_coordinator(environment),
            size=int(environment["WORLD_SIZE"]),
            round_number=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
            greeting=greeting,
        )

    run = environment[script.RUN]
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
    coordinator = script.Coordinator(environment.get(script.RUN_URL, ""), "").host
    if not coordinator or is_loopback(own):
        return hosts
    # A rank with a loopback address is on the coordinator's machine.
    return [coordinator if is_loopback(each) else each for each in hosts]


def is_writer() -> bool:
    """Return whether this process is the run's writer, the lowest remaining rank.

    In a run of ``shoal train``, that is rank 0 until it is lost, and the next one then.
    A script that calls this before and after it trains continues without rank 0; others
    restart, if their output is wanted.  Without a run, it is the process of rank 0.

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
    listens_on = host
    if is_loopback(host):
        listens_on = "::" if ":" in host else "0.0.0.0"
    tls = self_signed_tls("rank")
    listener = RankListener(listens_on, 0, tls, plain_loopback=True)
    relay = relay_of(*_coordinator(environment))
    return RankPort(_wire(), listener, encrypts=None, local=True, relay=relay)


def _coordinator(environment: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the run's coordinator, its token, and the coordinator's fingerprint."""
    fingerprint = environment.get(script.RUN_FINGERPRINT, "")
    return environment[script.RUN_URL], environment[script.RUN_TOKEN], fingerprint


def open_port(host: str, *, encrypts: bool) -> RankPort:
    """Return a port for other ranks at an address of this machine."""
    if script.RUN_URL in os.environ:
        return _open_run_port(host, os.environ)
    tls = self_signed_tls("rank") if encrypts else None
    listener = RankListener(host, 0, tls)
    return RankPort(_wire(), listener, encrypts=encrypts, local=True)


def own_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of this machine on the way to the coordinator, or rank 0."""
    host = environment.get("MASTER_ADDR", DEFAULT_MASTER[0])
    if (
        is_loopback(host) and script.RUN_URL in environment
    ):  # the store may be elsewhere
        coordinator = script.Coordinator(environment[script.RUN_URL], "")
        return address_towards(coordinator.host, coordinator.port)
    port = environment.get("MASTER_PORT", DEFAULT_MASTER[1])
    return address_towards(host, int(port))


def meet(store: "dist.Store", rank: int, size: int, timeout: timedelta) -> RankGroup:
    """Exchange addresses over PyTorch's store, and return this rank's group.

    Rank 0 draws the group's name and secret: any process that can use the store is in.
    Connections are encrypted unless the ranks meet on loopback; in a run of
    ``shoal train``, all but those within a machine are.
    """
    seconds = timeout.total_seconds()
    host = own_address()
    if rank == 0:
        drawn = {
            "group": secrets.token_hex(8),
            "secret": secrets.token_hex(SECRET_SIZE),
            "encrypts": not ip_address(host).is_loopback,
        }
        store.set("shoal/group", json.dumps(drawn))
    terms = json.loads(store.get("shoal/group"))
    port = open_port(host, encrypts=terms["encrypts"])
    membership = GroupMembership(terms["group"], 0, rank, size, terms["secret"])
    # Each rank listens before it says where.
    links = port.open_group(membership, seconds, dial_timeout=seconds)
    store.set(f"shoal/{rank}", json.dumps([[host], port.port, port.id]))
    keys = {other: f"shoal/{other}" for other in range(size)}
    store.wait(list(keys.values()), timeout)
    addresses = {}
    for other, key in keys.items():
        hosts, *rest = json.loads(store.get(key))
        addresses[other] = RankAddress(reachable_hosts(hosts, host), *rest)
    links.set_addresses(addresses)
    return RankGroup(links, seconds, on_close=port.close)


def _wire() -> SegmentWire:
    ranks = own_wire().ranks
    assert ranks is not None, "Shoal's own wire has them"
    return ranks()
