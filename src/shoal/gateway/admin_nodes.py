"""The nodes that wires keep an eye on by themselves, for operators."""

from functools import partial

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.gateway.parts import Gateway
from shoal.gateway.respond import json_answer
from shoal.protocols.crowd import Listed


class NodeStatus(msgspec.Struct, frozen=True):
    """A node; ``since`` is in Unix seconds.

    ``rank`` is null for one that does not count for now, and ``weight`` is its share
    of the work among those that do.
    """

    wire: str
    name: str  # empty where it is not known who is there
    address: str  # empty for this coordinator itself
    state: str  # in the wire's own words
    since: float | None
    score: float
    rank: int | None
    weight: float
    coordinator: bool
    remark: str


class NodeList(msgspec.Struct, frozen=True):
    data: list[NodeStatus]


def routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the paths of this face."""
    return [web.get("/admin/nodes", partial(_list, gateway))]


def nodes_of(gateway: Gateway) -> list[NodeStatus]:
    """Return the nodes of all wires that have any but ourselves."""
    return [
        _shown(gateway, wire, each)
        for wire, rounds in gateway.rounds
        if len(listed := rounds.listed()) > 1
        for each in listed
    ]


async def _list(gateway: Gateway, request: web.Request) -> web.Response:
    await gateway.access.admit(request, Scope.READ)
    return json_answer(NodeList(nodes_of(gateway)))


def _shown(gateway: Gateway, wire: str, node: Listed) -> NodeStatus:
    clock = gateway.clock
    ago = None if node.since is None else clock.now() - node.since
    return NodeStatus(
        wire,
        node.name,
        node.address,
        node.state,
        None if ago is None else clock.wall() - ago,
        node.score,
        node.rank,
        round(node.weight, 4),
        node.coordinator,
        node.remark,
    )
