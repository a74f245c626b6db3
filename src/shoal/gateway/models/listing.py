"""The models of the pool with what their workers can do, and the list for clients.

The list is OpenAI's, and Anthropic's as well, because the path is the same.

Sources: OpenAI's API reference, "Models"; Anthropic's API reference, "List Models".
``context_window`` is Groq's field.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal, NamedTuple

import msgspec

from shoal.domain.credentials import Scope
from shoal.domain.errors import Forbidden, UnknownModel
from shoal.domain.job_kinds import INFERENCE_KINDS, TEXT_KINDS
from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import LoadableModel
from shoal.gateway.context import ModelsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.operation import ANYTHING, Operations
from shoal.gateway.http.responses import ItemList, item_list
from shoal.pool.job_admission import unknown_model
from shoal.pool.models.aliases import real_model, served_aliases, unknown_alias
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker

api = Operations()

HIDDEN = frozenset({Feature.CONTINUE, Feature.VALUES, Feature.CODE})
"""Features that no request for a model asks for."""

ModelState = Literal["loaded", "loadable", "hosted"]


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model, and the most that a worker with it can do.

    A job goes to a worker that can do all of it, so the most counts.  ``context`` is as
    in ``ServedModel``.  ``workers`` counts those that take new jobs, and ``slots`` the
    jobs that they run at a time.  ``alias_of`` is the model that the name stands for
    now; empty: it is a model.  ``state``: a worker has it; or the first request loads
    it; or only hosted providers have it.  ``size`` is that of its largest file that
    machines could load, in bytes; 0: unknown.
    """

    name: str
    kinds: frozenset[JobKind]
    features: frozenset[Feature]
    context: int
    workers: int
    slots: int
    alias_of: str = ""
    state: ModelState = "loaded"
    size: int = 0


def summarize_model(name: str, workers: Collection[Worker]) -> ModelSummary:
    """Merge what workers offer: all kinds and features, and the largest context."""
    offers = [worker.offer for worker in workers]
    slots = [worker.offer.slots for worker in workers if worker.accepts_jobs]
    kinds = frozenset[JobKind]().union(*(offer.kinds for offer in offers))
    features = frozenset[Feature]().union(*(offer.features for offer in offers))
    return ModelSummary(
        name,
        kinds & INFERENCE_KINDS,
        features - HIDDEN,
        max((offer.context for offer in offers), default=0),
        len(slots),
        sum(slots),
    )


def summarize_loadable(pool: PoolState, name: str, owner: str | None) -> ModelSummary:
    """Merge what machines can load for the jobs of ``owner`` (None: all)."""
    found = _loadable(pool, name, owner)
    kinds = frozenset[JobKind]().union(*(each.kinds for each in found))
    features = frozenset[Feature]().union(*(each.features for each in found))
    context = max((each.context for each in found), default=0)
    shown = features - HIDDEN
    return ModelSummary(
        *(name, kinds, shown, context, 0, 0), state="loadable", size=_size(found)
    )


def _summarize_loaded(
    pool: PoolState, name: str, workers: Collection[Worker], owner: str | None
) -> ModelSummary:
    """Merge what workers offer, with the size that libraries know."""
    size = _size(_loadable(pool, name, owner))
    return replace(summarize_model(name, workers), size=size)


def _loadable(pool: PoolState, name: str, owner: str | None) -> list[LoadableModel]:
    """Return what machines that work for ``owner`` (None: all) know of a model."""
    return [
        known
        for worker_id, known in pool.roster.loadable.get(name, {}).items()
        if _works_for(pool.workers[worker_id], owner)
    ]


def _size(known: Collection[LoadableModel]) -> int:
    return max((each.size for each in known), default=0)


def _summarize_hosted(
    pool: PoolState, name: str, owner: str | None
) -> ModelSummary | None:
    """Merge what hosted providers offer the jobs of ``owner`` (None: all)."""
    workers = pool.roster.hosted.get(name, {}).values()
    if not (usable := [each for each in workers if _works_for(each, owner)]):
        return None
    return replace(summarize_model(name, usable), state="hosted")


class Viewer(NamedTuple):
    """Whose models are shown: those that the jobs of ``owner`` may use; None: all.

    ``hosted``: also those that only hosted providers have.
    """

    owner: str | None
    hosted: bool = False


def seen_by(caller: ApiCaller) -> Viewer:
    """Return which models a caller sees."""
    owner = None if caller.has_scope(Scope.MONITOR) else caller.name
    return Viewer(owner, caller.key.hosted_after is not None)


def model_summaries(pool: PoolState, viewer: Viewer) -> list[ModelSummary]:
    """Return the models that a viewer sees.

    Many clients preselect the first one, for chats: those that write text come first,
    of them those with a worker that takes jobs now, and the most used ones.
    """
    found = [
        _summarize_loaded(pool, name, workers, viewer.owner)
        for name in pool.roster.models
        if (workers := usable_workers(pool, name, viewer.owner))
    ]
    cold = pool.roster.loadable.keys() - pool.roster.with_model.keys()
    found += [
        summary
        for name in cold
        if (summary := summarize_loadable(pool, name, viewer.owner)).kinds
    ]
    if viewer.hosted:
        machines = pool.roster.loadable.keys() | pool.roster.with_model.keys()
        elsewhere = pool.roster.hosted.keys() - machines
        also = (_summarize_hosted(pool, name, viewer.owner) for name in elsewhere)
        found += [summary for summary in also if summary is not None]
    done = pool.speeds.jobs_done
    return sorted(
        found,
        key=lambda each: (
            not each.kinds & TEXT_KINDS,
            each.state == "hosted",
            each.state == "loadable",
            not each.workers,
            -done[each.name],
            each.name,
        ),
    )


def listed_models(
    pool: PoolState, viewer: Viewer, *, loadable: bool
) -> list[ModelSummary]:
    """Return these models, and then the aliases of those that are served now.

    ``loadable``: also those that machines can load.
    """
    found = [
        each
        for each in model_summaries(pool, viewer)
        if loadable or each.state != "loadable"
    ]
    if not pool.aliases:
        return found
    by_name = {each.name: each for each in found}
    return found + [
        replace(by_name[model], name=alias, alias_of=model)
        for alias, model in sorted(served_aliases(pool, viewer.owner))
        if model in by_name
    ]


def model_summary(pool: PoolState, name: str, viewer: Viewer) -> ModelSummary:
    """Return a model that a viewer sees.

    Of an alias, it is the model that a request would get.

    Raises UnknownModel or Forbidden.
    """
    owner = viewer.owner
    model = real_model(pool, name, owner, None, hosted=viewer.hosted)
    if pool.roster.has_to_load(model):
        summary = summarize_loadable(pool, model, owner)
        if not summary.kinds:
            raise Forbidden(f"the machines with {model} work for other keys only")
        return summary if model == name else replace(summary, name=name, alias_of=model)
    if model not in pool.roster.models:
        elsewhere = _summarize_hosted(pool, model, owner) if viewer.hosted else None
        if elsewhere is not None:
            return elsewhere
        reason = unknown_alias(pool, name)
        raise UnknownModel(reason or unknown_model(pool.roster.names, name))
    workers = usable_workers(pool, model, owner)
    if not workers:
        raise Forbidden(f"the workers with {model} work for other keys only")
    summary = _summarize_loaded(pool, model, workers, owner)
    return summary if model == name else replace(summary, name=name, alias_of=model)


def usable_workers(pool: PoolState, model: str, owner: str | None) -> list[Worker]:
    """Return the workers with a model that the jobs of ``owner`` may use; None: all."""
    return [
        worker
        for worker in pool.roster.with_model.get(model, {}).values()
        if _works_for(worker, owner)
    ]


def _works_for(worker: Worker, owner: str | None) -> bool:
    only_for = worker.offer.only_for
    return owner is None or not only_for or owner in only_for


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
    alias_of: str | None  # the model that requests for an alias get now
    state: ModelState  # the first request loads what is loadable
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    owned_by: str = "shoal"


@api.get("/v1/models", "List the models", Scope.READ, by_calls=True)
async def list_models(
    gateway: ModelsGateway, caller: ApiCaller
) -> ItemList[ModelObject]:
    listed = listed_models(
        gateway.hub.pool, seen_by(caller), loadable=gateway.lists_loadable
    )
    models = [_model_object(gateway, each) for each in listed]
    return item_list(models, [each.id for each in models])


@api.get(
    "/v1/models/{model}", "Show a model", Scope.READ, by_calls=True, pattern=ANYTHING
)
async def show_model(
    gateway: ModelsGateway, caller: ApiCaller, model: str
) -> ModelObject:
    shown = model_summary(gateway.hub.pool, model, seen_by(caller))
    return _model_object(gateway, shown)


def _model_object(gateway: ModelsGateway, model: ModelSummary) -> ModelObject:
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
        model.alias_of or None,
        model.state,
    )


def _rfc3339(at: float) -> str:
    return datetime.fromtimestamp(int(at), UTC).isoformat().replace("+00:00", "Z")
