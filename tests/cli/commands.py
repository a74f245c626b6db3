"""Commands that tests run at a coordinator of their own."""

import asyncio

from gateway.serving import KEY, Pool
from shoal.cli.main import main


async def shoal(pool: Pool, *arguments: str) -> int:
    """Run a command at a pool's coordinator; return its exit status."""
    address = ("--url", pool.url, "--api-key", KEY)
    return await asyncio.to_thread(main, [*arguments, *address])
