"""Offer this machine's model to a coordinator."""

import argparse
import asyncio
import json
import random
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

from shoal.cli.flags import add_config, add_config_file, given
from shoal.cli.running import log_to_stderr
from shoal.cli.running import run as run_loop
from shoal.config import JoinConfig, check_file, load
from shoal.domain.errors import ConfigError
from shoal.engines.choose import SLOTS, make_engine, model_and_path
from shoal.engines.port import Engine
from shoal.protocols import Protocol, discover
from shoal.protocols.session import Member
from shoal.runtime.clock import LoopClock
from shoal.transports import websocket
from shoal.worker.agent import Agent, Happening

DRAIN = 60.0  # seconds that running chats get to end when told to stop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", help="where the coordinator is: http://HOST:PORT, ws://…"
    )
    add_config(parser, JoinConfig, "join")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help="a model to offer, with its GGUF file for the embedded engine; may be "
        "given several times (default: the demo's, or the first that the server has)",
    )
    add_config_file(parser)
    parser.add_argument("--log-level", default="warning", help="(default: warning)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line"
    )


def run(args: argparse.Namespace) -> int:
    log_to_stderr(args.log_level)
    check_file(args.config, {"serve", "join", *discover()})
    config = load(JoinConfig, "join", given(args, JoinConfig, "join"), args.config)
    protocol = _wire(config.wire, args.url)
    name = config.name or f"{socket.gethostname()}-{secrets.token_hex(2)}"
    # A wrong URL is said before a model is loaded for it.
    protocol.dial(args.url, Member(name, "", config.slots, token=config.token))

    async def join(stop: asyncio.Event) -> int:
        clock = LoopClock()
        async with AsyncExitStack() as stack:
            agents = []
            for wanted in args.model or [""]:
                engine = await _start(config, wanted, stack)
                slots = config.slots or engine.slots
                member = Member(
                    name, engine.model, slots, engine.features, config.token
                )
                agents.append(
                    Agent(
                        protocol.dial(args.url, member),
                        websocket.dial,
                        engine,
                        clock,
                        random.Random(),
                        slots,
                        _reporter(args.url, member, as_json=args.json),
                    )
                )
            return await _serve(agents, stop)

    return run_loop(join)


async def _start(config: JoinConfig, wanted: str, stack: AsyncExitStack) -> Engine:
    model, path = model_and_path(wanted) if wanted else ("", None)
    engine = await make_engine(
        config.engine,
        model,
        path,
        config.slots or SLOTS,
        api_key=config.engine_key,
        context=config.context,
        threads=config.threads,
    )
    stack.push_async_callback(engine.close)
    await engine.start()
    return engine


async def _serve(agents: list[Agent], stop: asyncio.Event) -> int:
    """Run the agents until all have ended; return 1 if not because of ``stop``."""

    async def leave() -> None:
        await stop.wait()
        for agent in agents:
            agent.leave()
        await asyncio.sleep(DRAIN)
        raise ConfigError(f"chats were still running after {DRAIN:g} s: cut off")

    async with asyncio.TaskGroup() as tasks:
        leaving = tasks.create_task(leave())
        await asyncio.gather(*(agent.run() for agent in agents))
        leaving.cancel()
    return 0 if stop.is_set() else 1


def _wire(name: str, url: str) -> Protocol:
    """Return the protocol that is meant.

    Raises ConfigError if there is none of that name, or none for such a URL.
    """
    protocols = discover()
    if name != "auto":
        if name not in protocols:
            known = ", ".join(["auto", *protocols])
            raise ConfigError(f"--wire {name}: there is no such wire; known: {known}")
        return protocols[name]
    scheme = urlsplit(url).scheme
    for protocol in protocols.values():
        if scheme in protocol.schemes:
            return protocol
    raise ConfigError(
        f"{url}: cannot tell the wire; give a URL such as http://HOST:PORT, or --wire"
    )


def _reporter(
    url: str, member: Member, *, as_json: bool
) -> Callable[[Happening], None]:
    def report(happening: Happening) -> None:
        if as_json:
            fields = {
                "event": happening.event,
                "url": url.partition("?")[0],  # what follows may hold the token
                "name": member.name,
                "model": member.model,
                "slots": member.slots,
            }
            if happening.reason:
                fields["reason"] = happening.reason
            print(json.dumps(fields), flush=True)
        else:
            reason = f": {happening.reason}" if happening.reason else ""
            who = f"{member.name} with {member.model}"
            print(f"{happening.event} {who}{reason}", file=sys.stderr, flush=True)

    return report
