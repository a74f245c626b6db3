"""How the coordinator itself takes part in what it switches."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from shoal.protocols.crowd import CrowdSession
from shoal.protocols.session import Hello
from shoal.runtime.clock import Clock
from shoal.runtime.driver import End
from shoal.runtime.link import Link
from shoal.runtime.local_link import local_links
from shoal.runtime.switching import Switching

AGAIN = 1.0  # seconds after which a session that has ended is begun anew

Serve: TypeAlias = Callable[[str, CrowdSession, Link], Awaitable[End]]
"""Takes the wire, a session and its link; runs it until it ends."""


async def reside(
    switching: Switching,
    wire: str,
    begin: Callable[[float], CrowdSession],
    serve: Serve,
    clock: Clock,
) -> None:
    """Take part until cancelled."""
    while True:
        ours, theirs = local_links("coordinator", "switch")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(switching.serve(theirs, Hello(path="")))
            await serve(wire, begin(clock.now()), ours)
        await asyncio.sleep(AGAIN)
