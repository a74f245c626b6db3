"""``/v1/tasks``: which functions can be called, and where."""

from collections import Counter
from functools import partial

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.work import CALLS, Feature
from shoal.gateway.parts import Gateway
from shoal.gateway.respond import json_answer

NAMES_MAX = 10_000  # functions in one answer; of more, the first by name


class Function(msgspec.Struct, frozen=True):
    """A function, how many workers have it, and how many calls they take at a time."""

    name: str
    workers: int
    slots: int


class FunctionList(msgspec.Struct, frozen=True):
    """The functions by name.

    ``workers`` and ``slots`` are of all that call functions, ``code`` says how many of
    these workers run code that is sent along, and ``unnamed`` how many do not say which
    functions they have.
    """

    tasks: list[Function]
    workers: int
    slots: int
    code: int
    unnamed: int


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the path of this face."""
    return [web.get("/v1/tasks", partial(_list, gateway))]


async def _list(gateway: Gateway, request: web.Request) -> web.Response:
    await gateway.access.admit(request, Scope.READ)
    found = gateway.hub.pool.roster.with_model.get(CALLS, {})
    offers = [worker.offer for worker in found.values() if worker.serves]
    workers: Counter[str] = Counter()
    slots: Counter[str] = Counter()
    for offer in offers:
        for name in offer.tasks:
            workers[name] += 1
            slots[name] += offer.slots
    functions = [
        Function(name, workers[name], slots[name])
        for name in sorted(workers)[:NAMES_MAX]
    ]
    features = [offer.features for offer in offers]
    return json_answer(
        FunctionList(
            functions,
            len(offers),
            sum(offer.slots for offer in offers),
            sum(Feature.CODE in each for each in features),
            sum(
                not offer.tasks and Feature.VALUES not in offer.features
                for offer in offers
            ),
        )
    )
