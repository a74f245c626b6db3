"""The operators' API of model files: who shares a model."""

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest
from shoal.gateway.context import Gateway
from shoal.gateway.http.operation import ANYTHING, Operations
from shoal.models.names import NAME_MAX

api = Operations()


class ModelCopy(msgspec.Struct, frozen=True):
    """A copy of a model's files at a peer, or at this coordinator."""

    peer: str  # its wire and name; empty: this coordinator
    name: str  # what it calls itself, or empty
    size: int | None  # bytes, approximate; null if unknown
    address: str  # at which it was dialled; empty if it dialled
    passed_on: bool  # whether the coordinator passes it on to others


class ModelCopies(msgspec.Struct, frozen=True):
    """The peers that share a model, of the number that were asked."""

    model: str
    asked: int
    data: list[ModelCopy]


@api.get(
    "/admin/models/{model}",
    "Find the peers that share a model",
    Scope.MONITOR,
    pattern=ANYTHING,
)
async def find_model(gateway: Gateway, request: web.Request) -> ModelCopies:
    model = request.match_info["model"]
    if not 0 < len(model) <= NAME_MAX or not model.isprintable():
        raise InvalidRequest(f"a model's name has at most {NAME_MAX} characters")
    sharing, directory = gateway.sharing, gateway.directory
    copies = []
    if (size := await sharing.own_size(model)) is not None:
        copies.append(ModelCopy("", "", size, "", passed_on=True))
    asked = [*sharing.sources.all]
    for found in await sharing.sources.find(model, asked):
        peer = found.source.name
        name, address = directory.profile_of(peer).name, directory.address_of(peer)
        passed_on = found.source.passed_on
        copies.append(ModelCopy(peer, name, found.size, address, passed_on))
    return ModelCopies(model, len(asked), copies)
