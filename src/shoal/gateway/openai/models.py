"""OpenAI's list of models, with what the pool knows about each.

Source: OpenAI's API reference, "Models".  ``context_window`` is Groq's field.
"""

from typing import Literal

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.gateway.context import Gateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.responses import json_response
from shoal.gateway.model_summaries import (
    ModelSummary,
    model_summaries,
    model_summary,
)


class ModelObject(msgspec.Struct, frozen=True):
    """A model; the fields after ``owned_by`` are not OpenAI's."""

    id: str
    created: int  # Unix seconds
    kinds: list[str]  # the kinds of jobs that it does
    features: list[str]  # what requests may ask for
    context_window: int | None  # tokens of prompt and answer; null: unknown
    workers: int  # that take new jobs
    slots: int  # jobs that they run at a time
    object: Literal["model"] = "model"
    owned_by: str = "shoal"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelObject]
    object: Literal["list"] = "list"


async def list_models(
    gateway: Gateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    listed = model_summaries(gateway.hub.pool, seen_by(caller))
    return json_response(ModelList([_model_object(gateway, each) for each in listed]))


async def show_model(
    gateway: Gateway, request: web.Request, caller: ApiCaller
) -> web.Response:
    name = request.match_info["model"]
    shown = model_summary(gateway.hub.pool, name, seen_by(caller))
    return json_response(_model_object(gateway, shown))


def seen_by(caller: ApiCaller) -> str | None:
    """Return the owner whose models a caller sees; None: it sees all."""
    return None if caller.has_scope(Scope.ADMIN) else caller.name


def _model_object(gateway: Gateway, model: ModelSummary) -> ModelObject:
    return ModelObject(
        model.name,
        int(gateway.created_at),
        sorted(kind.value for kind in model.kinds),
        sorted(feature.value for feature in model.features),
        model.context or None,
        model.workers,
        model.slots,
    )
