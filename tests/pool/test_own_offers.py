"""The offers of a pool to other pools."""

import pytest
from msgspec.structs import replace

from pool.builders import job, joined, leased, load_changed, pool_after
from shoal.domain.facts import (
    Fact,
    JobSubmitted,
    WorkerDraining,
    WorkerJoined,
    WorkerMarked,
)
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.job import Privacy
from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import CHAT_ONLY, Offer, WorkerLoad
from shoal.pool.own_offers import MODELS_MAX, offering_peers, own_load, own_offers

W = WorkerId("w")
CAN = frozenset({Feature.STOP, Feature.TOOLS, Feature.CONTINUE})
STOPS = frozenset({Feature.STOP, Feature.CONTINUE})
TASK = frozenset({JobKind.TASK})


def task_worker(name: str, *tasks: str, model: str = "") -> WorkerJoined:
    models = frozenset({model} if model else ())
    offer = Offer(TASK, models, tasks=frozenset(tasks))
    return WorkerJoined(WorkerId(name), offer, cancels=True)


def test_workers_with_one_model_are_one_offer() -> None:
    pool = pool_after(
        joined("a", slots=2, features=CAN, context=8192),
        joined("b", slots=3, features=STOPS, context=4096),
        joined("c", slots=1, features=STOPS),
    )

    # The pool continues answers itself, so it does not offer CONTINUE.
    features = frozenset({Feature.STOP})
    assert own_offers(pool) == (
        Offer(CHAT_ONLY, frozenset({"m"}), 6, features, 4096, neighbour=True),
    )


def test_worker_with_several_models_counts_in_each_offer() -> None:
    pool = pool_after(joined("a", "n", "m"), joined("b", "n"))

    offers = own_offers(pool)

    assert [(sorted(offer.models), offer.slots) for offer in offers] == [
        (["m"], 1),
        (["n"], 2),
    ]


@pytest.mark.parametrize(
    "facts",
    [
        [joined(neighbour=True)],
        [joined(only_for=frozenset({"al"}))],
        [joined(privacy=Privacy.PRIVATE)],
        [joined(slots=0)],
        [joined(), WorkerDraining(W, "bye")],
        [joined(), WorkerMarked(W, 3, "wrong", JobId("j"))],
    ],
    ids=[
        "neighbour",
        "only for some",
        "only private",
        "no slots",
        "draining",
        "no standing",
    ],
)
def test_private_and_remote_models_are_not_offered(facts: list[Fact]) -> None:
    assert own_offers(pool_after(*facts)) == ()


def test_unfit_worker_counts() -> None:
    assert len(own_offers(pool_after(joined(), load_changed(unfit="is too hot")))) == 1


def test_models_of_peers_that_are_left_out_are_not_offered() -> None:
    pool = pool_after(
        joined("wire:mac/m", "m"), joined("wire:pc/m", "m"), joined("own", "n")
    )

    offers = own_offers(pool, {"wire:mac"})

    assert [(sorted(each.models), each.slots) for each in offers] == [
        (["m"], 1),
        (["n"], 1),
    ]
    assert own_offers(pool, {"wire:mac", "wire:pc", "own"}) == ()
    assert offering_peers(pool) == {"wire:mac", "wire:pc", "own"}


def test_tasks_are_offered_by_name_or_all() -> None:
    (named,) = own_offers(pool_after(task_worker("a", "x"), task_worker("b", "y")))
    (any_,) = own_offers(pool_after(task_worker("a", "x"), task_worker("b")))
    with_model = own_offers(pool_after(task_worker("a", "x", model="m"), joined("b")))

    assert not named.models
    assert named.tasks == {"x", "y"}
    assert any_.tasks == frozenset()
    assert [each.kinds for each in with_model] == [CHAT_ONLY | TASK]
    assert with_model[0].tasks == {"x"}


def test_streaming_is_offered_only_if_all_workers_stream() -> None:
    whole = joined("b")
    whole = replace(whole, offer=replace(whole.offer, streams=False))

    (offer,) = own_offers(pool_after(joined("a"), whole))

    assert not offer.streams


def test_number_of_offered_models_is_limited() -> None:
    models = [f"m{number:03}" for number in range(MODELS_MAX + 1)]

    offers = own_offers(pool_after(joined("w", *models)))

    assert len(offers) == MODELS_MAX
    assert offers[0].models == {"m000"}


def test_load_has_the_queue_length_and_free_slots() -> None:
    pool = pool_after(joined(slots=2), *(JobSubmitted(job(name)) for name in "abc"))

    assert own_load(pool) == WorkerLoad(queued=3, waiting=3)
    pool.apply(leased("a"), 0.0)
    assert own_load(pool) == WorkerLoad(queued=3, waiting=2)
    pool.apply(leased("b"), 0.0)
    assert own_load(pool) == WorkerLoad(queued=3, waiting=1, full=True)


def test_slots_unavailable_to_peers_do_not_count() -> None:
    facts: list[Fact] = [
        joined("full"),
        joined("remote", neighbour=True),
        joined("hot"),
        load_changed("hot", unfit="is too hot"),
        JobSubmitted(job("a")),
        leased("a", "full"),
    ]

    assert own_load(pool_after(*facts)).full
    assert not own_load(pool_after(joined("remote", neighbour=True))).full
