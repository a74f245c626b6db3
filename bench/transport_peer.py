"""The end that takes payloads in bench/transport.py, at a port for each way.

Says the ports on its first line, by way and ``clear`` or ``secure``, and serves until
it is ended.
"""

import asyncio
import json
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import uvloop

import yardstick_transport
from fleet_ends import WAYS
from shoal.transports.clock import LoopClock
from shoal.transports.driver import Driver
from shoal.transports.tcp import TcpLink
from shoal.transports.tcp_server import ACCEPT_ALL, ConnectionPolicy, tcp_listener
from shoal.transports.tls import self_signed_tls


async def main() -> None:
    tls = self_signed_tls("bench")
    ports = {
        "blocking, clear": yardstick_transport.serve(None),
        "blocking, secure": yardstick_transport.serve(tls.context),
    }
    async with AsyncExitStack() as opened:
        for way in WAYS:
            for security, entrance in (
                ("clear", ACCEPT_ALL),
                ("secure", ConnectionPolicy(tls=tls)),
            ):
                serve = partial(_serve, way, security == "secure")
                listening = tcp_listener("127.0.0.1", 0, serve, entrance)
                bound = await opened.enter_async_context(listening)
                ports[f"{way}, {security}"] = bound.port
        print(json.dumps(ports), flush=True)
        await asyncio.get_running_loop().create_future()


async def _serve(way: str, secure: bool, link: TcpLink) -> None:
    session = WAYS[way](link.peer, False, secure)
    await Driver[Any, Any](session, link, LoopClock(), lambda received: None).run()


if __name__ == "__main__":
    uvloop.run(main())
