"""What of a worker's engines is offered to a coordinator, as its wire has it."""

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from shoal.cli.whereto import Target, direct_now
from shoal.config import JoinConfig
from shoal.domain.errors import Unavailable
from shoal.domain.work import Kind
from shoal.domain.worker import Device, Hardware, Model, Offer
from shoal.engines.choose import Source
from shoal.engines.tasks import TASK_NAMES, WithTasks
from shoal.ledger.keys import Signer
from shoal.protocols.session import Member
from shoal.runtime.clock import LoopClock
from shoal.runtime.link import Link, LinkClosed
from shoal.transports import dialling
from shoal.transports.http import NotTrusted
from shoal.transports.tcp_dialling import Scheme
from shoal.worker.agent import Agent, Happening
from shoal.worker.assortment import Assortment, Shelf, Stock
from shoal.worker.calls import Functions
from shoal.worker.offering import Offering
from shoal.worker.places import Find, only
from shoal.worker.ports import Machine, Share
from shoal.worker.slots import Slots
from shoal.worker.watching import Watch

NO_TASKS = frozenset[str]()
DIRECT_LIMIT = 3.0  # seconds to connect where there is another way, too
ABRUPT = 1006  # close code: no more is known (RFC 6455, section 7.4.1)
AWAY = 1012  # close code: it starts again (registered with IANA, RFC 6455, section 7.4)


@dataclass(frozen=True, slots=True)
class Worker:
    """What all that a worker offers has in common.

    ``signer`` is None where the wire knows workers by their names.  ``tell`` is told
    the worker's name, what it is about, and what happened, and ``joined`` that a
    coordinator has let it in.
    """

    name: str
    there: Target
    config: JoinConfig
    device: Device
    hardware: Hardware
    signer: Signer | None
    machine: Machine
    share: Share
    tell: Callable[[str, Mapping[str, object], Happening], None]
    joined: Callable[[], None]

    def report(
        self, name: str, about: Mapping[str, object], happening: Happening
    ) -> None:
        """Tell the user what happened, and whoever waits for it that it joined."""
        self.tell(name, about, happening)
        if happening.event == "joined":
            self.joined()


def memberships(
    worker: Worker, sources: Sequence[Source]
) -> Sequence[Offering | Assortment]:
    """Return what keeps the engines' models offered, each to be run by itself."""
    if worker.there.protocol.joint:
        return [_together(worker, sources)]
    # Of several engines, each may have a model of the same name.
    several = len({source.label for source in sources}) > 1
    return [
        _apart(worker, source, f"{worker.name}-{source.label}")
        if several
        else _apart(worker, source, worker.name)
        for source in sources
    ]


def _together(worker: Worker, sources: Sequence[Source]) -> Assortment:
    """Return what offers all models over one connection."""
    public_key = worker.signer.public_key.hex() if worker.signer else ""

    def describe(model: Model, slots: int) -> Offer:
        chats = Kind.CHAT in model.kinds
        return Offer(
            kinds=model.kinds | {Kind.TASK} if chats else model.kinds,
            models=frozenset({model.name}),
            slots=slots,
            features=model.features,
            context=model.context,
            only_for=frozenset(worker.config.only_for),
            tasks=TASK_NAMES if chats else NO_TASKS,
            device=worker.device,
            public_key=public_key,
        )

    def enlist(
        find: Find,
        offers: tuple[Offer, ...],
        report: Callable[[Happening], None],
    ) -> Agent:
        member = replace(plain_member(worker, worker.name), offers=offers)
        return agent_of(worker, member, find, report, offers)

    def tell(stock: Stock | None, happening: Happening) -> None:
        about: dict[str, object] = {"wire": worker.there.protocol.name}
        if stock is not None:
            about = _about(worker, stock.model, stock.slots)
        worker.report(worker.name, about, happening)

    shelves = [
        Shelf(_watch(worker, each, worker.name), each.chosen, _slots(worker, each))
        for each in sources
    ]
    return Assortment(shelves, describe, enlist, tell)


def _apart(worker: Worker, source: Source, name: str) -> Offering:
    """Return what offers each of an engine's models over a connection of its own."""
    slots = _slots(worker, source)
    watch = _watch(worker, source, name)

    def enlist(model: Model) -> Agent:
        member = replace(
            plain_member(worker, name),
            model=model,
            slots=slots.size,
            tasks=TASK_NAMES if Kind.CHAT in model.kinds else NO_TASKS,
        )
        find = only(WithTasks(source.engine, model), slots, watch.stir)
        about = _about(worker, model, slots.size)
        return agent_of(worker, member, find, partial(worker.report, name, about))

    return Offering(watch, source.chosen, enlist)


def plain_member(worker: Worker, name: str) -> Member:
    """Return how a worker presents itself, whatever it offers."""
    clock = LoopClock()
    return Member(
        name,
        Model(""),
        1,
        worker.there.token,
        only_for=frozenset(worker.config.only_for),
        device=worker.device,
        identity=worker.signer,
        epoch=clock.wall() - clock.now(),
        direct=worker.there.direct,
        hardware=worker.hardware,
        draw=secrets.token_bytes,
        passcode=worker.config.passcode,
    )


def agent_of(
    worker: Worker,
    member: Member,
    find: Find,
    report: Callable[[Happening], None],
    offers: tuple[Offer, ...] | None = None,
    functions: Functions | None = None,
) -> Agent:
    """Return what keeps up a connection for a member; it is to be run."""
    there = worker.there
    return Agent(
        there.protocol.dial(there.url, member),
        partial(_dial, there),
        find,
        LoopClock(),
        random.Random(),
        report,
        worker.machine,
        worker.share,
        offers,
        functions,
    )


@asynccontextmanager
async def _dial(
    there: Target, url: str, headers: Mapping[str, str], message_max: int
) -> AsyncIterator[tuple[Link, Mapping[str, str]]]:
    """Open a connection to a coordinator, at the port that it has by now."""
    async with AsyncExitStack() as opened:
        if url != there.direct:
            yield await opened.enter_async_context(
                _opening(there, url, headers, message_max)
            )
            return
        try:
            url = await direct_now(there)
        except Unavailable as error:
            # Dialling elsewhere tells what becomes of one that is not trusted.
            code = ABRUPT if isinstance(error, NotTrusted) else AWAY
            raise LinkClosed(str(error), code) from error
        if not url:
            raise LinkClosed(f"{there.shown} has no port beside that of HTTP")
        try:
            async with asyncio.timeout(DIRECT_LIMIT):
                link = await opened.enter_async_context(
                    _opening(there, url, headers, message_max)
                )
        except TimeoutError as error:
            why = f"cannot connect to {url}: no answer within {DIRECT_LIMIT:g} s"
            raise LinkClosed(why) from error
        yield link


def _opening(
    there: Target, url: str, headers: Mapping[str, str], message_max: int
) -> AbstractAsyncContextManager[tuple[Link, Mapping[str, str]]]:
    # What is known is the certificate of HTTP.  Where the session finds out who
    # answers, the port has one of its own.
    elsewhere = url.startswith(f"{Scheme.ANY.value}://")
    fingerprint = None if elsewhere else there.fingerprint
    return dialling.dial(url, headers, message_max, fingerprint=fingerprint)


def _slots(worker: Worker, source: Source) -> Slots:
    return Slots(worker.config.slots or source.engine.slots)


def _watch(worker: Worker, source: Source, name: str) -> Watch:
    about = {"engine": source.label}
    return Watch(source.engine, partial(worker.tell, name, about))


def _about(worker: Worker, model: Model, slots: int) -> dict[str, object]:
    about: dict[str, object] = {"model": model.name, "slots": slots}
    if worker.signer is not None:
        about["public_key"] = worker.signer.public_key.hex()
    return about
