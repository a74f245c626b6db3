"""Offer this machine's models, and functions, to a coordinator."""

import argparse
import asyncio
import os
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from shoal.cli.callsto import target_of_calls
from shoal.cli.flags import add_config, add_config_file, given
from shoal.cli.functions import membership_of_calls, open_functions
from shoal.cli.memberships import Worker, memberships, plain_member
from shoal.cli.on_ray import RAY, engines_of_ray, membership_of_ray
from shoal.cli.pairing import check_pairing, pair_up
from shoal.cli.reporting import reporter, tell_of_others
from shoal.cli.running import add_log_arguments, log_to_stderr
from shoal.cli.running import run as run_loop
from shoal.cli.whereto import Target, target
from shoal.config import USER_DATA, JoinConfig
from shoal.config.loading import check_file, load
from shoal.domain.errors import ConfigError
from shoal.domain.work import INFERENCES
from shoal.domain.worker import Device
from shoal.engines import gguf_files, local
from shoal.engines.choose import (
    Source,
    Surroundings,
    Wishes,
    first_of,
    model_and_path,
    open_engines,
)
from shoal.ledger.keys import Signer
from shoal.models.library import shareable
from shoal.models.sharing import Sharing
from shoal.protocols import discover
from shoal.worker.agent import Agent
from shoal.worker.assortment import Assortment
from shoal.worker.hardware import this_machine
from shoal.worker.health import Meter
from shoal.worker.identity import identity, identity_of
from shoal.worker.offering import Offering
from shoal.worker.own_name import given_name, own_name
from shoal.worker.ports import Machine
from shoal.worker.returning import Returning

Offered: TypeAlias = Offering | Assortment | Agent | Returning

DRAIN = 60.0  # seconds that running jobs get to end when told to stop
IDENTITIES = "identities"  # the folder of workers' keys
_PORT = re.compile(r":[0-9]+$")
DEVICES = {"DESKTOP": Device.DESKTOP, "SEEKER": Device.PHONE}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        nargs="?",
        default=os.environ.get("SHOAL_URL", ""),
        help="where the coordinator is: http://HOST:PORT, tcp://HOST:PORT of a peer, "
        "ws://… (default: the one on this machine, or else on the local network) "
        "[SHOAL_URL]",
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
    check_file(args.config, {"serve", "join", "x402", *discover()})
    config = load(JoinConfig, "join", given(args, JoinConfig, "join"), args.config)
    data = Path(os.environ.get("SHOAL_DATA_DIR") or USER_DATA)
    with_tasks = bool(config.tasks or config.trust_code)
    # What is wrong with the words is said before a model is loaded for them.
    for each in args.model:
        model_and_path(each)
    device = _device(config.provider_type)
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
        engines = config.engine
        if RAY in engines:
            engines = await engines_of_ray(engines, tasks=with_tasks)
        with_models = bool(engines or args.model) or not with_tasks
        url = with_scheme(args.url, config.wire)
        where = (url, config.wire, config.token, data)
        of_calls = await target_of_calls(*where) if with_tasks else None
        of_models = await target(*where) if with_models else None
        if of_models is not None and of_models.protocol.kinds.isdisjoint(INFERENCES):
            raise ConfigError(
                f"the wire {of_models.protocol.name} carries no models; offer "
                "functions by it, with --tasks MODULE"
            )
        there = of_models or of_calls
        assert there is not None, "something is to be offered"
        if config.pairing_code:
            check_pairing(there)
        for engine in config.engine:
            _refuse_itself(engine, there.url)
        joins = f"{there.shown} with {'functions' if of_calls else 'models'}"
        named = given_name(data, config.name, joins) if config.name else own_name(data)
        async with AsyncExitStack() as stack:
            name = stack.enter_context(named)
            joined, meter = asyncio.Event(), Meter()
            sharing = Sharing(shareable(_files(args.model)))
            worker = Worker(
                name,
                there,
                config,
                device,
                await asyncio.to_thread(this_machine),
                _signer(there, config, name, data),
                Machine(meter.measure, meter.condition),
                partial(sharing.share, there.shown),
                reporter(there, as_json=args.json),
                joined.set,
            )
            offered: list[Offered] = []
            if of_calls is not None:
                signer = _signer(of_calls, config, name, data)
                caller = replace(
                    worker,
                    there=of_calls,
                    signer=signer,
                    tell=reporter(of_calls, as_json=args.json),
                )
                of_calls.protocol.dial(of_calls.url, plain_member(caller, name))
                if RAY in config.engine:
                    offered.append(await membership_of_ray(caller, config, stack))
                else:
                    functions = await open_functions(config, stack)
                    offered.append(membership_of_calls(caller, functions))
            if of_models is not None:
                wished = replace(wishes, engines=engines)
                offered += await _models(worker, wished, around, stack)
            await stack.enter_async_context(sharing)
            return await _serve(worker, offered, joined, stop)

    return run_loop(join)


async def _models(
    worker: Worker, wishes: Wishes, around: Surroundings, stack: AsyncExitStack
) -> Sequence[Offering | Assortment]:
    """Open the engines, and return what keeps their models offered."""
    there = worker.there
    there.protocol.dial(there.url, plain_member(worker, worker.name))
    sources = await open_engines(wishes, around, stack)
    kept, left_out = first_of(sources, there.protocol.models_max)
    if left_out:
        tell_of_others([name for each in kept for name in each.names], left_out)
        await _close_others(sources, kept)
    return memberships(worker, kept)


def with_scheme(url: str, wire: str) -> str:
    """Return a URL as it is meant: HOST:PORT is a coordinator if no wire is named."""
    bare = wire == "auto" and "://" not in url and _PORT.search(url) is not None
    return f"http://{url}" if bare else url


def _files(models: Sequence[str]) -> list[tuple[str, Path]]:
    """Return the models that were named with their files."""
    named = map(model_and_path, models)
    return [(name, path) for name, path in named if path is not None]


def _device(provider_type: str) -> Device:
    """Return what sort of machine a word means; raises ConfigError if none."""
    if provider_type not in DEVICES:
        known = " or ".join(DEVICES)
        raise ConfigError(f"--provider-type {provider_type}: expected {known}")
    return DEVICES[provider_type]


def _signer(there: Target, config: JoinConfig, name: str, data: Path) -> Signer | None:
    """Return the worker's key, where one is wanted."""
    if config.identity is not None:
        return identity(config.identity)
    if there.protocol.signs:
        return identity(identity_of(name, data / IDENTITIES))
    return None


async def _close_others(sources: Sequence[Source], kept: Sequence[Source]) -> None:
    """Give back the memory of models that are not offered."""
    for source in sources:
        if all(each.engine is not source.engine for each in kept):
            await source.engine.close()


async def _serve(
    worker: Worker,
    offered: Sequence[Offered],
    joined: asyncio.Event,
    stop: asyncio.Event,
) -> int:
    """Run until nothing is offered any more; return 1 if not because of ``stop``."""

    async def leave() -> None:
        await stop.wait()
        for each in offered:
            each.leave()
        await asyncio.sleep(DRAIN)
        raise ConfigError(f"jobs were still running after {DRAIN:g} s: cut off")

    async def pair() -> None:
        code, signer = worker.config.pairing_code, worker.signer
        if not code or signer is None:
            return
        await joined.wait()
        paired = await pair_up(worker.there, code, signer.public_key)
        worker.tell(worker.name, {"public_key": signer.public_key.hex()}, paired)

    async with asyncio.TaskGroup() as tasks:
        beside = [tasks.create_task(leave()), tasks.create_task(pair())]
        await asyncio.gather(*(each.run() for each in offered))
        for each in beside:
            each.cancel()
    return 0 if stop.is_set() else 1


def _refuse_itself(engine: str, coordinator: str) -> None:
    """Raise ConfigError for a coordinator that would be asked by its own worker."""
    place = urlsplit(coordinator).netloc.rpartition("@")[2]
    if place and urlsplit(engine).netloc.rpartition("@")[2] == place:
        raise ConfigError(
            f"--engine: {place} is the coordinator to join; it would ask itself"
        )
