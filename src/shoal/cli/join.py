"""Offer this machine's models to a coordinator."""

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from shoal.cli.flags import add_config, add_config_file, given
from shoal.cli.running import add_log_arguments, log_to_stderr
from shoal.cli.running import run as run_loop
from shoal.cli.terminal import shown
from shoal.cli.whereto import Target, target
from shoal.config import USER_DATA, JoinConfig, check_file, load
from shoal.domain.errors import ConfigError
from shoal.domain.worker import Model
from shoal.engines import gguf_files, local
from shoal.engines.choose import (
    Source,
    Surroundings,
    Wishes,
    model_and_path,
    open_engines,
)
from shoal.protocols import discover
from shoal.protocols.session import Member
from shoal.runtime.clock import LoopClock
from shoal.transports import websocket
from shoal.worker.agent import Agent, Happening
from shoal.worker.offering import Offering
from shoal.worker.own_name import own_name
from shoal.worker.slots import Slots

DRAIN = 60.0  # seconds that running jobs get to end when told to stop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        nargs="?",
        default=os.environ.get("SHOAL_URL", ""),
        help="where the coordinator is: http://HOST:PORT, ws://… (default: the one on "
        "this machine) [SHOAL_URL]",
    )
    add_config(parser, JoinConfig, "join")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help="a model to offer, with its GGUF file for the embedded engine, or a "
        "pattern such as 'qwen*'; may be given several times (default: all that the "
        "servers have, or the largest file here that fits into memory)",
    )
    add_config_file(parser)
    add_log_arguments(parser, "warning")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line"
    )


def run(args: argparse.Namespace) -> int:
    log_to_stderr(args)
    check_file(args.config, {"serve", "join", *discover()})
    config = load(JoinConfig, "join", given(args, JoinConfig, "join"), args.config)
    data = Path(os.environ.get("SHOAL_DATA_DIR") or USER_DATA)
    there = target(args.url, config.wire, config.token, data)
    # What is wrong with the words is said before a model is loaded for them.
    there.protocol.dial(there.url, Member("", Model(""), 1, token=there.token))
    for each in args.model:
        model_and_path(each)
    for engine in config.engine:
        _refuse_itself(engine, there.url)
    wishes = Wishes(
        config.engine,
        tuple(args.model),
        config.slots,
        config.engine_key,
        config.context,
        config.threads,
    )
    around = Surroundings(local.usual_places(), gguf_files.usual_places(data))

    async def join(stop: asyncio.Event) -> int:
        named = nullcontext(config.name) if config.name else own_name(data)
        async with AsyncExitStack() as stack:
            name = stack.enter_context(named)
            sources = await open_engines(wishes, around, stack)
            # Of several engines, each may have a model of the same name.
            several = len({source.label for source in sources}) > 1
            offerings = [
                _offering(
                    source,
                    there,
                    f"{name}-{source.label}" if several else name,
                    config,
                    as_json=args.json,
                )
                for source in sources
            ]
            return await _serve(offerings, stop)

    return run_loop(join)


def _offering(
    source: Source, there: Target, name: str, config: JoinConfig, *, as_json: bool
) -> Offering:
    """Return what keeps an engine's models offered under ``name``."""
    slots = Slots(config.slots or source.engine.slots)
    clock = LoopClock()

    def enlist(model: Model, trouble: Callable[[], None]) -> Agent:
        only_for = frozenset(config.only_for)
        member = Member(name, model, slots.size, there.token, only_for)
        about = {"model": model.name, "slots": slots.size}
        return Agent(
            there.protocol.dial(there.url, member),
            partial(websocket.dial, fingerprint=there.fingerprint),
            source.engine,
            clock,
            random.Random(),
            slots,
            _reporter(there, name, about, as_json=as_json),
            trouble,
        )

    report = _reporter(there, name, {"engine": source.label}, as_json=as_json)
    return Offering(source.engine, source.chosen, enlist, report)


async def _serve(offerings: list[Offering], stop: asyncio.Event) -> int:
    """Run until nothing is offered any more; return 1 if not because of ``stop``."""

    async def leave() -> None:
        await stop.wait()
        for offering in offerings:
            offering.leave()
        await asyncio.sleep(DRAIN)
        raise ConfigError(f"jobs were still running after {DRAIN:g} s: cut off")

    async with asyncio.TaskGroup() as tasks:
        leaving = tasks.create_task(leave())
        await asyncio.gather(*(offering.run() for offering in offerings))
        leaving.cancel()
    return 0 if stop.is_set() else 1


def _refuse_itself(engine: str, coordinator: str) -> None:
    """Raise ConfigError for a coordinator that would be asked by its own worker."""
    place = urlsplit(coordinator).netloc.rpartition("@")[2]
    if place and urlsplit(engine).netloc.rpartition("@")[2] == place:
        raise ConfigError(
            f"--engine: {place} is the coordinator to join; it would ask itself"
        )


def _reporter(
    there: Target, name: str, about: Mapping[str, object], *, as_json: bool
) -> Callable[[Happening], None]:
    """Return what tells the user about a model, or an engine, of a worker."""
    key, what = next(iter(about.items()))
    if key == "engine":
        what = f"engine {what}"

    def report(happening: Happening) -> None:
        if as_json:
            fields: dict[str, object] = {
                "event": happening.event,
                "url": there.shown,
                "name": name,
            }
            if happening.reason:
                fields["reason"] = happening.reason
            print(json.dumps({**fields, **about}), flush=True)
        else:
            reason = f": {happening.reason}" if happening.reason else ""
            line = f"{happening.event} {name} with {what}{reason}"
            print(shown(line), file=sys.stderr, flush=True)

    return report
