"""The roster: the workers of each model."""

from pool.builders import joined, pool_after
from shoal.domain.facts import (
    DeploymentRemoved,
    DeploymentSet,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from shoal.domain.ids import WorkerId
from shoal.domain.work import HubModel, JobKind
from shoal.domain.worker import LoadableModel, ModelLibrary, Offer
from shoal.pool.roster import MODEL_MEMORY, SEEN_MAX
from shoal.pool.state import PoolState

W = WorkerId("w")


def test_model_is_known_for_a_while_after_its_last_worker() -> None:
    pool = pool_after(joined("a"), joined("b"))
    assert pool.roster.knows_model("m", 1e9)
    assert not pool.roster.knows_model("other", 0.0)

    pool.apply(WorkerLeft(WorkerId("a"), ""), 50.0)
    assert pool.roster.knows_model("m", 1e9)
    pool.apply(WorkerLeft(WorkerId("b"), ""), 100.0)

    assert pool.roster.knows_model("m", 100.0 + MODEL_MEMORY - 1)
    assert not pool.roster.knows_model("m", 100.0 + MODEL_MEMORY)


def test_models_of_short_lived_workers_are_forgotten() -> None:
    pool = PoolState()

    for number in range(1000):
        now = number * MODEL_MEMORY / 10
        pool.apply(joined("w", f"model{number}"), now)
        pool.apply(WorkerLeft(W, ""), now)

    assert len(pool.roster.models_last_seen) <= 12
    assert not pool.roster.with_model
    assert not pool.roster.available


def test_a_library_that_changes_all_the_time_takes_little_memory() -> None:
    pool = PoolState()

    for number in range(SEEN_MAX // 100 + 10):
        names = [f"{number}-{each}" for each in range(100)]
        library = ModelLibrary(tuple(map(LoadableModel, names)))
        offer = Offer(frozenset({JobKind.MODEL}), library=library)
        pool.apply(WorkerJoined(W, offer, cancels=True), 0.0)
        pool.apply(WorkerLeft(W, ""), 0.0)

    assert len(pool.roster.models_last_seen) == SEEN_MAX
    assert pool.roster.knows_model(names[-1], 1.0)


def test_models_of_the_hub_are_loadable_while_a_machine_copies_models() -> None:
    hub = HubModel("org/gemma", "gemma.gguf", "a" * 40, 5)
    kinds = frozenset({JobKind.MODEL})
    own = LoadableModel("own")
    fetching = Offer(kinds, library=ModelLibrary((own,), fetches=True))
    other = Offer(kinds, library=ModelLibrary((LoadableModel("gemma"),)))
    pool = pool_after(DeploymentSet("gemma", 1, "al", hub=hub))
    assert "gemma" not in pool.roster

    pool.apply(WorkerJoined(W, fetching, cancels=True), 0.0)
    assert pool.roster.has_to_load("gemma")
    assert not pool.roster.has_files("gemma")
    pool.apply(WorkerJoined(WorkerId("other"), other, cancels=True), 0.0)
    assert pool.roster.has_files("gemma")
    pool.apply(WorkerLeft(WorkerId("other"), ""), 0.0)
    assert pool.roster.has_to_load("gemma")
    pool.apply(DeploymentRemoved("gemma", "al"), 0.0)

    assert pool.roster.loadable == {"own": {W: own}}
    pool.apply(WorkerLeft(W, ""), 0.0)
    assert not pool.roster.loadable
    pool.apply(DeploymentSet("gemma", 1, "al", hub=hub), 0.0)
    assert not pool.roster.loadable


def test_slots_of_draining_workers_are_not_counted() -> None:
    pool = pool_after(
        joined("a", "x", "y", slots=3), joined("b", "x", slots=2), joined("c", slots=0)
    )
    slots = pool.roster.slots
    assert (slots["x"], slots["y"], slots["m"]) == (5, 3, 0)

    pool.apply(WorkerDraining(WorkerId("a"), ""), 0.0)
    pool.apply(WorkerDraining(WorkerId("a"), "still"), 0.0)
    assert (slots["x"], slots["y"]) == (2, 0)
    for name in "abc":
        pool.apply(WorkerLeft(WorkerId(name), ""), 0.0)

    assert not slots
