"""The environment of a script: what torchrun sets, and the run's own variables.

Source: "torchrun (Elastic Launch)", section "Environment Variables", in the
documentation of PyTorch 2.13; the rest of what its agent sets is there for scripts that
read it (``torch/distributed/elastic/agent/server/local_elastic_agent.py``).
"""

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from shoal.domain.addresses import is_loopback
from shoal.tasks.call_access import COORDINATOR_FINGERPRINT as COORDINATOR_FINGERPRINT
from shoal.tasks.call_access import COORDINATOR_URL as COORDINATOR_URL
from shoal.training.run_token import run_id_of

RUN, RUN_TOKEN = "SHOAL_RUN", "SHOAL_RUN_TOKEN"
RUN_URL, RUN_FINGERPRINT = "SHOAL_RUN_URL", "SHOAL_RUN_FINGERPRINT"
RUN_BACKEND, RUN_OUTPUT = "SHOAL_RUN_BACKEND", "SHOAL_RUN_OUTPUT"
OUTPUT_FOLDER = "SHOAL_OUTPUT"
THREADS = "OMP_NUM_THREADS"
OTHER_THREADS = frozenset({"OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"})
"""Set for tasks; without them, those libraries follow the variable above as well."""
PORTS = range(20_000, 30_000)
"""Where rank 0 listens: below what systems give away, from 32,768 or 49,152 on."""
SHOAL = "shoal"  # the backend that forms its groups at the coordinator


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The coordinator of a worker, as its processes reach it."""

    url: str
    fingerprint: str  # in hexadecimal digits; empty: none

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)


def own_host(coordinator: Coordinator) -> str:
    """Return the address of this machine on the way to the coordinator.

    Raises OSError if there is none.
    """
    family, _, _, _, address = socket.getaddrinfo(
        coordinator.host, coordinator.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
        return own


def reachable_host(published: str, own: str, coordinator: Coordinator) -> str:
    """Return the host by which this machine reaches a member that published one.

    A member on the coordinator's machine may have joined it over loopback: others reach
    it where they reach the coordinator.
    """
    if is_loopback(published) and not is_loopback(own):
        return coordinator.host
    return published


def free_port(run_id: str) -> int:
    """Return a port of this machine that is free, and will be when rank 0 listens.

    Until then seconds pass, in which PyTorch is imported.  So it is none of those that
    systems give to any program that asks for a port; each run begins with another one.

    Raises OSError if there is none.
    """
    first = int(run_id[:8], 16)
    for port in (PORTS[(first + each) % len(PORTS)] for each in range(len(PORTS))):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))  # at all addresses, as PyTorch does
            return port
    raise OSError(f"all ports from {PORTS[0]} to {PORTS[-1]} are in use")


@dataclass(frozen=True, slots=True)
class Placement:
    """A place in a round: ``node`` of ``nodes``, with so many processes each."""

    node: int
    nodes: int
    processes: int

    @property
    def size(self) -> int:
        """The number of ranks in all."""
        return self.nodes * self.processes

    def rank(self, local: int) -> int:
        """Return the rank of a process of this member."""
        return self.node * self.processes + local


def torchrun_variables(
    place: Placement, local: int, master: tuple[str, int], run_id: str, starts: int
) -> Mapping[str, str]:
    """Return what torchrun sets for the process ``local`` of a member.

    ``starts`` are those of the script before this one.
    """
    rank, size = str(place.rank(local)), str(place.size)
    return {
        "LOCAL_RANK": str(local),
        "RANK": rank,
        "GROUP_RANK": str(place.node),
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(place.processes),
        "WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RESTART_COUNT": str(starts),
        "TORCHELASTIC_MAX_RESTARTS": str(starts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 has the store
        "PYTHON_EXEC": sys.executable,
    }


def run_variables(
    token: str, backend: str, coordinator: Coordinator, *, output: bool
) -> Mapping[str, str]:
    """Return the run's own variables; its rendezvous is for the backend ``shoal``."""
    own = {RUN: run_id_of(token), RUN_BACKEND: backend}
    if backend != SHOAL:
        return own
    return {
        **own,
        RUN_TOKEN: token,
        RUN_URL: coordinator.url,
        RUN_FINGERPRINT: coordinator.fingerprint,
        **({RUN_OUTPUT: "1"} if output else {}),
    }


def worker_variables(whole_machine: bool, processes: int) -> Mapping[str, str]:
    """Return the variables of the worker, with the threads of numeric libraries.

    Processes that have a whole machine share its cores evenly.  As with torchrun, one
    variable sets the threads of all libraries.
    """
    own = {k: v for k, v in os.environ.items() if k not in OTHER_THREADS}
    if not whole_machine:
        return own
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return {**own, THREADS: str(max(1, cores // processes))}
