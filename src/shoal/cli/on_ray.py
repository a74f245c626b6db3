"""What a worker offers of a Ray cluster: its processors for tasks, and its models."""

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from shoal.cli.functions import check_tasks, membership_of_calls
from shoal.cli.memberships import Worker
from shoal.config import JoinConfig
from shoal.domain.errors import ConfigError
from shoal.engines import local
from shoal.tasks.on_ray.caller import RayCaller
from shoal.worker.blobs import Blobs
from shoal.worker.calls import Functions
from shoal.worker.returning import Distant, Returning

RAY = "ray"  # the word for it, among the engines
SERVE = local.Place(8000, "Ray Serve")


async def engines_of_ray(
    engines: Sequence[str], *, tasks: bool, serve: local.Place = SERVE
) -> tuple[str, ...]:
    """Return the engines to open where ``ray`` is one: Ray Serve, if it has models.

    Another server that is named is taken to be Ray Serve.

    Raises ConfigError if there is none, and no tasks either.
    """
    others = tuple(each for each in engines if each != RAY)
    if any(each.startswith(("http://", "https://")) for each in others):
        return others
    found = await local.find_servers([serve])
    if not found and not tasks:
        raise ConfigError(
            f"--engine ray: Ray Serve has no models at http://{local.LOOPBACK}:"
            f"{serve.port}{serve.path}; name its URL with another --engine, or offer "
            "functions with --tasks MODULE"
        )
    if not found:
        print(
            f"Ray Serve has no models at port {serve.port}: tasks only",
            file=sys.stderr,
        )
    return *others, *found


async def membership_of_ray(
    worker: Worker, config: JoinConfig, stack: AsyncExitStack
) -> Returning:
    """Connect to the cluster; leaving ``stack`` lets it go.

    Raises ConfigError if the cluster or the modules with the tasks are no good.
    """
    blobs = Blobs()
    stack.push_async_callback(blobs.close)

    async def connect() -> Distant:
        caller = RayCaller(
            config.tasks, config.ray_address, config.slots, trust_code=config.trust_code
        )
        try:
            await caller.start()
            check_tasks(config, caller.names)
        except BaseException:
            await caller.close()
            raise
        return caller

    returning = Returning(
        await connect(),
        connect,
        lambda caller: membership_of_calls(worker, Functions(caller, blobs)),
        partial(worker.tell, worker.name, {"engine": RAY}),
    )
    stack.push_async_callback(returning.close)
    return returning
