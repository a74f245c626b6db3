"""A process that is connected to a Ray cluster, and forwards calls to it.

The worker runs it as ``python -m shoal.tasks.on_ray.driver PARENT ADDRESS``.  It reads
the commands of ``tasks.process_messages`` from standard input, each for one of the
worker's slots, and exits when standard input is closed or the cluster is lost.
"""

import logging
import os
import signal
import socket
import sys

import msgspec
import ray
from ray import exceptions

from shoal import __version__
from shoal.config.installation import this_installation
from shoal.tasks import process_messages
from shoal.tasks.child import exit_with_parent, open_pipes
from shoal.tasks.child_io import ChildPipes, ParentExited
from shoal.tasks.on_ray import remote
from shoal.tasks.on_ray.executor import RayExecutor
from shoal.tasks.running_call import COORDINATOR_FINGERPRINT, COORDINATOR_URL

CONNECT_TIMEOUT = 10.0  # seconds
UNUSABLE = (exceptions.RayError, OSError, ValueError, ImportError, RuntimeError)
"""Errors of a connection to a cluster that is unusable."""


def main() -> None:
    # Ctrl-C reaches the whole process group; the worker decides when to exit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A cluster that is started here would report its usage to Ray's makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    pipes = open_pipes()
    try:
        exit_with_parent(int(sys.argv[1]))
        _serve(pipes, sys.argv[2])
    except ParentExited:
        pass
    ray.shutdown()
    os._exit(0)


def _serve(pipes: ChildPipes, address: str) -> None:
    (_, modules, trust), _ = pipes.next_with(process_messages.PREPARE)
    files = [each for each in modules if each.endswith(".py")]
    names = [os.path.basename(each).removesuffix(".py") for each in modules]
    named = (COORDINATOR_URL, COORDINATOR_FINGERPRINT)
    variables = tuple((each, os.environ[each]) for each in named if each in os.environ)
    tasks = remote.RayTaskModules(tuple(names), trust, variables)
    try:
        _check_reachable(address)
        ray.init(
            address,
            logging_level=logging.ERROR,
            # Each file is sent to the nodes separately.
            runtime_env={"py_modules": files} if files else None,
        )
        known = ray.get(ray.remote(remote.list_tasks).remote(tasks))
    except UNUSABLE as error:
        pipes.send((process_messages.IMPORT_FAILED, _unusable_message(address, error)))
        raise ParentExited from error
    if isinstance(known, str):
        pipes.send((process_messages.IMPORT_FAILED, known))
        raise ParentExited
    cores = int(ray.cluster_resources().get("CPU", 0))
    pipes.send((process_messages.READY, cores, []), msgspec.msgpack.encode(known))
    RayExecutor(pipes, tasks).run()


def _check_reachable(address: str) -> None:
    """Raise OSError if HOST:PORT is unreachable: Ray itself would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()


def _unusable_message(address: str, error: Exception) -> str:
    """Return why a cluster is unusable, and a remedy."""
    if "No module named 'shoal'" in str(error):
        return (
            f"the Ray cluster at {address} has no shoal to run calls; install on its "
            f"nodes: {this_installation().same_elsewhere(__version__)}"
        )
    if isinstance(error, ConnectionError) and address == "auto":
        return (
            "no Ray cluster runs on this machine: start one (`ray start --head`), name "
            "another with --ray-address HOST:PORT, or let this "
            "worker start one, with --ray-address local"
        )
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"--ray-address {address}: the Ray cluster cannot be used: {lines[-1]}"


if __name__ == "__main__":
    main()
