"""OpenAI's list of models, with what the pool knows about each.

It is Anthropic's list as well, because the path is the same.

Sources: OpenAI's API reference, "Models"; Anthropic's API reference, "List Models".
``context_window`` is Groq's field.
"""

from datetime import UTC, datetime
from typing import Literal

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.gateway.context import Gateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.operation import ANYTHING, Operations
from shoal.gateway.model_summaries import (
    ModelSummary,
    model_summaries,
    model_summary,
    seen_by,
)

api = Operations()


class ModelObject(msgspec.Struct, frozen=True):
    """A model; the fields after ``owned_by`` are not OpenAI's."""

    id: str
    created: int  # Unix seconds
    kinds: list[str]  # the kinds of jobs that it does
    features: list[str]  # what requests may ask for
    context_window: int | None  # tokens of prompt and answer; null: unknown
    workers: int  # that take new jobs
    slots: int  # jobs that they run at a time
    display_name: str
    created_at: str  # RFC 3339
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    owned_by: str = "shoal"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelObject]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
    object: Literal["list"] = "list"


@api.get("/v1/models", "List the models", Scope.READ, by_calls=True)
async def list_models(gateway: Gateway, caller: ApiCaller) -> ModelList:
    listed = model_summaries(gateway.hub.pool, seen_by(caller))
    models = [_model_object(gateway, each) for each in listed]
    first, last = (models[0].id, models[-1].id) if models else (None, None)
    return ModelList(models, first, last)


@api.get(
    "/v1/models/{model}", "Show a model", Scope.READ, by_calls=True, pattern=ANYTHING
)
async def show_model(
    gateway: Gateway, request: web.Request, caller: ApiCaller
) -> ModelObject:
    name = request.match_info["model"]
    shown = model_summary(gateway.hub.pool, name, seen_by(caller))
    return _model_object(gateway, shown)


def _model_object(gateway: Gateway, model: ModelSummary) -> ModelObject:
    return ModelObject(
        model.name,
        int(gateway.created_at),
        sorted(kind.value for kind in model.kinds),
        sorted(feature.value for feature in model.features),
        model.context or None,
        model.workers,
        model.slots,
        model.name,
        _rfc3339(gateway.created_at),
    )


def _rfc3339(at: float) -> str:
    return datetime.fromtimestamp(int(at), UTC).isoformat().replace("+00:00", "Z")
