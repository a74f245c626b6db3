"""What a pool tells about its models."""

from collections.abc import Collection

import pytest

from shoal.domain.errors import Forbidden, UnknownModel
from shoal.domain.facts import WorkerJoined, WorkerLoadChanged
from shoal.domain.ids import WorkerId
from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import Offer, WorkerLoad
from shoal.gateway.models.listing import (
    ModelSummary,
    Viewer,
    model_summaries,
    model_summary,
)
from shoal.pool.state import PoolState

CHAT, TASK, EMBEDDING = JobKind.CHAT, JobKind.TASK, JobKind.EMBEDDING


def offer(
    *kinds: JobKind,
    features: Collection[Feature] = (),
    context: int = 0,
    slots: int = 1,
    only_for: Collection[str] = (),
    model: str = "m",
) -> Offer:
    return Offer(
        frozenset(kinds or {CHAT}),
        frozenset({model}),
        slots,
        frozenset(features),
        context,
        frozenset(only_for),
    )


def pool_of(*offers: Offer) -> PoolState:
    pool = PoolState()
    for number, each in enumerate(offers):
        pool.apply(WorkerJoined(WorkerId(f"w{number}"), each, cancels=True), 0.0)
    return pool


def test_offers_of_several_workers_are_merged() -> None:
    pool = pool_of(
        offer(CHAT, TASK, features={Feature.TOOLS, Feature.CONTINUE}, context=4096),
        offer(EMBEDDING, features={Feature.STOP}, context=8192, slots=3),
        offer(),
    )

    features = frozenset({Feature.TOOLS, Feature.STOP})
    merged = ModelSummary("m", frozenset({CHAT, EMBEDDING}), features, 8192, 3, 5)
    assert model_summary(pool, "m", Viewer(None)) == merged


def test_worker_that_takes_no_jobs_counts_for_what_it_can_do_only() -> None:
    pool = pool_of(offer(context=4096, slots=2))
    pool.apply(WorkerLoadChanged(WorkerId("w0"), WorkerLoad("too hot")), 0.0)

    shown = model_summary(pool, "m", Viewer(None))

    assert (shown.context, shown.workers, shown.slots) == (4096, 0, 0)


def test_models_that_chats_use_most_come_first() -> None:
    pool = pool_of(
        offer(EMBEDDING, model="a-vectors"),
        offer(model="b-paused"),
        offer(model="d"),
        offer(model="c"),
        offer(JobKind.COMPLETION, model="e-used"),
        offer(JobKind.RERANK, model="b-ranks"),
    )
    pool.apply(WorkerLoadChanged(WorkerId("w1"), WorkerLoad("too hot")), 0.0)
    pool.speeds.jobs_done.update({"a-vectors": 9, "b-paused": 9, "e-used": 1})

    names = [each.name for each in model_summaries(pool, Viewer(None))]

    assert names == ["e-used", "c", "d", "b-paused", "a-vectors", "b-ranks"]


def test_workers_of_other_keys_do_not_count() -> None:
    pool = pool_of(
        offer(context=4096),
        offer(context=8192, only_for={"ada"}),
        offer(model="own", only_for={"ada"}),
    )

    contexts = {
        owner: {
            each.name: each.context for each in model_summaries(pool, Viewer(owner))
        }
        for owner in ("ada", "bob", None)
    }

    assert contexts == {
        "ada": {"m": 8192, "own": 0},
        "bob": {"m": 4096},
        None: {"m": 8192, "own": 0},
    }
    with pytest.raises(Forbidden, match="the workers with own work for other keys"):
        model_summary(pool, "own", Viewer("bob"))


def test_unknown_model_is_named() -> None:
    with pytest.raises(UnknownModel, match="no worker has the model mm"):
        model_summary(pool_of(offer()), "mm", Viewer(None))
