"""What a worker has for calls of functions, and how it offers that."""

import os
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from shoal.cli.memberships import Worker, agent_of, plain_member
from shoal.config import JoinConfig
from shoal.domain.errors import ConfigError
from shoal.domain.work import Feature, Kind, Work
from shoal.domain.worker import Offer
from shoal.tasks.limits import PROCESSES_MAX
from shoal.tasks.processes import Processes
from shoal.worker.agent import Agent, Happening
from shoal.worker.blobs import Blobs
from shoal.worker.calls import Functions

CODE_WITHOUT_TOKEN = (
    "no code that is sent along is run, in spite of --trust-code: without --token "
    "nobody knows who sends it, as in an open fleet"
)


async def open_functions(config: JoinConfig, stack: AsyncExitStack) -> Functions:
    """Start the processes that make calls; leaving ``stack`` ends them.

    Raises ConfigError if the modules with the tasks cannot be imported, or have none.
    """
    cores = _cores()
    slots = config.slots or cores
    if slots > PROCESSES_MAX:
        raise ConfigError(f"--slots {slots}: at most {PROCESSES_MAX} processes")
    blobs = Blobs()
    stack.push_async_callback(blobs.close)
    threads = max(1, cores // slots)
    caller = Processes(
        config.tasks, slots, trust_code=config.trust_code, threads=threads
    )
    stack.push_async_callback(caller.close)
    await caller.start()
    check_tasks(config, caller.names)
    return Functions(caller, blobs)


def check_tasks(config: JoinConfig, names: Collection[str]) -> None:
    """Raise ConfigError if there are modules with tasks, and no tasks."""
    if config.tasks and not names:
        raise ConfigError(
            f"--tasks {' '.join(config.tasks)}: no function there is a task; write "
            "@shoal.task above those that are to be"
        )


def _cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def membership_of_calls(worker: Worker, functions: Functions) -> Agent:
    """Return what keeps up the offer to call functions, to be run by itself."""
    caller = functions.caller
    features = (
        {Feature.VALUES, Feature.CODE} if caller.trusts_code else {Feature.VALUES}
    )
    offer = Offer(
        kinds=frozenset({Kind.TASK, Kind.CALL, Kind.LANE}),
        slots=caller.slots,
        features=frozenset(features),
        only_for=frozenset(worker.config.only_for),
        tasks=caller.names,
        device=worker.device,
        public_key=worker.signer.public_key.hex() if worker.signer else "",
    )
    about: dict[str, object] = {
        "tasks": sorted(caller.names),
        "slots": caller.slots,
        "trust_code": caller.trusts_code,
        "wire": worker.there.protocol.name,
    }
    member = replace(plain_member(worker, worker.name), offers=(offer,))
    report = partial(_report, worker, about)
    return agent_of(worker, member, _nowhere, report, (offer,), functions)


def _report(worker: Worker, about: dict[str, object], happening: Happening) -> None:
    """Tell what happened, and also what is not called although it was asked for."""
    if happening.event == "joined" and about["trust_code"] and not worker.there.token:
        happening = replace(happening, reason=CODE_WITHOUT_TOKEN)
    worker.report(worker.name, about, happening)


def _nowhere(work: Work) -> None:
    """Find no place for work that is not for functions."""
